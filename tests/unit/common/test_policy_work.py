"""What the policy does for a text grows as the text does, whatever stands in it; and a request has
an allowance of bytes and of a processor's time, behind which it is refused, never let pass."""

import json

import pytest

from services.common.policy import Policy, PolicyFile, Subject, load_rules
from services.common.policy.fold import View
from services.common.policy.work import Allowance, TooMuchError, Work

ENOUGH = Allowance(2**40, 1e9)
KINDS = ("card", "iban", "email", "phone", "ssn", "ip", "secret")
# Of each what its candidates, and those that its check takes or not, follow each other in.
WORST = {
    "card": ["4 ", "4444 ", "4.4-", "4444 4444 4444 4444 ", "4111111111111111,", "4", "4\u200b"],
    "iban": ["DE11 ", "gb82 west 1234 5698 7654 33 ", "DE89370400440532013000 ", "de11"],
    "email": ["a@b.", "a@a.co ", "a at b ", "aaaaaaaaaa@"],
    "phone": ["+1 ", "0123 456 ", "415-555-2671 ", "+1-1"],
    "ssn": ["000-00-0000 ", "078-05-1120 "],
    "ip": ["1:1:", "1.1.1.300 ", "a:b:c ", "1.1.1.1."],
    "secret": ["sk-", "eyJ", "-----BEGIN "],
}
TEXTS = [(kind, text) for kind, texts in WORST.items() for text in texts]


def policy(*rules: object) -> Policy:
    return Policy.of(load_rules(json.dumps({"rules": rules}).encode()))


def spent(made: Policy, *texts: str) -> int:
    work = Work(ENOUGH)
    made.texts.check([Subject("t", "input", text, "user", spoken=True) for text in texts], work)
    return work.spent


@pytest.mark.parametrize(("kind", "text"), TEXTS)
def test_a_recognizer_goes_over_a_text_once(kind: str, text: str) -> None:
    made = policy({"name": kind, "pii": [kind], "action": "redact"})
    size = 6000 // len(text)
    some, more = spent(made, text * size), spent(made, text * 4 * size)
    assert some < more < 4.2 * some
    assert more < 128 * 4 * 6000, "each byte costs so many at most"


ALSO = {
    "pattern": ({"pattern": "a.{0,90}b|c", "action": "redact"}, "ac"),
    "jailbreak": ({"jailbreak": 1}, "ignore you are now "),
    "disguises": ({"pattern": "top secret", "disguises": True}, "YWJj 61 62 a b c d "),
    "blobs": ({"pattern": "top secret", "disguises": True}, "dG9wIHNlY3JlbiBwbGFuIEIK,"),
}


@pytest.mark.parametrize("kind", ALSO)
def test_so_do_patterns_and_readings(kind: str) -> None:
    rule, text = ALSO[kind]
    made = policy({"name": "r", **rule})
    assert spent(made, text * 2000) < 4.2 * spent(made, text * 500)


def test_so_does_a_conversation_that_is_read_as_one() -> None:
    """Of a thousand messages with a match over each two of them."""
    made = policy({"name": "c", "pii": ["card"], "action": "redact"})
    halves = ["4111 1111", " 1111 1111"]
    assert spent(made, *(halves * 500)) < 5.2 * spent(made, *(halves * 100))


def test_a_disguise_is_found_behind_any_number_of_decoys() -> None:
    made = policy({"name": "r", "pattern": "top secret", "disguises": True})
    decoys = "dG9wIHNlY3JlbiBwbGFuIEIK, " * 10_000
    subject = Subject("t", "input", decoys + "dGhpcyBpcyBhIHRvcCBzZWNyZXQgdGhpbmc=", "user")
    assert made.texts.check([subject], Work(ENOUGH)).refused is not None


def test_a_window_of_a_long_text_hides_nothing() -> None:
    """Matches on the edges between the pieces in which it is searched, and assertions there."""
    made = policy({"name": "r", "pattern": r"\bsecret plan\b|x{3}$", "action": "redact"})
    piece = 256 * 1024
    for at in (piece - 11, piece - 6, piece, piece + 30):
        text = "y" * (at - 1) + " secret plan " + "z" * (2 * piece)
        (told,) = made.texts.check([Subject("t", "input", text, "user")]).edits.values()
        assert told == text.replace("secret plan", "[R]")
    text = "y" * (piece - 3) + "xxx" + "y" * 2 * piece
    assert made.texts.check([Subject("t", "input", text, "user")]).edits == {}


def test_what_is_too_much_is_refused_with_its_field() -> None:
    made = policy({"name": "q", "pattern": "a.*b|c", "action": "redact"})
    subjects = [Subject(f"m[{n}]", "input", text, "user") for n, text in enumerate(("x", "ac" * 9))]
    with pytest.raises(TooMuchError) as bytes_over:
        made.texts.check(subjects, Work(Allowance(bytes=18)))
    assert bytes_over.value.param == "m[1]"
    times = iter(range(1000))
    subjects[1] = Subject("m[1]", "input", "ac" * 9000, "user")
    with pytest.raises(TooMuchError) as late:
        made.texts.check(subjects, Work(Allowance(seconds=3), lambda: float(next(times))))
    assert late.value.param == "m[1]"
    assert next(times) == 5, "it stopped at the first look behind its time"


@pytest.mark.parametrize(("looks_take_s", "pauses"), [(0.0001, False), (0.01, True)])
def test_what_takes_long_lets_the_process_s_streams_go_on(
    looks_take_s: float, pauses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for Python's lock, which a thread gives up by itself only every 5 ms."""
    slept: list[float] = []
    monkeypatch.setattr("services.common.policy.work.time.sleep", slept.append)
    times = (looks_take_s * n for n in range(1000))
    made = policy({"name": "c", "pii": ["card"], "action": "redact"})
    subject = Subject("m", "input", "4444 " * 3000, "user")
    made.texts.check([subject], Work(ENOUGH, lambda: next(times)))
    assert bool(slept) is pauses


def test_a_service_says_so_to_the_client() -> None:
    file = PolicyFile(None, 1.0, Allowance(bytes=10))
    with pytest.raises(Exception, match="looks at 10 bytes") as refused:
        file.check(policy(), [Subject("prompt", "input", "x" * 11, "user")])
    assert (refused.value.reason, refused.value.param) == ("policy_too_much", "prompt")  # type: ignore[attr-defined]


def test_one_strange_character_does_not_make_a_long_text_a_large_one() -> None:
    """Where each byte is from is worked out when there is a match, in four bytes each."""
    made = policy({"name": "r", "pattern": "secret plan", "action": "redact"})
    text = "é" + "x" * 100_000 + "secret plan"
    (told,) = made.texts.check([Subject("t", "input", text, "user")]).edits.values()
    assert told == "é" + "x" * 100_000 + "[R]"
    assert View("é" + "x" * 9, True, b"", False, True).__dict__.keys().isdisjoint({"_starts"})


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_a_character_of_two_escapes_is_one(size: int) -> None:
    from services.common.policy.stream import AnswerRules, Filter

    rules = load_rules(
        b'{"rules": [{"name": "r", "pattern": "secret", "action": "redact", "where": ["output"]}]}'
    )
    made = AnswerRules.of(rules, "output")
    assert made is not None
    text = json.dumps({"a": "x 𝐬𝐞𝐜𝐫𝐞𝐭 \U0001f512 \\uzz"})
    assert "\\ud835" in text
    one = Filter(made, json=True)
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    left = "".join(one.push(part) for part in parts)
    assert "\\\\uzz" in left, "an escape that is none holds nothing back"
    assert json.loads(left + one.flush())["a"] == "x [R] \U0001f512 \\uzz"

"""Rules on a stream: in whatever portions a text comes, what leaves is what the whole text gives;
and what is held back is the longest end that may still become a match, no more.
"""

import itertools
import json
import re
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.common.policy import load_rules
from services.common.policy.pattern import compiled, shape
from services.common.policy.stream import AnswerRules, Filter


def rules(*told: dict[str, object]) -> AnswerRules:
    """For output, named by letters."""
    full = [{"name": chr(97 + n), "where": ["output"], **rule} for n, rule in enumerate(told)]
    return made_of(json.dumps({"rules": full}))


@cache
def made_of(file: str) -> AnswerRules:
    found = AnswerRules.of(load_rules(file.encode()), "output")
    assert found is not None
    return found


def through(made: AnswerRules, portions: list[str], **how: bool) -> tuple[str, str | None, Filter]:
    one = Filter(made, **how)
    out = "".join(one.push(portion) for portion in portions) + one.flush()
    return out, one.blocked.name if one.blocked else None, one


PATTERNS = [
    "abc", r"\bab{1,3}a\b", "a{2,4}b?", "(?:ab|ba){1,3}c", r"c\Bb", r"(?m)^b.{0,2}c$", r"^a.c",
    "b$",
    r"[^a]\Qa.\E?", r"(?i:AB)c?|bb", r"a(?:b(?:c|a)){0,2}", r"(?s)a.{1,3}b\z", r"é+?{1,3}c",
]  # fmt: skip
PIECES = ["abc", "aba", "ab", "ba", "cb", "aa", "bb", *"abc .\n"]
"""Of texts in which much matches."""
PLAIN = [pattern for pattern in PATTERNS if pattern.isascii()]
ALPHABET = "abc é\u200b\n.Ａ"
sets = st.lists(
    st.tuples(
        st.sampled_from([p for p in PATTERNS if "+" not in p]),
        st.sampled_from(["refuse", "redact", "redact", "flag"]),
        st.booleans(),
    ),
    min_size=1,
    max_size=4,
)


@given(
    sets,
    st.text(ALPHABET, max_size=24) | st.lists(st.sampled_from(PIECES), max_size=9).map("".join),
    st.lists(st.integers(0, 24), max_size=8),
    st.booleans(),
)
@settings(max_examples=120, deadline=None)
@example([("b$", "redact", True), ("abc", "refuse", False)], "ab\u200bb", [1, 2, 3], False)
@example([(r"\bab{1,3}a\b", "redact", True)], "caba", [1], False)
def test_portions_change_nothing(
    chosen: list[tuple[str, str, bool]], text: str, cuts: list[int], as_json: bool
) -> None:
    made = rules(*({"pattern": p, "action": a, "fold": f} for p, a, f in chosen))
    at = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    portions = [text[start:end] for start, end in itertools.pairwise(at)]
    whole, whole_by, first = through(made, [text], json=as_json)
    parts, parts_by, second = through(made, portions, json=as_json)
    assert (parts, parts_by, second.hits) == (whole, whole_by, first.hits)
    singles = through(made, list(text), json=as_json)
    assert singles[:2] == (whole, whole_by)


def plainly(chosen: list[tuple[str, str]], text: str) -> str:
    """The same, of a whole text in ASCII, by RE2 alone."""
    spans = []
    for order, (pattern, action) in enumerate(chosen):
        at = 0
        while (found := compiled(pattern).search(text.encode(), at)) is not None:
            spans.append((found.start(), order, found.end(), action))
            at = found.end()
    out, done, masked = "", 0, 0
    for start, order, end, action in sorted(spans):
        if action == "refuse":
            return out + text[max(done, masked) : start]
        if action == "redact":
            if start >= masked:
                out += text[max(done, masked) : start] + f"[{chr(65 + order)}]"
            masked = max(masked, end)
            done = masked
    return out + text[max(done, masked) :]


@given(
    st.lists(
        st.tuples(st.sampled_from(PLAIN), st.sampled_from(["refuse", "redact"])),
        min_size=1,
        max_size=3,
    ),
    st.lists(st.sampled_from(PIECES), max_size=9),
)  # fmt: skip
@settings(max_examples=120, deadline=None)
@example(  # the second within the first, while the first one's end is held back for the third
    [(pattern, "redact") for pattern in ("a(?:b(?:c|a)){0,2}", r"c\Bb", "a{2,4}b?")],
    ["abcba", "c"],
)
def test_it_is_what_re2_finds_in_the_whole(
    chosen: list[tuple[str, str]], portions: list[str]
) -> None:
    made = rules(*({"pattern": p, "action": a} for p, a in chosen))
    assert through(made, portions)[0] == plainly(chosen, "".join(portions))


@pytest.mark.parametrize("pattern", PLAIN)
def test_held_back_is_the_longest_end_that_may_become_a_match(pattern: str) -> None:
    """Against every continuation of a few letters, tried one by one."""
    made, regexp = rules({"pattern": pattern, "action": "redact"}), compiled(pattern)
    most = shape(pattern).most
    assert most is not None
    tails = ["".join(t) for n in range(4) for t in itertools.product("abc\n", repeat=n)]

    def begins_at(start: int, text: str) -> bool:
        """Whether a match can begin there that is not settled by `text` alone."""
        ends = set()
        for tail in tails:
            found = regexp.search((text + tail).encode(), start)
            ends.add(found.end() if found is not None and found.start() == start else -1)
        return len(ends) > 1

    for letters in itertools.product("abc ", repeat=3):
        text = "".join(letters)
        if regexp.search(text.encode()) is not None:
            continue  # a match that is settled is another test's
        one = Filter(made)
        held = len(text) - len(one.push(text))
        wanted = next((len(text) - s for s in range(len(text)) if begins_at(s, text)), 0)
        assert held == wanted <= most, (text, pattern)


def test_nothing_of_what_is_refused_leaves_at_any_time() -> None:
    made = rules({"pattern": "top secret plan", "action": "refuse"})
    one, out = Filter(made), ""
    for char in "It is stop-top ｔop sec\u200bret plan":
        out += one.push(char)
        assert not out.endswith(("secr", "top s"))
    assert (out, one.blocked and one.blocked.name) == ("It is stop-top ", "a")
    assert one.push("more") == one.flush() == ""


def test_redaction_in_json_leaves_json_and_refuses_what_it_would_break() -> None:
    made = rules({"pii": ["card"], "action": "redact"})
    escaped = "".join(f"\\u{ord(c):04x}" for c in "4111111111111111")
    for number in ("4111 1111 1111 1111", escaped, "4111\\u0020111111111111"):
        told = json.dumps({"a": "x\\y", "b": 1})[:-1] + f', "card": "no. {number}!", "c": [2]}}'
        json.loads(told)
        out, by, _ = through(made, list(told), json=True)
        assert (json.loads(out)["card"], by) == ("no. [CARD]!", None), out
    out, by, _ = through(made, list('{"card": 4111111111111111}'), json=True)
    assert (out, by) == ('{"card": ', "a")
    out, by, _ = through(made, list('{"card": "\\u0034'), json=True)
    assert (out, by) == ('{"card": "\\u0034', None)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_personal_data_is_redacted_whole_and_look_alikes_are_left(size: int) -> None:
    made = rules({"pii": ["card", "iban", "email", "phone", "ssn", "ip"], "action": "redact"})
    text = (
        "Card 4111-1111 1111 1111, not 4111 1111 1111 1112; DE89 3704 0044 0532 0130 00 and not "
        "DE88 3704 0044; bob.b@mail.example.com, +49 171 1234567, 078-05-1120, 10.1.2.3, "
        "v 1.2.3.400, "
        "at 12:30:45 on 2026-11-22, №４１１１１１１１１１１１１１１１, x4111111111111111y"
    )
    out, _, _ = through(made, [text[at : at + size] for at in range(0, len(text), size)])
    assert out == (
        "Card [CARD], not 4111 1111 1111 1112; [IBAN] and not "
        "DE88 3704 0044; [EMAIL], [PHONE], [SSN], [IP], v 1.2.3.400, "
        "at 12:30:45 on 2026-11-22, №[CARD], x[CARD]y"
    )


def test_hidden_characters_are_known_by_their_place() -> None:
    one = Filter(rules({"pattern": "secret", "action": "redact"}))
    assert one.push("a secret b se") == "a [A] b "
    assert (one.decided, one.hid(0, 2), one.hid(1, 3), one.hid(7, 9), one.hid(8, 11)) == (
        11, False, True, True, False,
    )  # fmt: skip


@given(st.text("ab(){}[]|*+?\\.^$1,2:iQE-é ", max_size=16))
@settings(max_examples=500, deadline=None)
def test_a_pattern_taken_apart_is_the_same_pattern(pattern: str) -> None:
    """Whatever RE2 takes is put together again to match the same, or refused in words."""
    try:
        regexp = compiled(pattern)
        taken = shape(pattern)
    except (ValueError, IndexError):
        return
    again = compiled(taken.source)
    compiled(f"(?:{taken.beginnings})\\z")
    for text in ("", "a", "ab", "b1a2", "(a)", "a{1,2}", "aab-b:E é", re.sub(r"\W", "", pattern)):
        ours, its = (one.search(text.encode()) for one in (again, regexp))
        assert (ours and ours.span()) == (its and its.span())
        if its is not None:
            length = len(its.group().decode("utf-8", "replace"))
            assert taken.least <= length <= (length if taken.most is None else taken.most)

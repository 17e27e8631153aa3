"""Rules on every text that a prompt may hold: found however it is spread or disguised, told by
field and never by text.
"""

import asyncio
import base64
import contextlib
import json
import logging
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.common_pb2 import (
    Constraint,
    ContentPart,
    Message,
    Passage,
    Sampling,
    TokenIds,
    Tool,
    ToolCall,
)
from protos.tokenizer_pb2 import Chat, Pool, PromptRequest
from services.common.policy import Policy, PolicyFile, Verdict, load_rules, read_policy
from services.common.policy.metrics import FILE_GOOD
from services.common.policy.trial import trial
from services.tokenizer.prompts.subjects import edit, subjects
from tests.support.tokenizers import byte_level
from tests.support.waiting import until
from tests.unit.tokenizer.conftest import messages, passages

TOKENIZER = byte_level()
CARD = {"name": "card", "pii": ["card"]}
PLACES = ["input", "retrieved"]
SECRET = {"name": "secret", "pattern": "top secret", "roles": ["user"], "where": PLACES}
NUMBER = "4111 1111 1111 1111"


def policy(*rules: object) -> Policy:
    return Policy.of(load_rules(json.dumps({"rules": rules}).encode()))


def check(made: Policy, request: PromptRequest) -> Verdict:
    def decode(ids: object) -> str:
        text: str = TOKENIZER.decode(ids, skip_special_tokens=False)
        return text

    return made.texts.check(subjects(request, decode))


def refused(made: Policy, request: PromptRequest) -> tuple[str, str] | None:
    found = check(made, request).refused
    return (found[0].name, found[1]) if found else None


def redacted(made: Policy, request: PromptRequest) -> PromptRequest:
    edit(request, check(made, request).edits)
    return request


def chat(*turns: tuple[str, str]) -> PromptRequest:
    return PromptRequest(chat=Chat(messages=messages(*turns)))


def test_the_first_field_and_rule_are_told() -> None:
    both = policy(SECRET, CARD)
    request = chat(
        ("system", "Be brief."), ("user", f"my card is {NUMBER}"), ("user", "top secret")
    )
    assert refused(both, request) == ("card", "messages[1].content")
    assert refused(both, chat(("user", f"top secret {NUMBER}"))) == (
        "secret",
        "messages[0].content",
    )
    assert check(both, request).hits == {
        ("card", "refuse", "input"): 1,
        ("secret", "refuse", "input"): 1,
    }


def test_rules_hold_for_their_places_and_roles_in_any_case() -> None:
    made = policy(SECRET)
    assert refused(made, chat(("assistant", "it is top secret"))) is None
    assert refused(made, chat(("user", "It is TOP Secret"))) == ("secret", "messages[0].content")
    found = chat(("user", "?"))
    found.chat.passages.extend(passages("a", "Top secret"))
    assert refused(made, found) == ("secret", "documents[1]")
    assert refused(policy(CARD), PromptRequest(chat=Chat(passages=passages(NUMBER)))) is None


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint(json_schema='{"properties": {"top secret": {}}}'),
        Constraint(json_schema='{"enum": ["t\\u006fp secret"]}'),
        Constraint(regex="a top secret b"),
        Constraint(choice=Constraint.Options(texts=["a", "top secret"])),
        Constraint(grammar='start: "top secret"'),
    ],
)
def test_what_an_answer_is_to_look_like_is_read_too(constraint: Constraint) -> None:
    """The gateway knows what its caller called it."""
    made = policy({"name": "s", "pattern": "top.secret", "action": "redact"})
    sampling = Sampling(constraint=constraint)
    for request in (
        PromptRequest(chat=Chat(messages=messages(("user", "hi"))), sampling=sampling),
        PromptRequest(text="hi", sampling=sampling),
        PromptRequest(token_ids=TokenIds(ids=[1]), sampling=sampling),
    ):
        assert refused(made, request) == ("s", "constraint"), "another form would be another answer"
    harmless = Sampling(constraint=Constraint(json_object=True))
    assert refused(made, PromptRequest(text="hi", sampling=harmless)) is None


def test_title_and_text_of_a_passage_are_two_texts() -> None:
    made = policy(SECRET)
    for title, text, wanted in (
        ("Top secret", "harmless", ("secret", "documents[0]")),
        ("harmless", "Top secret", ("secret", "documents[0]")),
        ("It is top", "secret is this not", None),
    ):
        request = PromptRequest(chat=Chat(passages=[Passage(title=title, text=text)]))
        assert refused(made, request) == wanted


def test_tools_calls_names_and_reasoning_are_read_too() -> None:
    made = policy({"name": "s", "pattern": "top.secret"}, CARD)
    call = ToolCall(name="f", arguments=json.dumps({"q": "top secret"}))
    escaped = ToolCall(name="f", arguments='{"q": "t\\u006fp secret"}')
    at = "messages[0]"

    def says(**fields: object) -> Chat:
        return Chat(messages=[Message(role="assistant", **fields)])  # type: ignore[arg-type]

    for request, param in (
        (Chat(tools=[Tool(name="f", description="Tells the Top Secret.")]), "tools[0]"),
        (Chat(tools=[Tool(name="f", parameters='{"a": "top secret"}')]), "tools[0]"),
        (Chat(tools=[Tool(name="top_secret")]), "tools[0]"),
        (says(tool_calls=[call]), f"{at}.tool_calls[0]"),
        (says(tool_calls=[escaped]), f"{at}.tool_calls[0]"),
        (says(reasoning="top secret"), f"{at}.reasoning_content"),
        (says(name="4111111111111111"), f"{at}.name"),
        (says(tool_call_id="top-secret"), f"{at}.tool_call_id"),
        (says(tool_calls=[ToolCall(id="top secret", name="f")]), f"{at}.tool_calls[0]"),
        (Chat(template_options='{"date_string": "t\\u006fp secret"}'), "chat_template_kwargs"),
    ):  # fmt: skip
        found = refused(made, PromptRequest(chat=request))
        assert found is not None, request
        assert found[1] == param


def test_our_own_ids_of_calls_say_nothing() -> None:
    """Digits of a hash may look like a card's."""
    ids = ("call_4111111111111111abcdef01", "x4111111111111111")
    for id, wanted in zip(ids, (None, ("c", "messages[0].tool_call_id")), strict=True):
        message = Message(role="tool", tool_call_id=id)
        request = PromptRequest(chat=Chat(messages=[message]))
        assert refused(policy({"name": "c", "pii": ["card"]}), request) == wanted


def test_inputs_of_numbers_are_read_once() -> None:
    made = policy({"name": "secret", "pattern": "top secret", "where": ["input"]})
    request = PromptRequest(
        pool=Pool(inputs=[Pool.Input(text="fine"), Pool.Input(text="TOP secret")])
    )
    assert refused(made, request) == ("secret", "inputs[1]")
    request.pool.judged = True
    assert refused(made, request) is None, "a document's, which are no prompt"
    request.pool.queries.add(text="top secret")
    assert refused(made, request) == ("secret", "queries[0]")


def test_completions_are_checked_as_text_and_as_ids() -> None:
    made = policy(SECRET)
    assert refused(made, PromptRequest(text="a top secret")) == ("secret", "prompt")
    ids = TOKENIZER.encode("a top secret").ids
    assert refused(made, PromptRequest(token_ids=TokenIds(ids=ids))) == ("secret", "prompt")
    assert refused(made, PromptRequest(token_ids=TokenIds(ids=ids[:-1]))) is None


@pytest.mark.parametrize(
    "apart", ["4111 1111|1111 1111", "41|11 1111 11|11 1111", "|".join("4111111111111111")]
)
def test_what_is_spread_over_messages_and_parts_is_found_and_redacted(apart: str) -> None:
    pieces = apart.split("|")
    said = [Message(role="user", content=[ContentPart(text=f"{p}")]) for p in pieces]
    goes_on = messages(("assistant", "Go on"))
    between = [message for one in said for message in (one, *goes_on)]
    in_parts = [Message(role="user", content=[ContentPart(text=p) for p in pieces])]
    only_users = policy({**CARD, "roles": ["user"]})
    for request in (PromptRequest(chat=Chat(messages=m)) for m in (between, in_parts)):
        assert refused(only_users, request) == ("card", "messages[0].content")
        whole = redacted(policy({**CARD, "action": "redact", "roles": ["user"]}), request)
        texts = [
            "".join(p.text for p in m.content) for m in whole.chat.messages if m.role == "user"
        ]
        assert "".join(texts) == "[CARD]"
    assert refused(policy(CARD), PromptRequest(chat=Chat(messages=between))) is not None
    of_two = policy({**CARD, "roles": ["assistant", "tool"]})
    assert refused(of_two, PromptRequest(chat=Chat(messages=between))) is None


def test_messages_that_say_nothing_part_nothing() -> None:
    """As those of an assistant that only calls."""
    made = policy({"name": "s", "pattern": "top secret"})
    called = Message(role="assistant", tool_calls=[ToolCall(id="c", name="f")])
    for role, other in (("tool", "tool"), ("tool", "user")):
        turns = messages((role, "It is top"), (other, "secret, they say"))
        request = PromptRequest(chat=Chat(messages=[called, turns[0], called, turns[1]]))
        assert refused(made, request) == ("s", "messages[1].content")
        assert check(made, request).hits == {("s", "refuse", "input"): 1}
        request.chat.messages[2].content.append(ContentPart(text="\u200b \n"))
        assert refused(made, request) is not None, "it shows nothing"
    halves = chat(("user", "4111 1111"), ("user", "1111 1111"), ("assistant", "?"))
    assert check(policy(CARD), halves).hits == {("card", "refuse", "input"): 1}, "however joined"


@pytest.mark.parametrize("apart", ["the top|secret plan", "a top sec|ret", "top |secret"])
def test_words_may_be_parted_where_a_message_ends(apart: str) -> None:
    turns = [("user", piece) for piece in apart.split("|")]
    assert refused(policy(SECRET), chat(*turns)) == ("secret", "messages[0].content")
    assert refused(policy(SECRET), chat(turns[0], ("user", "or"), turns[1])) is None


def test_of_matches_that_overlap_nothing_is_left() -> None:
    rules = [
        {"name": name, "pattern": pattern, "action": "redact"}
        for name, pattern in (("plan", "top secret plan"), ("secret", "secret"), ("of", "plan of"))
    ]
    told = redacted(policy(*rules), chat(("user", "a top secret plan of ours")))
    assert told.chat.messages[0].content[0].text == "a [PLAN] ours"


def test_redaction_leaves_the_rest_as_it_was() -> None:
    stars = {"name": "s", "pattern": "top secret", "action": "redact", "replacement": "***"}
    made = policy({**CARD, "action": "redact"}, stars)
    call = ToolCall(name="f", arguments=json.dumps({"q": f"pay {NUMBER}\n"}))
    request = chat(("user", f"a{NUMBER}b tοp\u200b secret!"))
    request.chat.messages.append(Message(role="assistant", tool_calls=[call]))
    request.chat.tools.append(Tool(name="f", parameters=json.dumps({"default": NUMBER})))
    told = redacted(made, request).chat
    assert told.messages[0].content[0].text == "a[CARD]b ***!"
    assert json.loads(told.messages[1].tool_calls[0].arguments) == {"q": "pay [CARD]\n"}
    assert json.loads(told.tools[0].parameters) == {"default": "[CARD]"}
    assert redacted(made, PromptRequest(text=NUMBER)).text == "[CARD]"


def test_what_cannot_be_redacted_is_refused() -> None:
    made = policy({**CARD, "action": "redact"})
    ids = TOKENIZER.encode(NUMBER).ids
    assert refused(made, PromptRequest(token_ids=TokenIds(ids=ids))) == ("card", "prompt")
    bare = Tool(name="f", parameters='{"default": 4111111111111111}')
    assert refused(made, PromptRequest(chat=Chat(tools=[bare]))) == ("card", "tools[0]")


def test_route_and_flag_let_it_pass() -> None:
    made = policy(
        {**SECRET, "where": ["input"], "action": "route", "model": "local"},
        {**CARD, "action": "flag"},
    )
    verdict = check(made, chat(("user", f"top secret {NUMBER}")))
    assert (verdict.refused, verdict.edits) == (None, {})
    assert verdict.routed is not None
    assert verdict.routed.model == "local"
    assert verdict.hits == {("secret", "route", "input"): 1, ("card", "flag", "input"): 1}


EVASIONS = [
    "ｔｏｐ ｓｅｃｒｅｔ", "t\u200bo\u200bp s\u00adecret", "tоp sеcrеt", "𝐭𝐨𝐩 𝓼𝓮𝓬𝓻𝓮𝓽",
    "t\u0301o\u0308p sécrét",
    "top\u00a0secret", "TOP\u3000SECRET", "to\ufe0fp secret",
    "τop secret",
]  # fmt: skip
DISGUISES = [
    "t0p s3cr3t", "t o p  s e c r e t", "t.o.p  s.e.c.r.e.t", "terces pot", "gbc frperg",
    base64.b64encode(b"this is a top secret thing").decode(),
    base64.b64encode(base64.b64encode(b"this is a top secret thing")).decode(),
    b"it is top secret".hex(" "),
    "see " + base64.urlsafe_b64encode(b"??>>top secret").decode().rstrip("="),
]  # fmt: skip


@pytest.mark.parametrize("text", EVASIONS)
def test_what_only_looks_different_is_the_same(text: str) -> None:
    assert refused(policy(SECRET), chat(("user", f"Is it {text}?"))) is not None
    assert (
        refused(policy({**SECRET, "fold": False}), chat(("user", text))) is None or text.isascii()
    )


@pytest.mark.parametrize("text", DISGUISES)
def test_disguises_are_seen_through_where_a_rule_says_so(text: str) -> None:
    assert refused(policy({**SECRET, "disguises": True}), chat(("user", text))) is not None
    assert refused(policy(SECRET), chat(("user", text))) is None


def test_unicode_is_matched_by_characters() -> None:
    made = policy({"name": "r", "pattern": "stra(ß|ss)e|^東.京$"})
    assert refused(made, chat(("user", "Die STRASSE"))) is not None
    assert refused(made, chat(("user", "東🚰京"))) is not None
    assert refused(made, chat(("user", "東京"))) is None


@pytest.mark.parametrize("pattern", [r"(x+x+)+y", r"(a|a)*$b", r"(.*)*\d\d\d[^ ]{5}@"])
def test_no_pattern_takes_more_than_linear_time(pattern: str) -> None:
    made = policy(
        {"name": "r", "pattern": pattern, "disguises": True}, {"name": "j", "jailbreak": 1}
    )
    request = chat(("user", "xa " * 70_000 + "x" * 30_000), ("user", "1 " * 20_000))
    started = time.process_time()
    assert check(made, request).refused is None
    assert time.process_time() - started < 5.0


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ({"pattern": "("}, r"missing \)"),
        ({"pattern": "(?=x)"}, "invalid perl operator"),
        ({"pattern": r"\1"}, "invalid escape"),
        ({"pattern": "a{100000}"}, "invalid repetition"),
        ({"pattern": "((a{30}){30}){30}"}, "repetition|too large"),
        ({"pattern": "x*"}, "empty text"),
        ({"pattern": r"a|\b"}, "empty text"),
        ({"pattern": "x" * 2000}, "1024"),
        ({"pattern": "x.*y", "where": ["output"]}, "longest match"),
        ({"pattern": "(?:.{1,300}x){3}.{900}.{900}", "where": ["output"]}, "2048"),
        ({"pattern": "(?:.{1,800}x){1}(?:[a-z]{1,900}.){1}.{900}.{900}.{900}"}, "less repetition"),
        ({"pattern": "café"}, "fold: false"),
        ({"pattern": "x", "pii": ["card"]}, "exactly one"),
        ({}, "exactly one"),
        ({"pii": ["passport"]}, "pii"),
        ({"patern": "x"}, "patern"),
        ({"pattern": "x", "where": ["inptu"]}, "where"),
        ({"pattern": "x", "action": "route"}, "model"),
        ({"pattern": "x", "action": "redact", "replacement": 'a"b'}, "replacement"),
        ({"jailbreak": 1, "where": ["output"]}, "not for output"),
        ({"pattern": "x", "disguises": True, "action": "redact"}, "cannot be redacted"),
    ],
)  # fmt: skip
def test_a_bad_rule_is_named_with_what_is_wrong(rule: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=rf"rule 'bad': .*(?:{why})"):
        policy(CARD, {"name": "bad", **rule})


MANY = json.dumps(
    {"rules": [{"name": f"r{n}", "pattern": f"x{n}.{{1,900}}"} for n in range(200)]}
).encode()


@pytest.mark.parametrize(
    ("file", "why"),
    [
        (b"rules: [{name: a, pii: [ip]}, {name: a, pii: [ip]}]", "two rules are called 'a'"),
        (b"rules: &x [*x]", "aliases"),
        (b"rules: [{name: a, pii: [ip]}]\nrules: []", "'rules' is there twice, again on line 2"),
        (b"rules: [{name: a, pii: [ip], action: refuse, action: flag}]", "'action' is there twice"),
        (b"a: [" * 5000, "nested too deep"),
        (b"{" * 5000, "nested too deep"),
        (b"rules: [", "not YAML"),
        (b"\xff\xfe\x00", "not YAML"),
        (b"[]", "not a mapping"),
        (b"rules: []\n" + b"#" * 2**20, "bytes"),
        (b"rules: [" + b"{name: a, pii: [ip]}," * 300 + b"]", "256"),
        (b"ruels: []", "ruels"),
        (MANY, "too large together"),
        (b"rules: [{name: !!python/object:os.system x}]", "not YAML"),
    ],
)
def test_a_hostile_or_bad_file_is_refused_in_words(file: bytes, why: str) -> None:
    started = time.process_time()
    with pytest.raises(ValueError, match=why):
        load_rules(file)
    assert time.process_time() - started < 3.0


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_a_policy_or_a_value_error(content: bytes) -> None:
    for file in (content, b"rules: [{name: a, pattern: '" + content + b"', where: [output]}]"):
        with contextlib.suppress(ValueError):
            Policy.of(load_rules(file))


async def test_a_changed_file_holds_for_what_comes_then_and_a_bad_one_for_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("rules: [{name: secret, pattern: top secret}]")
    file = PolicyFile(path, 0.01)
    await file.start()
    try:
        first = file.current
        assert refused(first, chat(("user", "top secret"))) is not None
        with caplog.at_level(logging.ERROR):
            path.write_text("rules: [{name: secret, pattern: '('}]")
            await until(lambda: bool(file.fault))
        assert (file.current, FILE_GOOD._value.get()) == (first, 0)
        assert file.status()["version"] == first.version
        assert "'secret'" in file.status()["fault"]
        assert "goes on" in caplog.text
        path.unlink()
        await until(lambda: "No such file" in file.fault)
        await asyncio.to_thread(path.write_text, "version: two\nrules: []")
        await until(lambda: file.current.version.startswith("two@"))
        assert (file.fault, FILE_GOOD._value.get()) == ("", 1)
        assert refused(file.current, chat(("user", "top secret"))) is None
        assert file.of(first.digest) is first, "for answers that began under it"
        assert file.of("unknown") is None
    finally:
        await file.stop()


async def test_a_file_that_is_bad_or_away_at_the_start_is_named(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("rules: [{name: x, pattern: '('}]")
    for path, why in ((bad, "'x'"), (tmp_path / "none", "No such file"), (tmp_path, "directory")):
        with pytest.raises(ValueError, match=f"policy file {path}: .*{why}"):
            await PolicyFile(path, 1.0).start()
        with pytest.raises(ValueError, match=f"policy file {path}: .*{why}"):
            read_policy(path)


def test_the_example_s_rules_do_what_their_tests_say() -> None:
    rules = read_policy(Path(__file__).parents[3] / "examples" / "policy.yaml").rules
    cases = list(trial(rules))
    assert [case for case in cases if not case.passed] == []
    assert {case.rule for case in cases} == {rule.name for rule in rules.spec.rules}

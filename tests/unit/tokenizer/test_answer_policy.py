"""Rules on answers: whatever portions tokens come in, and whoever goes on with them, what leaves
is the same; nothing of what is blocked or redacted leaves in any other way.
"""

import json
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.common_pb2 import (
    FINISH_CONTENT_FILTER,
    FINISH_LENGTH,
    FINISH_STOP,
    FINISH_TOOL_CALLS,
    TokenLogprobs,
)
from protos.tokenizer_pb2 import PromptPlan, TextDelta
from protos.worker_pb2 import TokenDelta
from services.common.policy import Policy, load_rules
from services.tokenizer.answers.answer_policy import AnswerPolicy
from services.tokenizer.answers.answer_shape import KNOWN_MARKS, Reasoning, Shape
from services.tokenizer.answers.detokenizer import detokenizer_factory
from services.tokenizer.answers.output import CannotResumeError, Output
from services.tokenizer.answers.token_texts import TokenTexts
from services.tokenizer.prompts.context import Prompt
from services.tokenizer.tool_parsers.hermes import HermesReader
from tests.support.resumes import resume_of
from tests.support.tokenizers import byte_level

TOKENIZER = byte_level()
NEW = detokenizer_factory(TOKENIZER)
TEXTS = TokenTexts(TOKENIZER)
PROMPT = Prompt(np.array([1], np.uint32), 100, PromptPlan(window=512), b"digest", "checkpoint")
CARD = "4111 1111 1111 1111"
BOTH = ["output", "tool_arguments"]
RULES = (
    {"name": "card", "pii": ["card"], "action": "redact", "where": BOTH},
    {"name": "plan", "pattern": "secret plan", "where": BOTH},
    {"name": "seen", "pattern": "water", "action": "flag", "where": ["output"]},
)


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER.encode(text).ids
    return found


@cache
def policy(rules: str = json.dumps(RULES)) -> Policy:
    return Policy.of(load_rules(f'{{"rules": {rules}}}'.encode()))


def output(*stops: str, shaped: bool = False, json: bool = False, logprobs: bool = False) -> Output:
    shape = Shape(Reasoning(KNOWN_MARKS["think"], False), HermesReader()) if shaped else None
    allowed = AnswerPolicy.of(policy(), shaped=shaped, json=json, logprobs=logprobs)
    return Output(NEW(), stops, PROMPT, shape, texts=TEXTS if logprobs else None, policy=allowed)


def played(out: Output, token_ids: list[int], *, finish: int = FINISH_LENGTH) -> list[TextDelta]:
    return portions(out, [token_ids[at : at + 1] for at in range(len(token_ids))], finish)


def portions(out: Output, parts: list[list[int]], finish: int = FINISH_LENGTH) -> list[TextDelta]:
    told = []
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        told.append(out.push(TokenDelta(token_ids=part, finish=finish if last else 0)))
        if out.finish:
            break
    return [delta for delta in told if delta is not None]


def text_of(deltas: list[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_what_is_blocked_never_leaves_and_ends_the_answer_at_its_token() -> None:
    out = output()
    said = ids("The water is a secret") + ids(" plan") + ids(" and more")
    deltas = played(out, said)
    assert text_of(deltas) == "The water is a "
    assert (deltas[-1].finish, out.finish) == (FINISH_CONTENT_FILTER, FINISH_CONTENT_FILTER)
    assert out.blocked is not None
    assert deltas[-1].usage.completion_tokens == len(ids("The water is a secret") + ids(" plan"))
    assert out.hits == {("plan", "refuse", "output"): 1, ("seen", "flag", "output"): 1}


def test_the_rest_flows_while_something_is_held() -> None:
    out = output()
    assert text_of(played(out, ids("Go. A secret "), finish=0)) == "Go. A "
    assert text_of(played(out, ids("place"), finish=0)) == "secret place"


def test_stop_strings_come_first_and_the_end_settles_the_rest() -> None:
    deltas = played(output("END"), ids("a secret END plan"))
    assert (text_of(deltas), deltas[-1].finish) == ("a secret ", FINISH_STOP)
    deltas = played(output(), ids("no. 4111 1111 11"))
    assert (text_of(deltas), deltas[-1].finish) == ("no. 4111 1111 11", FINISH_LENGTH)
    deltas = played(output(), ids(f"no. {CARD}"))
    assert text_of(deltas) == "no. [CARD]"


@pytest.mark.parametrize("portion", [1, 3, 100])
@pytest.mark.parametrize(
    ("said", "stop", "told", "finish", "named"),
    [
        (f"It is {CARD}, yes", "11,", "It is [CARD]", FINISH_STOP, ""),
        ("It is 5555 5555 5555 4444.", "4444", "It is [CARD]", FINISH_STOP, ""),
        ("It is 5555 5555 5555 4444.", "4444.", "It is [CARD]", FINISH_STOP, ""),
        (f"It is {CARD}.", ".", "It is [CARD]", FINISH_STOP, "."),
        ("The secret plan is", "plan", "The ", FINISH_CONTENT_FILTER, ""),
        ("The secret plan is", "cret", "The se", FINISH_STOP, "cret"),
        ("The secret place", "place", "The secret ", FINISH_STOP, "place"),
        ("A lake. secret plan", ". secret plan", "A lake", FINISH_STOP, ". secret plan"),
    ],
)
def test_a_stop_string_cuts_no_match_in_two(
    portion: int, said: str, stop: str, told: str, finish: int, named: str
) -> None:
    """A client who guesses how it ends would have the rest of it, and from `stop` the end."""
    token_ids, out = ids(said), output(stop)
    parts = [token_ids[at : at + portion] for at in range(0, len(token_ids), portion)]
    deltas = portions(out, parts)
    assert (text_of(deltas), deltas[-1].finish, deltas[-1].stop) == (told, finish, named)


def test_of_a_match_that_a_stop_string_ends_no_logprobs_leave() -> None:
    out = output("4444", logprobs=True)
    said = "It is 5555 5555 5555 4444."
    told = [TokenDelta(token_ids=[id], logprobs=[TokenLogprobs()]) for id in ids(said)]
    told[-1].finish = FINISH_LENGTH
    deltas = [delta for one in told if not out.finish and (delta := out.push(one)) is not None]
    shown = "".join(one.token.text for delta in deltas for one in delta.logprobs)
    assert (text_of(deltas), shown) == ("It is [CARD]", "It is ")


WORDS = [
    "The water ",
    f"{CARD} ",
    "secret",
    " plan",
    "東京 ",
    "\n\nUser",
    " s",
    "4111 ",
    " <think>x",
]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_portions_and_losses_change_nothing(data: st.DataObject) -> None:
    shaped, stops = data.draw(st.booleans()), data.draw(st.sampled_from([(), ("\n\nUser",)]))
    begins = "<think>hm, " + CARD + "</think>" if shaped and data.draw(st.booleans()) else ""
    text = begins + "".join(data.draw(st.lists(st.sampled_from(WORDS), min_size=1, max_size=6)))
    all_ids = ids(text)
    cuts = data.draw(st.lists(st.integers(1, max(1, len(all_ids) - 1)), max_size=5))
    bounds = sorted({0, len(all_ids), *cuts})
    parts = [all_ids[start:end] for start, end in pairwise(bounds)]
    one = portions(output(*stops, shaped=shaped), [all_ids])
    many = portions(output(*stops, shaped=shaped), parts)

    def whole(deltas: list[TextDelta]) -> tuple[Any, ...]:
        return (
            text_of(deltas),
            "".join(d.reasoning for d in deltas),
            deltas[-1].finish,
            [id for d in deltas for id in d.token_ids],
        )

    assert whole(many) == whole(one)
    assert CARD not in text_of(one) + "".join(d.reasoning for d in one)
    assert "secret plan" not in text_of(one)
    if len(many) > 1:  # another tokenizer goes on behind some of them
        known = data.draw(st.integers(1, len(many) - 1))
        so_far = resume_of(many[:known])
        so_far.choices[0].characters += sum(len(d.reasoning) for d in many[:known])
        second = output(*stops, shaped=shaped)
        second.resume(so_far)
        done = len(so_far.choices[0].token_ids)
        rest = portions(second, [all_ids[at : at + 1] for at in range(done, len(all_ids))] or [[]])
        assert text_of(many[:known]) + text_of(rest) == text_of(one)
        assert rest[-1].finish == one[-1].finish


def test_another_version_that_would_have_said_something_else_does_not_go_on() -> None:
    deltas = played(output(), ids(f"no. {CARD}, yes"))
    lax = Output(NEW(), (), PROMPT)
    with pytest.raises(CannotResumeError):
        lax.resume(resume_of(deltas[:-1]))


@pytest.mark.parametrize("shaped", [False, True])
@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        (f"Pay {CARD} now, please", "4111"),
        ("It is 東京 a secret plan", "secret"),
        ("All is well 🚰", ""),
    ],
)
def test_logprobs_tell_nothing_that_is_withheld(text: str, hidden: str, shaped: bool) -> None:
    out, all_ids = output(shaped=shaped, logprobs=True), ids(text)
    given, released = "", ""
    for number, id in enumerate(all_ids):
        finish = FINISH_LENGTH if number == len(all_ids) - 1 else 0
        delta = TokenDelta(token_ids=[id], logprobs=[TokenLogprobs(logprob=-1)], finish=finish)
        told = out.push(delta)
        if told is not None:
            released += told.text
            given += "".join(p.token.bytes.decode("latin-1") for p in told.logprobs)
            raw = given.encode("latin-1").decode("utf-8", "replace")
            plain = released.replace("[CARD]", "")
            assert len(raw) <= len(plain) + shaped, "logprobs run ahead of the text"
        if out.finish:
            break
    raw = given.encode("latin-1").decode("utf-8", "replace")
    if hidden:
        assert hidden not in raw
        assert "1111" not in raw
        assert " now, please" in raw or "plan" not in raw
    else:
        assert raw == text


def test_logprobs_of_what_left_before_a_match_are_told_with_it() -> None:
    out, all_ids = output(logprobs=True), ids("It is a secret plan, well")
    given = TokenDelta(token_ids=all_ids, logprobs=[TokenLogprobs(logprob=-1) for _ in all_ids])
    told = out.push(given)
    assert told is not None
    assert (told.text, told.finish) == ("It is a ", FINISH_CONTENT_FILTER)
    assert b"".join(one.token.bytes for one in told.logprobs).rstrip() == b"It is a"
    assert len(told.token_ids) == len(ids("It is a secret")) + len(ids(" plan"))


def test_logprobs_do_not_run_ahead_where_a_call_parts_a_match() -> None:
    out = output(shaped=True, logprobs=True)
    all_ids = [*ids("A secret" + call("{}")), *ids(" plan")]
    raw = b""
    for id in all_ids:
        told = out.push(TokenDelta(token_ids=[id], logprobs=[TokenLogprobs(logprob=-1)]))
        raw += b"".join(one.token.bytes for one in told.logprobs) if told is not None else b""
    assert out.finish == FINISH_CONTENT_FILTER
    assert b"secret" not in raw


def call(arguments: str, name: str = "pay") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def arguments_of(deltas: list[TextDelta]) -> dict[int, str]:
    found: dict[int, str] = {}
    for delta in deltas:
        for one in delta.tool_calls:
            found[one.index] = found.get(one.index, "") + one.arguments
    return found


def test_arguments_are_redacted_and_stay_json() -> None:
    said = f"Paying {CARD}." + call(json.dumps({"to": f"x {CARD}"})) + call('{"n": 1}', "go")
    deltas = played(output(shaped=True), ids(said), finish=FINISH_STOP)
    assert text_of(deltas) == "Paying [CARD]."
    found = arguments_of(deltas)
    assert [json.loads(found[n]) for n in (0, 1)] == [{"to": "x [CARD]"}, {"n": 1}]
    assert deltas[-1].finish == FINISH_TOOL_CALLS


@pytest.mark.parametrize(
    "wrong",
    [
        call('{"a": "the secret plan"}'),
        call('{"a": "the s\\u0065cret plan"}'),
        call('{"n": 4111111111111111}'),
        call("{}", "p4111111111111111"),
    ],
)
def test_what_breaks_json_or_a_name_is_blocked(wrong: str) -> None:
    deltas = played(output(shaped=True), ids("Go: " + wrong + " and on"), finish=FINISH_STOP)
    assert deltas[-1].finish == FINISH_CONTENT_FILTER
    told = text_of(deltas) + "".join(arguments_of(deltas).values())
    told += "".join(one.name for delta in deltas for one in delta.tool_calls)
    assert "cret" not in told.replace("secret pl", "") or "secret" not in told
    assert "4111" not in told
    assert "and on" not in told


def test_structured_text_stays_json() -> None:
    whole = json.dumps({"card": CARD, "n": [1, 2]})
    deltas = played(output(json=True), ids(whole), finish=FINISH_STOP)
    assert json.loads(text_of(deltas)) == {"card": "[CARD]", "n": [1, 2]}
    deltas = played(output(json=True), ids('{"card": 4111111111111111}'), finish=FINISH_STOP)
    assert (text_of(deltas), deltas[-1].finish) == ('{"card": ', FINISH_CONTENT_FILTER)


def test_reasoning_does_not_wait_for_the_answer() -> None:
    out = output(shaped=True)
    told = played(out, ids("<think>a secret</think>Yes"), finish=0)
    assert "".join(d.reasoning for d in told) == "a secret"


def test_without_rules_for_answers_nothing_is_in_the_way() -> None:
    none = policy('[{"name": "card", "pii": ["card"]}]')
    assert AnswerPolicy.of(none, shaped=False, json=False, logprobs=False) is None

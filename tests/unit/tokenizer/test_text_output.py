"""Token deltas become text deltas: counts, plan, usage and finish are right."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from protos.common_pb2 import FINISH_LENGTH, FINISH_NONE, FINISH_STOP, Usage
from protos.tokenizer_pb2 import PromptPlan, TextDelta
from protos.worker_pb2 import TokenDelta
from services.tokenizer.detokenizer import detokenizer_factory
from services.tokenizer.output import Output
from tests.support.tokenizers import byte_level

TOKENIZER = byte_level()
NEW = detokenizer_factory(TOKENIZER)
PLAN = PromptPlan(window=512, user=9)


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER.encode(text).ids
    return found


def output(*stops: str) -> Output:
    return Output(NEW(), stops, PLAN, prompt_tokens=9)


def last(tokens: int, finish: int = FINISH_LENGTH) -> TokenDelta:
    return TokenDelta(
        finish=finish, usage=Usage(prompt_tokens=9, cached_tokens=4, completion_tokens=tokens)
    )


def test_plan_comes_first_and_usage_last() -> None:
    out = output()
    first = out.push(TokenDelta(token_ids=ids("The")))
    second = out.push(TokenDelta(token_ids=ids(" water")))
    end = out.push(last(4))
    assert first is not None
    assert second is not None
    assert end is not None
    assert (first.text, first.plan, first.HasField("usage")) == ("The", PLAN, False)
    assert (second.text, second.HasField("plan"), second.finish) == (" water", False, FINISH_NONE)
    assert (end.text, end.finish, end.usage.cached_tokens) == ("", FINISH_LENGTH, 4)
    assert first.tokens + second.tokens + end.tokens == len(ids("The")) + len(ids(" water"))


def test_tokens_without_text_are_counted_with_the_next() -> None:
    out, tap = output(), ids("🚰")
    assert len(tap) > 1
    assert all(out.push(TokenDelta(token_ids=[id])) is None for id in tap[:-1])
    delta = out.push(TokenDelta(token_ids=tap[-1:]))
    assert delta is not None
    assert (delta.text, delta.tokens, delta.plan) == ("🚰", len(tap), PLAN)


def test_what_is_held_comes_with_the_finish() -> None:
    out = output("ENDE")
    out.push(TokenDelta(token_ids=ids("x EN")))
    out.push(TokenDelta(token_ids=ids("🚰")[:-1]))
    delta = out.push(last(9))
    assert delta is not None
    assert delta.text == "EN\ufffd"
    held = output("ENDE")
    assert held.push(TokenDelta(token_ids=ids("EN"))) is None
    delta = held.push(last(2))
    assert delta is not None
    assert (delta.text, delta.finish) == ("EN", FINISH_LENGTH)


@given(cuts=st.lists(st.integers(0, 60), max_size=8), with_finish=st.booleans())
@settings(deadline=None)
def test_a_stop_string_ends_it_at_the_token_that_completed_it(
    cuts: list[int], with_finish: bool
) -> None:
    all_ids = ids("The water is here.\n\nUser: more 東京")
    until = next(n for n in range(len(all_ids)) if "\n\nUser" in TOKENIZER.decode(all_ids[:n]))
    out, deltas = output("###", "\n\nUser"), list[TextDelta]()
    bounds = [0, *sorted(min(cut, len(all_ids)) for cut in cuts), len(all_ids)]
    for start, end in pairwise(bounds):
        delta = TokenDelta(token_ids=all_ids[start:end])
        if with_finish and end == len(all_ids):
            delta.MergeFrom(last(end))
        told = out.push(delta)
        deltas += [told] if told is not None else []
        if out.stop is not None:
            break
    assert "".join(delta.text for delta in deltas) == "The water is here."
    assert sum(delta.tokens for delta in deltas) == until
    assert [delta.finish for delta in deltas[:-1]] == [FINISH_NONE] * (len(deltas) - 1)
    assert deltas[-1].finish == FINISH_STOP
    assert (deltas[-1].usage.prompt_tokens, deltas[-1].usage.completion_tokens) == (9, until)


def test_early_usage_tells_the_cached_tokens_of_a_stop() -> None:
    out = output("stop")
    out.push(TokenDelta(token_ids=ids("a"), usage=Usage(prompt_tokens=9, cached_tokens=8)))
    delta = out.push(TokenDelta(token_ids=ids(" stop")))
    assert delta is not None
    assert delta.usage.cached_tokens == 8

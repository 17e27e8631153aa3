"""Token deltas become text deltas: counts, plan, usage and finish are right."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from protos.common_pb2 import FINISH_LENGTH, FINISH_NONE, FINISH_STOP, TokenLogprobs, Usage
from protos.tokenizer_pb2 import PromptPlan, TextDelta, TextLogprob
from protos.worker_pb2 import TokenDelta
from services.tokenizer.answers.detokenizer import detokenizer_factory
from services.tokenizer.answers.output import CannotResumeError, Output
from services.tokenizer.answers.token_texts import TokenTexts
from services.tokenizer.prompts.context import Prompt
from tests.support.resumes import resume_of
from tests.support.tokenizers import byte_level, metaspace, unigram, wordpiece

TOKENIZER = byte_level()
NEW = detokenizer_factory(TOKENIZER)
PLAN = PromptPlan(window=512, user=9)
PROMPT = Prompt(np.arange(9, dtype=np.uint32), 100, PLAN, b"digest", "checkpoint")


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER.encode(text).ids
    return found


def output(*stops: str) -> Output:
    return Output(NEW(), stops, PROMPT)


def last(tokens: int, finish: int = FINISH_LENGTH) -> TokenDelta:
    return TokenDelta(
        finish=finish,
        usage=Usage(
            prompt_tokens=9,
            cached_tokens=4,
            completion_tokens=tokens,
        ),
    )


def test_plan_comes_first_and_usage_last() -> None:
    out = output()
    first = out.push(TokenDelta(token_ids=ids("The")))
    second = out.push(TokenDelta(token_ids=ids(" water")))
    end = out.push(last(4))
    assert first is not None
    assert second is not None
    assert end is not None
    assert (first.text, first.plan, first.prompt_digest) == ("The", PLAN, b"digest")
    assert (first.checkpoint, second.checkpoint) == ("checkpoint", "")
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (9, len(ids("The")))
    assert not second.HasField("usage")
    assert (second.text, second.HasField("plan"), second.finish) == (" water", False, FINISH_NONE)
    assert (end.text, end.finish, end.usage.cached_tokens) == ("", FINISH_LENGTH, 4)
    given = [*first.token_ids, *second.token_ids, *end.token_ids]
    assert given == ids("The") + ids(" water")
    assert end.usage.completion_tokens == len(given)


def test_tokens_without_text_are_counted_with_the_next() -> None:
    out, tap = output(), ids("🚰")
    assert len(tap) > 1
    assert all(out.push(TokenDelta(token_ids=[id])) is None for id in tap[:-1])
    delta = out.push(TokenDelta(token_ids=tap[-1:]))
    assert delta is not None
    assert (delta.text, list(delta.token_ids), delta.plan) == ("🚰", tap, PLAN)


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
    assert sum(len(delta.token_ids) for delta in deltas) == until
    assert [delta.finish for delta in deltas[:-1]] == [FINISH_NONE] * (len(deltas) - 1)
    assert deltas[-1].finish == FINISH_STOP
    assert (deltas[-1].usage.prompt_tokens, deltas[-1].usage.completion_tokens) == (9, until)


def test_guesses_are_counted_however_the_answer_ends_and_whoever_goes_on() -> None:
    """Where they were made last nobody may be left to tell of all of them."""
    guessed = [
        TokenDelta(token_ids=ids(text), draft_tokens=3, accepted_tokens=accepted)
        for text, accepted in (("The", 1), (" water", 2), (" ENDE", 0))
    ]
    first = output("ENDE")
    told = [first.push(guessed[0]), first.push(guessed[1])]
    before = [delta for delta in told if delta is not None]
    assert [(d.usage.draft_tokens, d.usage.accepted_tokens) for d in before] == [(3, 1), (6, 3)]
    second = output("ENDE")
    second.resume(resume_of(before))
    for out in (first, second):
        end = out.push(guessed[2])
        assert end is not None
        assert out.stop
        assert (end.usage.draft_tokens, end.usage.accepted_tokens) == (9, 3)


def test_early_usage_tells_the_cached_tokens_of_a_stop() -> None:
    out = output("stop")
    out.push(TokenDelta(token_ids=ids("a"), usage=Usage(prompt_tokens=9, cached_tokens=8)))
    delta = out.push(TokenDelta(token_ids=ids(" stop")))
    assert delta is not None
    assert delta.stop == "stop", "the one that ended it is told"
    assert delta.usage.cached_tokens == 8


# ---- going on behind another tokenizer -----------------------------------------------------

FACTORIES = {make.__name__: make() for make in (byte_level, metaspace, unigram, wordpiece)}
WORDS = ["The water", "京都 🚰🌊é", "\n\nUser:", "##", "U", "\n", " a b"]


def played(out: Output, deltas: list[TokenDelta]) -> list[TextDelta]:
    """What comes out, up to the stop string or the finish."""
    told = []
    for delta in deltas:
        text = out.push(delta)
        told += [text] if text is not None else []
        if out.finish:
            break
    return told


@pytest.mark.parametrize("kind", FACTORIES)
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_text_before_and_after_a_loss_is_the_text_undisturbed(
    kind: str, data: st.DataObject
) -> None:
    tokenizer = FACTORIES[kind]
    new = detokenizer_factory(tokenizer)
    words = data.draw(st.lists(st.sampled_from(WORDS), max_size=6))
    noise = st.lists(st.integers(0, tokenizer.get_vocab_size() + 3), max_size=6)
    all_ids = [id for w in words for id in [*tokenizer.encode(w).ids, *data.draw(noise)]]
    stops = data.draw(st.lists(st.sampled_from(["\n\nUser", "##", "🌊", "er\n"]), max_size=2))
    # In portions, as engine steps bring them; the tokens of the last come with the finish.
    cuts = sorted(data.draw(st.lists(st.integers(0, len(all_ids)), max_size=8)))
    bounds = [0, *cuts, len(all_ids)]
    deltas = [TokenDelta(token_ids=all_ids[a:b]) for a, b in pairwise(bounds)]
    deltas[0].usage.cached_tokens = 4
    deltas[-1].finish = FINISH_LENGTH

    undisturbed = played(Output(new(), stops, PROMPT), deltas)
    lost_after = data.draw(st.integers(0, len(undisturbed) - 1))
    before = undisturbed[:lost_after]
    second = Output(new(), stops, PROMPT)
    known = 0
    if before:
        second.resume(resume_of(before))
        known = len(second.token_ids)
        assert known == sum(len(delta.token_ids) for delta in before)
    # Tokens that gave no text yet are made again, in any portions.
    again = [TokenDelta(token_ids=[id], usage=Usage(cached_tokens=7)) for id in all_ids[known:]]
    again.append(TokenDelta(finish=FINISH_LENGTH, usage=Usage(cached_tokens=7)))
    if not before:
        again[0].usage.cached_tokens = 4
    whole = before + played(second, again)

    def told(deltas: list[TextDelta]) -> tuple[str, list[int], list[bool], int, Usage]:
        return (
            "".join(delta.text for delta in deltas),
            [id for delta in deltas for id in delta.token_ids],
            [delta.HasField("plan") for delta in deltas if delta.HasField("plan")],
            deltas[-1].finish,
            deltas[-1].usage,
        )

    assert told(whole) == told(undisturbed)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"plan": PromptPlan(window=512, user=8)}, "prompt"),
        ({"prompt_digest": b"another"}, "prompt"),
        ({"characters": 2}, "text"),
        ({"characters": 4}, "text"),
        ({"token_ids": ids("ENDE"), "characters": 0}, "text"),
    ],
)
def test_an_answer_that_was_begun_otherwise_is_not_gone_on_with(
    change: dict[str, object], what: str
) -> None:
    first = output("ENDE").push(TokenDelta(token_ids=ids("The")))
    assert first is not None
    known = resume_of([first])
    output("ENDE").resume(known)
    for name, value in change.items():
        begun = known.choices[0] if name in ("token_ids", "characters") else known
        if name == "token_ids":
            begun.token_ids[:] = value
        elif name == "plan":
            begun.plan.CopyFrom(value)
        else:
            setattr(begun, name, value)
    with pytest.raises(CannotResumeError, match=what):
        output("ENDE").resume(known)


def logprobs_of(tokenizer: Tokenizer, token_ids: list[int], echo: str) -> TextDelta:
    """Of an answer that repeats its prompt."""
    prompt = Prompt(np.array(token_ids, np.uint32), 100, PLAN, b"digest", "checkpoint")
    new = detokenizer_factory(tokenizer)
    out = Output(new(), ("gateway, the z",), prompt, texts=TokenTexts(tokenizer), echo=echo)
    told = [TokenLogprobs(logprob=-1)] * len(token_ids)
    said = out.push(
        TokenDelta(
            token_ids=token_ids, logprobs=told, prompt_logprobs=told[1:], finish=FINISH_LENGTH
        )
    )
    assert said is not None
    return said


def cut(text: str, told: Sequence[TextLogprob]) -> list[str]:
    offsets = [one.offset for one in told]
    return [text[first:end] for first, end in pairwise([*offsets, len(text)])]


@pytest.mark.parametrize("make", [byte_level, metaspace, unigram, wordpiece])
def test_offsets_say_where_tokens_begin_in_the_text(make: Callable[[], Tokenizer]) -> None:
    """Of the prompt, and of the answer, though some of it is held back as a stop string may be."""
    tokenizer, text = make(), "The gateway, the water, the links"
    said = logprobs_of(tokenizer, tokenizer.encode(text).ids, text)
    for told, whole in ((said.echo.logprobs, text), (said.logprobs, said.text)):
        pieces = cut(whole, told)
        assert "".join(pieces) == whole == text
        assert [p.strip() for p in pieces] == [one.token.text.strip() for one in told]


def test_a_prompts_special_tokens_are_in_its_text_if_they_were_given() -> None:
    token_ids = [1, *ids("The water")]
    for echo, first in (("The water", ""), ("<|bos|>The water", "<|bos|>")):
        pieces = cut(echo, logprobs_of(TOKENIZER, token_ids, echo).echo.logprobs)
        assert pieces[0] == first
        assert "".join(pieces) == echo


def test_a_prompt_of_one_token_is_told_too() -> None:
    (only,) = logprobs_of(TOKENIZER, ids("a"), "a").echo.logprobs
    assert (only.token.text, only.offset) == ("a", 0)

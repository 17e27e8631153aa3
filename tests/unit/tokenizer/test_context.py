"""What goes into the window, what is cut, and that the plan accounts for every token."""

import copy
from dataclasses import replace

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Encoding, Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from protos.common_pb2 import Sampling, TokenIds
from protos.tokenizer_pb2 import Chat, PromptRequest
from services.common.errors import PenstockError
from services.common.text.content import text_of
from services.tokenizer.checkpoints.models import ServedModel
from services.tokenizer.prompts.context import (
    _Candidate,
    _cuttable,
    _most_that_fits,
    assemble,
    least_output,
)
from services.tokenizer.prompts.encode import PromptEncoder
from tests.support.tokenizers import BOS, CHAT_TEMPLATE, EOS
from tests.unit.tokenizer.conftest import MakeModel, messages, passages


def chat(
    turns: list[tuple[str, str]], texts: tuple[str, ...] = (), max_tokens: int = 0
) -> PromptRequest:
    return PromptRequest(
        chat=Chat(messages=messages(*turns), passages=passages(*texts)),
        sampling=Sampling(max_tokens=max_tokens),
    )


def refusal(model: ServedModel, request: PromptRequest) -> PenstockError:
    with pytest.raises(PenstockError) as refused:
        assemble(model, request)
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
    return refused.value


def test_the_ids_are_those_of_transformers(model: ServedModel) -> None:
    request = chat([("system", "Be brief."), ("user", "What is it?")], ("It is water.",))
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=model.tokenizer, chat_template=CHAT_TEMPLATE, bos_token=BOS, eos_token=EOS
    )
    expected = theirs.apply_chat_template(
        [{"role": m.role, "content": text_of(m)} for m in request.chat.messages],
        documents=[{"title": "Title 1", "text": "It is water."}],
        add_generation_prompt=True,
    )
    assert assemble(model, request).token_ids.tolist() == expected["input_ids"]


def test_a_plan_by_hand(make_model: MakeModel) -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
        "{% for d in documents or [] %}<|documents|>{{ d.title }}{{ d.text }}{% endfor %}"
    )
    model = make_model(100, template)

    def size(text: str) -> int:
        return len(model.tokenizer.encode(text))

    turns = [("system", "Be."), ("user", "old"), ("assistant", "past"), ("user", "What is it?")]
    plan = assemble(model, chat(turns, ("water",), 30)).plan
    assert (plan.window, plan.reserved_output) == (100, 30)
    assert plan.system == size("Be.")
    assert plan.history == size("old") + size("past")
    assert plan.user == size("What is it?")
    assert plan.passages == size("Title 1water")
    assert plan.template == 5
    assert (plan.passages_used, plan.passages_dropped, plan.messages_dropped) == (1, 0, 0)


def test_an_open_max_tokens_takes_what_is_left(model: ServedModel) -> None:
    prompt = assemble(model, chat([("user", "What?")]))
    assert prompt.max_tokens == prompt.plan.reserved_output == 512 - len(prompt.token_ids)


def test_the_marks_that_stand_for_contents_may_stand_in_contents(model: ServedModel) -> None:
    turns = [("system", "\ue0001\ue001"), ("user", "a \ue0000\ue001 b \ue00099\ue001 \ue000")]
    prompt = assemble(model, chat(turns, ("\ue0001\ue001 <|eos|>",)))
    assert model.decode(prompt.token_ids) == (
        "<|bos|><|system|>\ue0001\ue001<|eos|>"
        "<|documents|>[1] Title 1\n\ue0001\ue001 <|eos|><|eos|>"
        "<|user|>a \ue0000\ue001 b \ue00099\ue001 \ue000<|eos|><|assistant|>"
    )
    assert prompt.token_ids.tolist().count(2) == 3  # <|eos|>


# ---- cutting --------------------------------------------------------------------------------

LONG = "the water of the penstock " * 4


def test_passages_go_first_the_last_of_them_before_the_others(model: ServedModel) -> None:
    turns = [("user", "What is it?")]
    kept = [assemble(model, chat(turns, (LONG,) * 8, n)).plan for n in (100, 250, 400, 480)]
    used = [plan.passages_used for plan in kept]
    assert used == sorted(used, reverse=True)
    assert used[0] > used[-1] == 0
    for plan in kept:
        assert plan.passages_used + plan.passages_dropped == 8


def test_the_oldest_turns_go_whole_and_the_best_passage_stays(model: ServedModel) -> None:
    turns = [("system", "Be brief.")]
    for n in range(8):
        turns += [("user", f"question {n} {LONG}"), ("assistant", f"answer {n}")]
    prompt = assemble(model, chat([*turns, ("user", "last")], ("best", "second"), 100))
    text = model.decode(prompt.token_ids)
    assert prompt.plan.passages_used == 1
    assert "best" in text
    assert "Be brief." in text
    assert "last" in text
    dropped = prompt.plan.messages_dropped
    assert dropped > 0
    assert dropped % 2 == 0
    for n in range(8):
        assert (f"question {n}" in text) == (f"answer {n}" in text) == (n >= dropped // 2)


def test_a_turn_in_progress_is_kept_whole(model: ServedModel) -> None:
    turns = [("user", LONG * 4), ("assistant", "old"), ("user", "now"), ("assistant", "call")]
    prompt = assemble(model, chat([*turns, ("tool", "result")], max_tokens=400))
    text = model.decode(prompt.token_ids)
    assert prompt.plan.messages_dropped == 2
    assert "now" in text
    assert "result" in text


def test_what_is_to_be_whole_is_not_cut(model: ServedModel) -> None:
    request = chat([("user", LONG * 4), ("assistant", "old"), ("user", "now")], max_tokens=400)
    assert assemble(model, request).plan.messages_dropped == 2
    request.chat.whole = True
    with pytest.raises(PenstockError) as refused:
        assemble(model, request)
    assert refused.value.reason == "context_length_exceeded"
    short = chat([("user", "now")], ("best", LONG * 20), max_tokens=100)
    short.chat.whole = True
    assert assemble(model, short).plan.passages_dropped == 1, "passages are no messages"


@given(
    sizes=st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=12),
    found=st.lists(st.integers(0, 40), max_size=6),
    max_tokens=st.integers(0, 400),
)
@settings(deadline=None, max_examples=60)
def test_all_is_accounted_for_and_no_more_is_cut_than_needed(
    model: ServedModel, sizes: list[tuple[bool, int]], found: list[int], max_tokens: int
) -> None:
    turns = [("assistant" if answer else "user", "wé " * size) for answer, size in sizes]
    request = chat([*turns, ("user", "last")], tuple("ab " * n for n in found), max_tokens)
    prompt = assemble(model, request)
    plan = prompt.plan
    parts = plan.system + plan.history + plan.passages + plan.user + plan.template
    assert parts == len(prompt.token_ids)
    assert parts + plan.reserved_output <= plan.window == 512
    assert plan.passages_used + plan.passages_dropped == len(found)
    if max_tokens:
        assert prompt.max_tokens == plan.reserved_output == max_tokens
    best = longest_that_fits(model, request, 512 - (max_tokens or least_output(512)))
    assert (plan.passages_used, plan.messages_dropped) == best


def longest_that_fits(model: ServedModel, request: PromptRequest, budget: int) -> tuple[int, int]:
    """(passages used, messages dropped), by trying all that may be kept, the longest first."""
    cuttable = _cuttable(request.chat.messages, request.chat.passages)
    for kept in range(len(cuttable), -1, -1):
        tried = _Candidate.make(model, request.chat, cuttable, kept)
        if len(model.encoder.encode(tried.rendered)) <= budget or kept == 0:
            return tried.passages, len(request.chat.messages) - len(tried.messages)
    raise AssertionError


@given(most=st.integers(0, 3000), answer=st.integers(-1, 3000), guess=st.integers(0, 3000))
def test_the_search_finds_the_most_that_fits_in_few_steps(
    most: int, answer: int, guess: int
) -> None:
    answer, guess, asked = min(answer, most), min(guess, most), []

    def fits(n: int) -> bool:
        asked.append(n)
        return n <= answer

    assert _most_that_fits(fits, guess, most) == answer
    assert len(asked) <= 2 * max(1, abs(answer - guess)).bit_length() + 3
    assert len(asked) == len(set(asked))


# ---- refusals -------------------------------------------------------------------------------


def test_what_cannot_be_cut_is_refused_with_figures(model: ServedModel) -> None:
    error = refusal(model, chat([("user", LONG * 20)]))
    assert (error.param, error.reason) == ("messages", "context_length_exceeded")
    assert "512" in error.message
    assert "penstock" not in error.message


class Counting:
    """A tokenizer that notes the length of what it encodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.lengths: list[int] = []

    def encode_batch(self, texts: list[str], **options: bool) -> list[Encoding]:
        self.lengths += map(len, texts)
        return self._tokenizer.encode_batch(texts, **options)


def counting(model: ServedModel) -> tuple[ServedModel, list[int]]:
    tokenizer = Counting(model.tokenizer)
    encoder = copy.copy(model.encoder)
    encoder._tokenizer = tokenizer  # type: ignore[assignment]
    encoder._quick = None
    return replace(model, tokenizer=tokenizer, encoder=encoder), tokenizer.lengths  # type: ignore[arg-type]


def test_the_hopelessly_long_is_refused_before_it_is_tokenized(model: ServedModel) -> None:
    counted, lengths = counting(model)
    huge = LONG * 2000
    for request in (
        chat([("user", huge)]),
        chat([("user", "old"), ("assistant", "past"), ("user", huge)], (LONG,)),
        PromptRequest(text=huge),
    ):
        assert refusal(counted, request).reason == "context_length_exceeded"
    assert lengths == []
    assert assemble(counted, chat([("user", "hi")], (huge,))).plan.passages_dropped == 1
    assert max(lengths) < 1000
    assert assemble(counted, chat([("user", " " * 10), ("user", "hi")])).token_ids.size


def test_what_is_too_long_is_tokenized_once(model: ServedModel) -> None:
    counted, lengths = counting(model)
    long = "qx" * 300  # no merges: more tokens than the window, but few characters
    assert refusal(counted, chat([("user", long)])).reason == "context_length_exceeded"
    assert len(lengths) == 1


def test_too_many_tokens_asked_for_are_refused_by_their_name(model: ServedModel) -> None:
    for asked in (505, 512, 100_000):
        error = refusal(model, chat([("user", "What is it?")], max_tokens=asked))
        assert (error.param, error.reason) == ("max_tokens", "context_length_exceeded")
        assert f"max_tokens asks for {asked}" in error.message
        assert "at least 0" not in error.message, "what is not counted yet is not told"


def test_roles_and_names_are_checked(model: ServedModel, make_model: MakeModel) -> None:
    assert refusal(model, chat([("user", "a"), ("wizard", "b")])).param == "messages[1].role"
    for name in ("x<|eos|>", "a b", "é", "\ue0009\ue001", "a" * 65, "a\n"):
        named = chat([("user", "a"), ("user", "b")])
        named.chat.messages[1].name = name
        assert refusal(model, named).param == "messages[1].name"
    named.chat.messages[1].name = "Ann_b-2"
    assert assemble(model, named).token_ids.size
    assert refusal(model, chat([])).param == "messages"
    assert refusal(make_model(64, None), chat([("user", "a")])).param == "model"


def test_a_template_s_refusal_names_the_message_that_was_sent(make_model: MakeModel) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    model = make_model(64, template)
    talk = [("user", LONG), ("assistant", LONG), ("user", "a"), ("tool", "b")]
    assert refusal(model, chat(talk)).param == "messages[3]"


def test_a_template_s_refusal_of_a_content_is_told_without_it(make_model: MakeModel) -> None:
    template = (
        "{% for m in messages %}{% if 'secret' in m.content %}{{ raise_exception(m.content) }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    error = refusal(make_model(64, template), chat([("user", "hi"), ("user", "a secret")]))
    assert error.param == "messages"
    assert "secret" not in error.message


# ---- completions ----------------------------------------------------------------------------


def test_text_is_tokenized_as_it_is(model: ServedModel) -> None:
    prompt = assemble(model, PromptRequest(text="The <|eos|> water"))
    assert prompt.token_ids.tolist() == model.tokenizer.encode("The <|eos|> water").ids
    assert prompt.plan.user == len(prompt.token_ids)
    assert prompt.max_tokens == 512 - len(prompt.token_ids)


def test_what_the_tokenizer_adds_is_the_templates_in_the_plan(model: ServedModel) -> None:
    adding = Tokenizer.from_str(model.tokenizer.to_str())
    marks = [("<|bos|>", 1), ("<|eos|>", 2)]
    adding.post_processor = TemplateProcessing(single="<|bos|> $A <|eos|>", special_tokens=marks)
    prompt = assemble(
        replace(model, tokenizer=adding, encoder=PromptEncoder(adding)),
        PromptRequest(text="The water"),
    )
    own = model.tokenizer.encode("The water").ids
    assert prompt.token_ids.tolist() == [1, *own, 2]
    assert (prompt.plan.user, prompt.plan.template) == (len(own), 2)


def test_the_digest_is_the_token_ids(model: ServedModel) -> None:
    """Another tokenizer that goes on with the answer compares it."""

    def digest(*ids: int) -> bytes:
        return assemble(model, PromptRequest(token_ids=TokenIds(ids=ids))).digest

    assert digest(5, 319, 0) == digest(5, 319, 0)
    assert len({digest(5, 319, 0), digest(5, 319), digest(319, 5, 0), digest(5, 319, 0, 0)}) == 4
    assert len(digest(5)) == 16
    assert assemble(model, PromptRequest(text="The water")).digest == digest(
        *model.tokenizer.encode("The water").ids
    )


@pytest.mark.parametrize("kind", ["chat", "ids"])
def test_the_window_is_full_to_the_last_token(model: ServedModel, kind: str) -> None:
    def request(max_tokens: int) -> PromptRequest:
        if kind == "chat":
            return chat([("user", "What is it?")], max_tokens=max_tokens)
        ids = TokenIds(ids=[5] * 100)
        return PromptRequest(token_ids=ids, sampling=Sampling(max_tokens=max_tokens))

    rest = 512 - len(assemble(model, request(1)).token_ids)
    whole = assemble(model, request(rest))
    assert (whole.max_tokens, whole.plan.reserved_output, whole.plan.window) == (rest, rest, 512)
    assert not whole.was_cut
    over = refusal(model, request(rest + 1))
    assert (over.param, over.reason) == ("max_tokens", "context_length_exceeded")
    assert f"at least {512 - rest} and max_tokens asks for {rest + 1}" in over.message


def test_an_open_output_keeps_an_eighth_of_the_window_and_at_most_256(model: ServedModel) -> None:
    assert [least_output(window) for window in (64, 512, 2048, 4096)] == [8, 64, 256, 256]
    prompt = assemble(model, chat([("user", LONG), ("user", "now")] * 16))
    assert prompt.was_cut
    assert prompt.max_tokens == 512 - len(prompt.token_ids) >= 64
    one = PromptRequest(token_ids=TokenIds(ids=[5] * 511))
    assert assemble(model, one).max_tokens == 1


def test_ids_are_used_as_they_are_and_checked(model: ServedModel) -> None:
    good = PromptRequest(token_ids=TokenIds(ids=[5, 319, 0]), sampling=Sampling(max_tokens=7))
    prompt = assemble(model, good)
    assert (prompt.token_ids.tolist(), prompt.max_tokens, prompt.plan.user) == ([5, 319, 0], 7, 3)
    bad = PromptRequest(token_ids=TokenIds(ids=[5, 320]))
    assert refusal(model, bad).param == "prompt[1]"


def test_prompts_that_are_empty_or_too_long(model: ServedModel) -> None:
    assert refusal(model, PromptRequest(text="")).param == "prompt"
    assert refusal(model, PromptRequest()).param == "prompt"
    long = PromptRequest(token_ids=TokenIds(ids=[5] * 512))
    assert (refusal(model, long).param, refusal(model, long).reason) == (
        "prompt",
        "context_length_exceeded",
    )
    greedy = PromptRequest(token_ids=TokenIds(ids=[5] * 500), sampling=Sampling(max_tokens=13))
    assert refusal(model, greedy).param == "max_tokens"

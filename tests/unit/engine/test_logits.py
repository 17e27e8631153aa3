"""Ways of sampling in the engine: the same tokens whatever happens to a request on its way."""

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from services.worker.engine import Request, Sampling
from services.worker.engine.engine import Engine
from services.worker.engine.logits import LogitEdits, gathered
from services.worker.engine.outputs import Logprobs, RequestOutput
from services.worker.engine.steps import MAX_FAILED_STEPS
from tests.support.plain_sampling import adjusted
from tests.support.samplings import as_rows
from tests.unit.engine.checkpoints import VOCAB
from tests.unit.engine.driving import drive, make_engine, make_prompts

Checkpoint = Callable[..., Path]
ALL = Sampling(
    40,
    temperature=1.3,
    seed=11,
    ignore_eos=True,
    min_p=0.01,
    repetition_penalty=1.3,
    frequency_penalty=0.7,
    presence_penalty=0.4,
    # Few tokens are likely, so that they come again and again.
    logit_bias=((5, 2.0), (9, -3.0), (40, 12.0), (41, 12.0), (42, 12.0), (43, 11.0)),
    bad_words=((17,), (20, 21), (1, 2, 3)),
    min_tokens=30,
    stop_token_ids=(8, 30),
    logprobs=3,
)


@pytest.fixture(scope="module")
def engine(checkpoint: Checkpoint) -> Engine:
    return make_engine(checkpoint())


class Told:
    """Of one request: all that came of it."""

    def __init__(self, outputs: list[RequestOutput]) -> None:
        self.tokens = [token for output in outputs for token in output.new_token_ids]
        self.logprobs = [one for output in outputs for one in output.logprobs or ()]
        self.of_prompt = [one for output in outputs for one in output.prompt_logprobs or ()]


def ask(engine: Engine, *requests: Request) -> list[Told]:
    run = drive(engine, requests)
    outputs = [output for step in run.steps for output in step.outputs]
    return [Told([o for o in outputs if o.request_id == r.request_id]) for r in requests]


PROMPT = make_prompts(1, longest=50, seed=4)[0]


def near(found: list[Logprobs], wanted: list[Logprobs]) -> None:
    assert [one.top_ids for one in found] == [one.top_ids for one in wanted]
    for name in ("logprob", "top_logprobs"):
        values = [
            np.hstack([[], *(getattr(one, name) for one in told)]) for told in (found, wanted)
        ]
        assert values[0] == pytest.approx(values[1], abs=2e-3)


def test_edits_are_what_the_definitions_say() -> None:
    """Token by token, from any beginning."""
    generator = np.random.default_rng(1)
    logits = generator.normal(size=VOCAB).astype(np.float32) * 3
    prompt, output = PROMPT, generator.integers(3, 40, 60).tolist()
    whole = LogitEdits.of(ALL, prompt, [], ALL.stop_token_ids)
    assert whole is not None
    for count in range(len(output)):
        later = LogitEdits.of(ALL, prompt, output[:count], ALL.stop_token_ids)
        before = LogitEdits.of(ALL, prompt, output[: max(0, count - 4)], ALL.stop_token_ids)
        assert before is not None
        kept = before._edits.tolist()
        told: list[list[Any]] = []
        for edits, guesses in (
            (whole, ()),
            (later, ()),
            (before, output[max(0, count - 4) : count]),
        ):
            rows = as_rows([ALL], [len(prompt) + count])
            found = logits.copy()
            told.append(gathered([(edits, guesses)], rows).tolist())
            for token, factor, add in told[-1]:
                x = found[token]
                found[token] = (x / factor if x > 0 else x * factor) + add
            want = adjusted(logits, ALL, prompt, output[:count])
            assert found == pytest.approx(want, rel=1e-5, abs=1e-5)
        assert sorted(told[0]) == sorted(told[2]), "the same numbers, with guesses as without"
        assert before._edits.tolist() == kept
        pieces = before.at(len(prompt) + count, output[count : count + 3])
        copied = sum(len(piece) for piece in pieces if not np.shares_memory(piece, before._edits))
        assert copied < 12, "guesses cost what they change"
        whole.append(output[count])


@pytest.mark.parametrize("field", ["temperature", "seed", "logprobs", "min_p"])
def test_who_asks_for_nothing_has_no_edits(field: str) -> None:
    asked = replace(Sampling(5), **{field: 1})
    assert LogitEdits.of(asked, PROMPT, [4], (2,)) is None


def test_bans_and_least_lengths_hold(engine: Engine) -> None:
    (told,) = ask(engine, Request("a", PROMPT, ALL))
    assert len(told.tokens) >= 30
    assert not {8, 30} & {*told.tokens[:29]}
    pairs = set(zip(told.tokens, told.tokens[1:], strict=False))
    assert 17 not in told.tokens
    assert (20, 21) not in pairs
    repeated = replace(ALL, logit_bias=((17, 100.0),), bad_words=())
    assert 17 in ask(engine, Request("b", PROMPT, repeated))[0].tokens, "it is the ban that holds"


def test_neighbours_and_preemption_change_nothing(checkpoint: Checkpoint, engine: Engine) -> None:
    (alone,) = ask(engine, Request("a", PROMPT, ALL))
    small = make_engine(checkpoint(), num_blocks=9, max_running=4)
    small.add(Request("a", PROMPT, ALL, priority=9))
    steps = [small.step() for _ in range(12)]
    others = make_prompts(4, longest=40, seed=9)
    plain = replace(ALL, repetition_penalty=1.0)
    for i, prompt in enumerate(others):
        small.add(Request(str(i), prompt, replace(plain, seed=i, logprobs=i, max_tokens=35)))
    while small.has_work:
        steps.append(small.step())
    assert "a" in [name for step in steps for name in step.preempted]
    outputs = [output for step in steps for output in step.outputs]
    told = Told([output for output in outputs if output.request_id == "a"])
    assert told.tokens == alone.tokens
    near(told.logprobs, alone.logprobs)


def test_who_goes_on_elsewhere_goes_on_the_same(engine: Engine) -> None:
    (whole,) = ask(engine, Request("a", PROMPT, ALL))
    for known in (1, 7, 35):
        rest = replace(ALL, max_tokens=ALL.max_tokens - known, prompt_logprobs=2)
        prompt = PROMPT + whole.tokens[:known]
        (told,) = ask(engine, Request("b", prompt, rest, generated_prefix=known))
        assert told.tokens == whole.tokens[known:]
        near(told.logprobs, whole.logprobs[known:])
        assert told.of_prompt == [], "they came with the first token"


def test_a_split_changes_nothing(checkpoint: Checkpoint, engine: Engine) -> None:
    asked = replace(ALL, prompt_logprobs=1)
    (whole,) = ask(engine, Request("a", PROMPT, asked))
    prefill, decode = make_engine(checkpoint()), make_engine(checkpoint())
    decode.add(Request("a", PROMPT, asked, remote_prefill=True))
    decode.step()
    prefill.add(Request("a", PROMPT, asked, prefill_only=True, export_kv="inline"))
    first: list[RequestOutput] = []
    while prefill.has_work:
        step = prefill.step()
        first += step.outputs
        for blocks in step.kv_exports:
            decode.write_kv(blocks)
    decode.start_decode("a", first[0].new_token_ids[0])
    rest: list[RequestOutput] = []
    while decode.has_work:
        rest += decode.step().outputs
    told = Told(first + rest)
    assert told.tokens == whole.tokens
    near(told.logprobs, whole.logprobs)
    near(told.of_prompt, whole.of_prompt)


def test_torch_gives_the_same(checkpoint: Checkpoint, engine: Engine) -> None:
    asked = replace(ALL, prompt_logprobs=2)
    requests = [Request(str(i), p, replace(asked, seed=i)) for i, p in enumerate([PROMPT] * 3)]
    found = ask(make_engine(checkpoint(), kernels="reference"), *requests)
    for one, other in zip(found, ask(engine, *requests), strict=True):
        assert one.tokens == other.tokens
        near(one.logprobs, other.logprobs)
        near(one.of_prompt, other.of_prompt)


@pytest.mark.usefixtures("both_loops")
def test_steps_that_overlap_change_nothing(checkpoint: Checkpoint, engine: Engine) -> None:
    waits_for_nothing: dict[str, Any] = {
        "repetition_penalty": 1.0,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "bad_words": ((17,),),
    }
    kinds: list[dict[str, Any]] = [
        {},
        waits_for_nothing,
        {"bad_words": ((20, 21),), "prompt_logprobs": 0},
        {**waits_for_nothing, "prompt_logprobs": 2},
        waits_for_nothing,
    ]
    requests = [
        Request(str(i), prompt, replace(ALL, seed=i, **kind))
        for i, (prompt, kind) in enumerate(zip(make_prompts(5, seed=2), kinds, strict=True))
    ]
    want = ask(engine, *requests)
    found = ask(make_engine(checkpoint()), *requests)
    assert [told.tokens for told in found] == [told.tokens for told in want]
    for one, other in zip(found, want, strict=True):
        near(one.logprobs, other.logprobs)
        near(one.of_prompt, other.of_prompt)


def test_a_prompt_is_scored_as_if_it_were_drawn(checkpoint: Checkpoint, engine: Engine) -> None:
    """In chunks, beside others, and though its blocks are cached already."""
    asked = Sampling(1, temperature=0, ignore_eos=True, logprobs=4, prompt_logprobs=4)
    prompt = make_prompts(1, longest=200, seed=3)[0] * 3
    (told,) = ask(engine, Request("a", prompt, asked))
    (cached,) = ask(engine, Request("b", prompt, replace(asked, prompt_logprobs=None)))
    assert cached.tokens == told.tokens
    assert len(told.of_prompt) == len(prompt) - 1
    for count in (1, 20, 55, len(prompt) - 1):
        # Bias has it drawn, and leaves its logprob as it is.
        drawn = replace(asked, logit_bias=((prompt[count], 100.0),), prompt_logprobs=None)
        (one,) = ask(engine, Request("c", prompt[:count], drawn))
        assert one.tokens == [prompt[count]]
        near([told.of_prompt[count - 1]], one.logprobs)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 101.0),
        ("temperature", float("nan")),
        ("min_p", 1.5),
        ("min_p", float("nan")),
        ("repetition_penalty", 0.0),
        ("frequency_penalty", 2.5),
        ("presence_penalty", -2.5),
        ("logit_bias", ((VOCAB, 1.0),)),
        ("logit_bias", ((1, 101.0),)),
        ("logit_bias", ((1, 1.0), (1, 2.0))),
        ("logit_bias", tuple((i, 1.0) for i in range(301))),
        ("bad_words", ((),)),
        ("bad_words", ((-1,),)),
        ("bad_words", ((1,) * 33,)),
        ("stop_token_ids", (VOCAB,)),
        ("min_tokens", -1),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
    ],
)
def test_what_is_out_of_range_is_named(engine: Engine, field: str, value: Any) -> None:
    run = drive(engine, [Request("a", PROMPT, replace(Sampling(2), **{field: value}))])
    error = run.last["a"].error
    assert error is not None
    assert (error.code, error.param) == ("invalid_request", field)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_what_leaves_nothing_to_sample_fails_its_request_alone(
    checkpoint: Checkpoint, kernels: str
) -> None:
    """However many in a row, with nobody beside them."""
    engine = make_engine(checkpoint(), kernels=kernels)
    words = tuple((token,) for token in range(VOCAB) if token != 2)
    nothing = Sampling(4, bad_words=words, stop_token_ids=(2,), min_tokens=4, ignore_eos=True)
    for number in range(2 * MAX_FAILED_STEPS):
        asked = replace(nothing, logprobs=number % 2 or None)
        error = drive(engine, [Request(str(number), PROMPT, asked)]).last[str(number)].error
        assert error is not None
        assert (error.code, error.param) == ("invalid_request", "bad_words")


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_logits_that_are_not_finite_fail_their_request_alone(
    checkpoint: Checkpoint, tmp_path: Path, kernels: str
) -> None:
    """However many in a row; their blocks, which others get, hold what is no number."""
    tensors = load_file(checkpoint() / "model.safetensors")
    tensors["model.embed_tokens.weight"][9] = np.nan
    shutil.copy(checkpoint() / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    engine, sound = (
        make_engine(folder, kernels=kernels, num_blocks=4) for folder in (tmp_path, checkpoint())
    )
    for number in range(2 * MAX_FAILED_STEPS):
        error = drive(engine, [Request(str(number), [5] * 50 + [9], ALL)]).last[str(number)].error
        assert error is not None
        assert (error.code, error.message) == ("internal", "The model's numbers are not finite")
    asked = Sampling(9, temperature=0, ignore_eos=True, bad_words=((9,),))
    for request in (Request("a", [5] * 20, asked), Request("b", [7] * 33, asked)):
        assert ask(engine, request)[0].tokens == ask(sound, request)[0].tokens


def random_request(id: str, rng: random.Random) -> Request:
    def one(*values: Any) -> Any:
        return rng.choice(values)

    prompt = [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 60))]
    asked = Sampling(
        max_tokens=rng.randint(1, 90),
        temperature=one(0, 0.5, 2),
        top_k=one(0, 0, 1, 9),
        top_p=one(1, 1, 0.5),
        seed=rng.getrandbits(64),
        ignore_eos=one(True, False),
        stop_token_ids=tuple(rng.sample(range(VOCAB), one(0, 3))),
        min_p=one(0, 0, 0.1, 1),
        repetition_penalty=one(1, 1, 0.5, 1.7),
        frequency_penalty=one(0, 0, -2, 2),
        presence_penalty=one(0, 0, -1, 1),
        logit_bias=tuple((t, rng.uniform(-100, 100)) for t in rng.sample(range(VOCAB), one(0, 40))),
        bad_words=tuple(
            tuple(rng.sample(range(VOCAB), rng.randint(1, 3))) for _ in range(one(0, 60))
        ),
        min_tokens=one(0, 0, 5, 100),
        logprobs=one(None, None, 0, 20),
        prompt_logprobs=one(None, None, 0, 20),
    )
    earlier = one(0, 0, min(5, len(prompt) - 1))
    return Request(id, prompt, asked, priority=rng.randint(0, 2), generated_prefix=earlier)


@pytest.mark.usefixtures("both_loops")
def test_whatever_is_asked_for_ends_and_is_told_of(checkpoint: Checkpoint) -> None:
    """Random requests of all ways, some cancelled, in a room that is too small for them."""
    rng = random.Random(7)
    engine = make_engine(checkpoint(), num_blocks=14, max_batched_tokens=24)
    asked = {str(i): random_request(str(i), rng) for i in range(120)}
    outputs: dict[str, list[RequestOutput]] = {name: [] for name in asked}
    preempted = 0

    def step() -> None:
        nonlocal preempted
        made = engine.step()
        preempted += len(made.preempted)
        for output in made.outputs:
            outputs[output.request_id].append(output)

    for request in asked.values():
        engine.add(request)
        for _ in range(rng.choice((0, 1, 3))):
            step()
        if rng.random() < 0.1:
            engine.cancel(str(rng.randrange(120)))
    while engine.has_work:
        step()
    engine.check()
    assert engine.pool.num_free == engine.pool.num_blocks
    assert preempted
    for name, request in asked.items():
        last, told = outputs[name][-1], Told(outputs[name])
        assert last.finish_reason is not None
        assert last.error is None
        assert len(told.logprobs) == (
            len(told.tokens) if request.sampling.logprobs is not None else 0
        )
        scored = request.sampling.prompt_logprobs is not None and not request.generated_prefix
        if told.tokens:
            assert len(told.of_prompt) == (len(request.prompt_token_ids) - 1 if scored else 0)
        assert not {w[0] for w in request.sampling.bad_words if len(w) == 1} & {*told.tokens}

"""Requests for numbers in place of tokens: what transformers computes, however steps are put
together, and nobody else's tokens move."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers

from kernels.cpu.library import supported
from services.worker.engine import FinishReason, Pooling, Request, Sampling
from services.worker.engine.engine import Engine
from services.worker.engine.models.config import UnsupportedModel
from services.worker.engine.models.registry import read_config
from services.worker.engine.pooling import Pool
from tests.unit.engine import checkpoints
from tests.unit.engine.driving import (
    Run,
    drive,
    fail_when,
    generate,
    greedy,
    make_engine,
    make_prompts,
)

Checkpoint = Callable[..., Path]
ONE = Sampling(1)
PROMPTS = [*make_prompts(5, longest=60, seed=5), [9], list(range(3, 103))]
KINDS = [Pooling("last"), Pooling("mean"), Pooling("last", 20), Pooling("logits", 0, (17, 4, 200))]
CPU = supported()[:1]


def asked(prompts: Sequence[list[int]], wanted: Sequence[Pooling]) -> list[Request]:
    return [
        Request(f"{row} {kind}", prompt, ONE, pooling=pooling)
        for row, prompt in enumerate(prompts)
        for kind, pooling in enumerate(wanted)
    ]


def numbers(run: Run, request: Request) -> torch.Tensor:
    last = run.last[request.request_id]
    assert last.finish_reason is FinishReason.STOP, last.error
    assert last.pooled is not None
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (
        len(request.prompt_token_ids),
        0,
    )
    return torch.from_numpy(np.frombuffer(last.pooled, "<f4").copy())


@torch.inference_mode()
def by_definition(model: Any, head: torch.Tensor, cap: float | None, request: Request) -> Any:
    """Of transformers' states behind the last norm."""
    states = model(torch.tensor([request.prompt_token_ids])).last_hidden_state[0]
    wanted = request.pooling
    assert wanted is not None
    if wanted.kind == "logits":
        logits = head[list(wanted.logits_of)] @ states[-1]
        return cap * torch.tanh(logits / cap) if cap else logits
    state = states.mean(0) if wanted.kind == "mean" else states[-1]
    return torch.nn.functional.normalize(state[: wanted.dimensions or None], dim=0)


def check(folder: Path, engine: Engine, requests: Sequence[Request], run: Run) -> None:
    model = checkpoints.load_reference(folder)
    head, cap = model.lm_head.weight, getattr(model.config, "final_logit_softcapping", None)
    for request in requests:
        want = by_definition(model.model, head, cap, request)
        torch.testing.assert_close(numbers(run, request), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", ["gqa", "qwen3", "olmo2", "gemma2"])
@pytest.mark.parametrize("kernels", ["reference", *CPU])
def test_numbers_equal_transformers(checkpoint: Checkpoint, variant: str, kernels: str) -> None:
    """In chunks, beside others and beside those who generate, whose tokens do not change."""
    folder, requests = checkpoint(variant), asked(PROMPTS, KINDS)
    engine = make_engine(folder, kernels=kernels, max_batched_tokens=24)
    writers = [Request(f"w{i}", p, greedy(20)) for i, p in enumerate(make_prompts(4, seed=8))]
    alone = generate(engine, [w.prompt_token_ids for w in writers], greedy(20))
    run = drive(engine, [*requests[:9], *writers, *requests[9:]])
    check(folder, engine, requests, run)
    assert [run.tokens[w.request_id] for w in writers] == alone
    assert engine.info.hidden_size == 64


@pytest.mark.usefixtures("both_loops")
@pytest.mark.parametrize(
    "settings",
    [
        {"max_batched_tokens": 4, "max_running": 4},
        {"num_blocks": 10, "prefix_caching": False},
        {"num_blocks": 9},
    ],
)
def test_numbers_do_not_depend_on_scheduling(
    checkpoint: Checkpoint, settings: dict[str, Any]
) -> None:
    """Writers take blocks away from those who wait for numbers, who begin again."""
    engine = make_engine(checkpoint(), **settings)
    requests = asked(PROMPTS[:6], KINDS[:3])
    writers = [
        Request(f"w{i}", p, greedy(30), priority=-1)
        for i, p in enumerate(make_prompts(4, longest=20, seed=2))
    ]
    run = Run()
    for request in requests:
        engine.add(request)
    run.add(engine.step())
    for writer in writers:
        engine.add(writer)
    while engine.has_work:
        run.add(engine.step())
    engine.check()
    check(checkpoint(), engine, requests, run)


def test_some_that_were_begun_are_preempted(checkpoint: Checkpoint) -> None:
    """And their sums begin anew."""
    engine = make_engine(checkpoint(), num_blocks=9, max_batched_tokens=2, max_running=2)
    engine.add(Request("w", [5] * 30, greedy(80), priority=-1))
    run = Run()
    for _ in range(25):
        run.add(engine.step())
    long = Request("long", list(range(3, 73)), ONE, pooling=Pooling("mean"))
    engine.add(long)
    while engine.has_work:
        run.add(engine.step())
    assert "long" in [name for step in run.steps for name in step.preempted]
    check(checkpoint(), engine, [long], run)


@pytest.mark.parametrize("at", ["launch", "collect"])
def test_a_step_that_fails_is_computed_again_and_counts_once(
    checkpoint: Checkpoint, at: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(checkpoint(), max_batched_tokens=24)
    fail_when(lambda plan: len(plan.lengths) > 1, engine, at, monkeypatch)
    requests = asked(PROMPTS[:3], KINDS[:2])
    check(checkpoint(), engine, requests, drive(engine, requests))


@pytest.mark.parametrize("kernels", ["reference", *CPU])
def test_numbers_that_are_none_fail_their_request_alone(
    checkpoint: Checkpoint, kernels: str, tmp_path: Path
) -> None:
    folder = checkpoints.make(tmp_path, "gqa", tie_word_embeddings=True)
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][77] = float("inf")
    save_file(tensors, path, {"format": "pt"})
    engine = make_engine(folder, kernels=kernels)
    run = drive(engine, asked([[3, 77, 5], [3, 4, 5]], [Pooling("mean")]))
    bad, good = (run.last[f"{row} 0"] for row in range(2))
    assert bad.error is not None
    assert bad.error.code == "internal"
    assert bad.pooled is None
    assert good.pooled is not None


def test_prompts_that_begin_alike_share_blocks_but_for_a_mean(checkpoint: Checkpoint) -> None:
    engine = make_engine(checkpoint(), num_blocks=20)
    long = [*range(100, 164), 7]
    first, again = asked([long], [Pooling("last")])[0], asked([[*long, 8]], [Pooling("last")])[0]
    drive(engine, [first])
    found = drive(engine, [again]).last[again.request_id]
    assert found.num_cached_tokens == 64
    whole = Request("m", [*long, 9], ONE, pooling=Pooling("mean"))
    run = drive(engine, [whole])
    assert run.last["m"].num_cached_tokens == 0
    check(checkpoint(), engine, [whole], run)


def test_what_they_leave_is_given_up_before_what_others_left(checkpoint: Checkpoint) -> None:
    engine = make_engine(checkpoint(), num_blocks=16)
    talk = list(range(3, 99))
    generate(engine, [talk], greedy(1))  # 6 full blocks are cached
    drive(engine, asked([[*range(100, 165)]], [Pooling("last")]))  # and 4
    drive(engine, asked([[*range(170, 230)], [*range(20, 90)]], [Pooling("mean")]))  # wants 9
    talked = drive(engine, [Request("t", [*talk, 5], greedy(1))]).last["t"]
    assert talked.num_cached_tokens == 96


@pytest.mark.parametrize("kernels", ["reference", *CPU])
@pytest.mark.parametrize(
    ("kind", "variant"),
    [
        (transformers.AutoModelForSequenceClassification, "qwen3"),
        (transformers.AutoModelForSequenceClassification, "gqa"),
        (transformers.AutoModel, "mistral"),
        (transformers.AutoModel, "gemma3"),
    ],
)
def test_models_that_make_no_tokens(tmp_path: Path, kind: Any, variant: str, kernels: str) -> None:
    classes = kind is transformers.AutoModelForSequenceClassification
    labels = {"num_labels": 3} if classes else {}
    folder = checkpoints.make(tmp_path, variant, kind=kind, **labels)
    # That there is nothing to guess is no reason to refuse what is the default.
    engine = make_engine(folder, kernels=kernels, max_batched_tokens=16, speculation="ngram")
    reference = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    wanted = [Pooling("last"), Pooling("mean")]
    if classes:
        wanted.append(Pooling("logits", 0, (0, 1, 2)))
    requests = asked(PROMPTS, wanted)
    run = drive(engine, requests)
    with torch.inference_mode():
        for request in requests:
            assert request.pooling is not None
            ids = torch.tensor([request.prompt_token_ids])
            if request.pooling.kind == "logits":
                want = reference(ids).logits[0]
            else:
                body = getattr(reference, "model", reference)
                want = by_definition(body, torch.zeros(0), None, request)
            torch.testing.assert_close(numbers(run, request), want, rtol=1e-4, atol=1e-4)
    refused = drive(engine, [Request("g", [5, 6], greedy(3))]).last["g"]
    assert refused.error is not None
    assert refused.error.message.startswith("pooling is all that ")
    assert (engine.info.generates, engine.info.num_logits) == (False, 3 * classes)


def test_on_triton(checkpoint: Checkpoint) -> None:
    engine = make_engine(
        checkpoint(), kernels="triton", max_running=3, max_batched_tokens=24, num_blocks=40
    )
    requests = asked([PROMPTS[0][:20], [9]], KINDS)
    writers = [Request(f"w{i}", [7, 8, 9 + i], greedy(3)) for i in range(2)]
    run = drive(engine, [*writers, *requests])
    check(checkpoint(), engine, requests, run)
    assert [len(run.tokens[w.request_id]) for w in writers] == [3, 3]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"pooling": Pooling("last", 65)}, "dimensions"),
        ({"pooling": Pooling("mean", -1)}, "dimensions"),
        ({"pooling": Pooling("mean", 0, (1,))}, "logits_of"),
        ({"pooling": Pooling("logits")}, "logits_of"),
        ({"pooling": Pooling("logits", 0, (checkpoints.VOCAB,))}, "logits_of"),
        ({"pooling": Pooling("logits", 0, (1,) * 1025)}, "logits_of"),
        ({"pooling": Pooling("logits", 5, (1,))}, "dimensions"),
        ({"generated_prefix": 1}, "generated_prefix"),
        ({"prefill_only": True}, "prefill_only"),
        ({"remote_prefill": True}, "remote_prefill"),
        ({"sampling": Sampling(1, prompt_logprobs=1)}, "prompt_logprobs"),
        ({"prompt_token_ids": [1] * 257}, "prompt_token_ids"),
        ({"prompt_token_ids": [checkpoints.VOCAB]}, "prompt_token_ids"),
    ],
)
def test_what_cannot_be_is_refused(engine: Engine, changes: dict[str, Any], param: str) -> None:
    fields = {"prompt_token_ids": [3, 4], "sampling": ONE, "pooling": Pooling("last")}
    run = drive(engine, [Request("a", **(fields | changes))])
    error = run.last["a"].error
    assert error is not None
    assert error.param == param
    assert run.last["a"].pooled is None


@pytest.fixture(scope="module")
def engine(checkpoint: Checkpoint) -> Engine:
    return make_engine(checkpoint())


def test_an_input_may_fill_the_context(engine: Engine, checkpoint: Checkpoint) -> None:
    full = Request("a", [5] * checkpoints.CONTEXT, ONE, pooling=Pooling("last"))
    check(checkpoint(), engine, [full], drive(engine, [full]))


def test_a_cancelled_one_gives_nothing_and_holds_nothing(engine: Engine) -> None:
    engine.add(Request("a", list(range(3, 103)), ONE, pooling=Pooling("mean")))
    run = Run()
    run.add(engine.step())
    engine.cancel("a")
    while engine.has_work:
        run.add(engine.step())
    assert (run.last["a"].finish_reason, run.last["a"].pooled) == (FinishReason.CANCELLED, None)
    engine.check()
    assert engine.pool.num_free == engine.pool.num_blocks


MODULES = [{"type": "sentence_transformers.models.Transformer", "path": ""}]
POOLING = {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}


@pytest.mark.parametrize(
    ("config", "files", "words"),
    [
        ({"architectures": ["BertModel"]}, {}, "'BertModel' is not supported"),
        ({"architectures": ["LlamaForTokenClassification"]}, {}, "LlamaForTokenClassification"),
        ({"architectures": ["OlmoeModel"]}, {}, "OlmoeModel"),
        ({"is_causal": False}, {}, "is_causal False"),
        (
            {"architectures": ["LlamaForSequenceClassification"], "id2label": []},
            {},
            "id2label [] names no classes",
        ),
        (
            {"architectures": ["LlamaForSequenceClassification"], "num_labels": 10**6},
            {},
            "1000000 classes are above 1024",
        ),
        ({}, {"modules.json": [{"type": "a.b.Dense", "path": "2_Dense"}]}, "'a.b.Dense'"),
        ({}, {"modules.json": {"a": 1}}, "modules.json: is no list"),
        ({}, {"modules.json": [{**POOLING, "path": "../x"}]}, "'../x' is no folder"),
        ({}, {"modules.json": [POOLING]}, "1_Pooling/config.json: cannot be read"),
        (
            {},
            {"modules.json": [POOLING], "1_Pooling/config.json": {"pooling_mode_cls_token": True}},
            "1_Pooling/config.json: pooling_mode_cls_token",
        ),
    ],
)
def test_what_is_not_built_is_refused_by_name(
    checkpoint: Checkpoint, tmp_path: Path, config: Any, files: Any, words: str
) -> None:
    """Before any weight is looked at: there is none."""
    plain = json.loads((checkpoint() / "config.json").read_text())
    for name, content in {"config.json": plain | config, **files}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(UnsupportedModel) as caught:
        read_config(tmp_path)
    assert words in str(caught.value)


def test_a_long_prompts_mean_loses_nothing_of_its_last_tokens() -> None:
    pool, head = Pool(Pooling("mean")), cast(Any, None)
    pool.add(np.array([2.0**24, 0.0], np.float32))
    for _ in range(4096):
        pool.add(np.ones(2, np.float32))
    first, second = np.frombuffer(pool.numbers(head), "<f4")
    assert second / first == pytest.approx(4096 / (2**24 + 4096), rel=1e-6)

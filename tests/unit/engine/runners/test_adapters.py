"""Adapters of low rank: what is computed with one is what its merged weights compute, whoever is in
the step beside, and on whatever way; what the engine has no place for waits or is refused."""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernels.cpu.library import built
from services.worker.engine import Pooling, Request, Sampling
from services.worker.engine.adapters import Adapter, Lora, peft
from services.worker.engine.engine import Engine
from services.worker.engine.process import loop as process
from services.worker.engine.process import wire
from tests.support import adapters
from tests.unit.engine import checkpoints
from tests.unit.engine.driving import (
    assert_moves,
    assert_near,
    drive,
    generate,
    greedy,
    make_engine,
)
from tests.unit.engine.guessing import KINDS, guessing_engine, requests_of
from tests.unit.engine.kv.test_kv_tiers import counts, evict
from tests.unit.engine.test_engine_parity import watch_logits

Checkpoint = Callable[..., Path]
KERNELS = (*built(), "reference")
NAMES = ("", "a", "b")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    @functools.cache
    def make(variant: str = "gqa") -> Path:
        folder = tmp_path_factory.mktemp(variant)
        return checkpoints.make(folder, variant, intermediate_size=128)

    return make


@pytest.fixture(scope="module")
def files(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of two adapters, one of which changes all there is, and one little; by name."""
    folder = tmp_path_factory.mktemp("adapters")
    few = adapters.Q_AND_V
    return {
        "a": adapters.make(folder / "a", checkpoint(), seed=1, rank=5),
        "b": adapters.make(folder / "b", checkpoint(), seed=2, rank=2, targets=few, strength=0.8),
    }


def read(model: Path, folder: Path, name: str) -> Adapter:
    return replace(peft.read(folder, model, 64), id=name)


def adapted(model: Path, files: dict[str, Path], **how: Any) -> Engine:
    engine = make_engine(model, **how)
    for name, folder in files.items():
        assert engine.load_adapter(read(model, folder, name)) == ""
    return engine


def all_logits(
    engine: Engine, name: str, monkeypatch: pytest.MonkeyPatch, *outputs: list[int]
) -> torch.Tensor:
    """Behind a prompt in pieces, and behind each token of an answer."""
    seen: list[torch.Tensor] = []
    watch_logits(engine, seen, monkeypatch)
    for index, output in enumerate(outputs or ([], [7], [7, 9])):
        prompt = list(range(3, 93)) + output
        drive(engine, [Request(f"{index}", prompt, greedy(2), adapter=name)])
    return torch.cat(seen)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("variant", checkpoints.VARIANTS)
def test_what_is_computed_is_of_merged_weights(
    checkpoint: Checkpoint,
    variant: str,
    kernels: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every family, fused tensors and biases too."""
    if variant == "head-dim" and kernels != "reference":
        pytest.skip("the C++ kernels have no such heads")
    model = checkpoint(variant)
    folder = adapters.make(tmp_path / "adapter", model, rank=3, lora_alpha=2)
    merged = adapters.merge(model, folder, tmp_path / "merged", scale=2 / 3)
    how = {"kernels": kernels, "dtype": "float32", "max_batched_tokens": 16}
    mine = all_logits(adapted(model, {"a": folder}, **how), "a", monkeypatch)
    plain = all_logits(make_engine(model, **how), "", monkeypatch)
    assert (mine - plain).norm() > 0.05 * plain.norm()
    assert_near(mine, all_logits(make_engine(merged, **how), "", monkeypatch))


def test_of_merged_weights_as_transformers_computes_them(
    checkpoint: Checkpoint, files: dict[str, Path], tmp_path: Path
) -> None:
    merged = adapters.merge(checkpoint(), files["a"], tmp_path / "merged", scale=2)
    reference = checkpoints.load_reference(merged)
    prompt = list(range(3, 60))
    request = Request("0", prompt, greedy(12), adapter="a")
    tokens = drive(adapted(checkpoint(), files), [request]).tokens["0"]
    for index in range(len(tokens)):
        logits = checkpoints.reference_logits(reference, prompt + tokens[:index])
        assert logits[-1].argmax() == tokens[index]


@pytest.mark.parametrize("rslora", [False, True])
def test_rslora_divides_by_the_root_of_the_rank(
    checkpoint: Checkpoint, tmp_path: Path, rslora: bool
) -> None:
    folder = adapters.make(tmp_path / "a", checkpoint(), rank=9, lora_alpha=6, use_rslora=rslora)
    found = peft.read(folder, checkpoint(), 64)
    plain = adapters.make(tmp_path / "b", checkpoint(), rank=9, lora_alpha=9)
    scale = 6 / math.sqrt(9) if rslora else 6 / 9
    for name, lora in peft.read(plain, checkpoint(), 64).modules.items():
        assert (found.modules[name].down == lora.down).all()
        torch.testing.assert_close(found.modules[name].up, lora.up * scale)


@pytest.fixture(
    scope="module", params=["float32", "bfloat16", "int8", "int4", "w8a8", "kv-int8", "kv-int4"]
)
def how(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Weights' and blocks' formats."""
    if request.param != "float32" and not built():
        pytest.skip("no kernels for this processor")
    ways: dict[str, dict[str, Any]] = {
        "float32": {"dtype": "float32"},
        "bfloat16": {"dtype": "bfloat16"},
        "int8": {"quantization": "int8"},
        "int4": {"quantization": "int4"},
        "w8a8": {"quantization": "w8a8"},
        "kv-int8": {"kv_format": "int8"},
        "kv-int4": {"kv_format": "int4"},
    }
    return ways[request.param]


def work() -> list[Request]:
    """With a common beginning, greedy and drawn; of each kind one of each adapter and of none."""
    return [
        replace(one, request_id=f"{one.request_id}{name}", adapter=name)
        for one in requests_of(KINDS)
        for name in NAMES
    ]


@pytest.fixture(scope="module")
def alone(
    checkpoint: Checkpoint, files: dict[str, Path], how: dict[str, Any]
) -> dict[str, list[int]]:
    """Each in an engine that has no other adapter."""
    found: dict[str, list[int]] = {}
    for name in NAMES:
        own = {name: files[name]} if name else {}
        engine = adapted(checkpoint(), own, prefix_caching=False, **how)
        for one in work():
            if one.adapter == name:
                found |= drive(engine, [one]).tokens
    return found


def test_adapters_matter(alone: dict[str, list[int]]) -> None:
    kinds = len(KINDS)
    assert len({tuple(tokens) for tokens in alone.values()}) > 2.5 * kinds


@pytest.mark.parametrize(
    "way",
    [
        {},
        {"num_blocks": 9},
        {"max_batched_tokens": 16},
        {"overlap": True},
        {"threads": 3},
        {"max_step_adapters": 1},
    ],
    ids=["together", "preempted", "chunked", "overlapped", "threads", "one-adapter"],
)
def test_neighbours_and_ways_through_the_engine_change_nothing(
    checkpoint: Checkpoint,
    files: dict[str, Path],
    how: dict[str, Any],
    alone: dict[str, list[int]],
    way: dict[str, Any],
) -> None:
    """Bit for bit: what is drawn depends on each logit."""
    engine = adapted(checkpoint(), files, **how, **way)
    assert drive(engine, work()).tokens == alone
    assert drive(engine, work()).tokens == alone  # from the prefix cache


def test_guesses_change_nothing(
    checkpoint: Checkpoint,
    files: dict[str, Path],
    how: dict[str, Any],
    alone: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = guessing_engine(checkpoint(), monkeypatch, alone, **how)
    for name, folder in files.items():
        engine.load_adapter(read(checkpoint(), folder, name))
    found = drive(engine, work())
    assert found.tokens == alone
    assert sum(step.accepted_tokens for step in found.steps)


def test_a_split_and_going_on_elsewhere_change_nothing(
    checkpoint: Checkpoint,
    files: dict[str, Path],
    how: dict[str, Any],
    alone: dict[str, list[int]],
) -> None:
    """In other places there, too."""
    prefill = adapted(checkpoint(), files, **how)
    decode = adapted(checkpoint(), dict(reversed(files.items())), **how)
    for one in work()[:3]:
        assert_moves(one, alone[one.request_id], prefill, decode)


@pytest.mark.parametrize("kernels", KERNELS)
def test_numbers_in_place_of_tokens_are_of_merged_weights(
    checkpoint: Checkpoint, files: dict[str, Path], tmp_path: Path, kernels: str
) -> None:
    """Beside writers of others, whose rows lie before those that are pooled."""
    merged = adapters.merge(checkpoint(), files["a"], tmp_path / "merged", scale=2)
    how = {"dtype": "float32", "kernels": kernels}

    def pooled(engine: Engine, adapter: str, *others: Request) -> list[torch.Tensor]:
        asked = [
            Request(kind, list(range(3, 40)), Sampling(1), pooling=Pooling(kind), adapter=adapter)
            for kind in ("last", "mean")
        ]
        found = drive(engine, [*others, *asked]).last
        return [
            torch.tensor(np.frombuffer(found[one.request_id].pooled or b"", "<f4")) for one in asked
        ]

    beside = [Request(name, [5, 6, 7], greedy(9), adapter=name) for name in ("", "b")]
    mine = pooled(adapted(checkpoint(), files, **how), "a", *beside)
    for numbers, expected in zip(mine, pooled(make_engine(merged, **how), ""), strict=True):
        assert_near(numbers, expected)


def test_a_draft_model_has_no_adapter_and_changes_nothing(
    checkpoint: Checkpoint, files: dict[str, Path], tmp_path: Path
) -> None:
    draft = checkpoints.make(tmp_path / "draft", "gqa", seed=9, num_hidden_layers=1)
    requests = [one for one in work() if not one.sampling.logprobs][:9]
    plain = drive(adapted(checkpoint(), files, dtype="float32"), requests)
    engine = adapted(
        checkpoint(), files, dtype="float32", speculation="draft", draft_model=str(draft)
    )
    assert drive(engine, requests).tokens == plain.tokens


def test_a_step_may_have_fewer_adapters_than_are_loaded(
    checkpoint: Checkpoint, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = adapted(checkpoint(), files, max_step_adapters=1)
    steps: list[set[int]] = []
    launch = engine._runner.launch

    def watched(plan: Any) -> Any:
        steps.append({*plan.adapters} - {-1})
        return launch(plan)

    monkeypatch.setattr(engine._runner, "launch", watched)
    drive(engine, work())
    assert {len(places) for places in steps} <= {0, 1}
    assert {place for places in steps for place in places} == {0, 1}


@pytest.mark.usefixtures("loading_pays")
def test_what_one_has_on_disk_is_its_alone(
    checkpoint: Checkpoint, files: dict[str, Path], tmp_path: Path
) -> None:
    prompt = list(range(5, 90))
    disk = {"kv_disk_dir": str(tmp_path / "kv"), "checkpoint": "it"}
    engine = adapted(checkpoint(), files, **disk)
    asked = {
        name: Request(name or "none", prompt, greedy(12), adapter=name) for name in ("", *files)
    }
    answers = {}
    for request in asked.values():
        answers |= drive(engine, [request]).tokens
        assert not counts(engine).loaded
        evict(engine)
    for loads, request in enumerate(asked.values(), 1):
        assert drive(engine, [request]).tokens[request.request_id] == answers[request.request_id]
        assert counts(engine).loaded == loads * 5


def test_a_prefix_is_shared_by_requests_of_one_adapter_alone(
    checkpoint: Checkpoint, files: dict[str, Path]
) -> None:
    engine = adapted(checkpoint(), files)
    prompt = list(range(3, 60))

    def cached(name: str, adapter: str) -> int:
        run = drive(engine, [Request(name, prompt, greedy(2), adapter=adapter)])
        usage = run.last[name].usage
        assert usage is not None
        return usage.cached_tokens

    assert [cached(f"first {name}", name) for name in NAMES] == [0, 0, 0]
    assert [cached(f"again {name}", name) for name in NAMES] == [48, 48, 48]


def test_there_are_places_for_so_many(checkpoint: Checkpoint, files: dict[str, Path]) -> None:
    engine = adapted(checkpoint(), {"a": files["a"]}, max_adapters=1)
    other = read(checkpoint(), files["b"], "b")
    assert "1 adapters are loaded, as many as max_adapters allows" in engine.load_adapter(other)
    assert engine.load_adapter(read(checkpoint(), files["a"], "a")) == ""  # it is there
    engine.drop_adapter("a")
    assert engine.load_adapter(other) == ""
    off = make_engine(checkpoint(), max_adapters=0)
    assert off.load_adapter(other) == "adapters are off: max_adapters is 0"


def test_one_that_breaks_off_half_way_ends_nobody_and_leaves_nothing(
    checkpoint: Checkpoint, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = adapted(checkpoint(), {"a": files["a"]}, max_adapters=2)
    request = Request("0", [5, 6, 7], greedy(9), adapter="a")
    want = drive(engine, [request]).tokens["0"]
    put, places = engine._runner.adapt, []

    def half(place: int, adapter: Adapter | None) -> None:
        put(place, adapter)
        places.append((place, adapter is not None))
        if adapter is not None:
            raise RuntimeError("out of the device's memory")

    engine.add(request)
    with monkeypatch.context() as broken:
        broken.setattr(engine.adapters, "_put", half)
        other = read(checkpoint(), files["b"], "b")
        assert engine.load_adapter(other) == "the engine could not take it in: RuntimeError"
    assert places == [(1, True), (1, False)]
    assert drive(engine, []).tokens["0"] == want
    assert engine.load_adapter(other) == ""


def test_one_that_is_dropped_goes_with_its_last_request(
    checkpoint: Checkpoint, files: dict[str, Path]
) -> None:
    request = Request("0", list(range(3, 30)), greedy(20), adapter="a")
    expected = drive(adapted(checkpoint(), files), [request]).tokens["0"]
    engine = adapted(checkpoint(), {"a": files["a"]}, max_adapters=1)
    engine.add(request)
    tokens = engine.step().outputs[0].new_token_ids
    engine.drop_adapter("a")
    told = process._loaded(engine, 7, read(checkpoint(), files["b"], "b"))
    assert (told.number, told.in_use) == (7, True)
    assert told.why_not.startswith("1 adapters are loaded")
    engine.add(replace(request, request_id="late"))
    rest = drive(engine, [])
    error = rest.last["late"].error
    assert error is not None
    assert (error.code, error.message) == ("no_adapter", "The adapter a is not loaded")
    assert tokens + rest.tokens["0"] == expected
    assert process._loaded(engine, 8, read(checkpoint(), files["b"], "b")) == wire.Done(8, "")


def test_one_that_comes_back_while_it_goes_stays(
    checkpoint: Checkpoint, files: dict[str, Path]
) -> None:
    engine = adapted(checkpoint(), files)
    engine.add(Request("0", [5, 6, 7], greedy(20), adapter="a"))
    engine.step()
    engine.drop_adapter("a")
    assert engine.load_adapter(read(checkpoint(), files["a"], "a")) == ""
    drive(engine, [])
    assert generate_with(engine, "a")


def generate_with(engine: Engine, adapter: str) -> list[int]:
    return drive(engine, [Request("with", [5, 6, 7], greedy(4), adapter=adapter)]).tokens["with"]


def test_an_adapter_of_nothing_is_none(checkpoint: Checkpoint) -> None:
    engine = make_engine(checkpoint())
    expected = generate(engine, [[5, 6, 7]], greedy(4))[0]
    zeros = torch.zeros(2, 64).numpy()
    engine.load_adapter(Adapter("a", {"model.layers.0.self_attn.o_proj": Lora(zeros, zeros)}))
    assert generate_with(engine, "a") == expected

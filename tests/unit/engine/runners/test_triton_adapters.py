"""Adapters on the kernels for GPUs, which run in Triton's interpreter: what the reference gives,
which test_adapters.py holds to merged weights."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.engine import EngineConfig, Pooling, Request, Sampling
from services.worker.engine import engine as engine_module
from services.worker.engine.adapters import Adapter, peft
from services.worker.engine.engine import Engine
from services.worker.engine.plan import StepPlan
from services.worker.engine.runners import triton_adapters
from services.worker.engine.runners.making import make_runner
from services.worker.engine.runners.runner import Runner
from services.worker.engine.runners.triton_runner import TritonRunner
from services.worker.engine.speculation import draft_model
from tests.support import adapters
from tests.unit.engine import checkpoints
from tests.unit.engine.driving import SMALL, Run, drive, greedy, make_engine
from tests.unit.engine.runners.test_triton_runner import in_groups, plan

Checkpoint = Callable[..., Path]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, at infinities
FEW: dict[str, Any] = {
    "dtype": "float32",
    "max_running": 4,
    "num_blocks": 40,
    "max_batched_tokens": 16,
    "max_adapters": 2,
    "max_step_adapters": 2,
    "max_adapter_rank": 5,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    @functools.cache
    def make(variant: str = "gqa") -> Path:
        return checkpoints.make(tmp_path_factory.mktemp(variant), variant, num_hidden_layers=2)

    return make


@pytest.fixture(scope="module")
def read(
    checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[Adapter]]:
    """Two adapters of a checkpoint: "a" changes all there is, "b" little."""

    @functools.cache
    def make(variant: str = "gqa") -> list[Adapter]:
        folder, model = tmp_path_factory.mktemp("adapters"), checkpoint(variant)
        few = adapters.Q_AND_V
        found = [
            adapters.make(folder / "a", model, seed=1, rank=5, use_rslora=True),
            adapters.make(folder / "b", model, seed=2, rank=2, targets=few, strength=0.8),
        ]
        return [replace(peft.read(one, model, 5), id=one.name) for one in found]

    return make


Read = Callable[..., list[Adapter]]


def engine(folder: Path, loaded: Sequence[Adapter], kernels: str, **how: Any) -> Engine:
    made = make_engine(folder, kernels=kernels, **(FEW | how))
    for one in loaded:
        assert made.load_adapter(one) == ""
    return made


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are not warmed up: that takes the interpreter seconds."""
    for module in (engine_module, draft_model):
        monkeypatch.setattr(module, "warm_up", lambda *_: None)


def told(run: Run) -> Any:
    best = {
        output.request_id: [one.top_ids for one in output.logprobs or []]
        for step in run.steps
        for output in step.outputs
    }
    return run.tokens, best


@pytest.mark.usefixtures("cold")
def test_tokens_equal_the_references(checkpoint: Checkpoint, read: Read) -> None:
    """Of the base and two adapters in one step, of prompts in pieces, in steps that graphs replay
    and in those that they do not, overlapped; and numbers of pooled rows."""
    prompt = list(range(3, 24))
    drawn = {"temperature": 0.9, "ignore_eos": True}
    asked = [
        Request("base", prompt, greedy(4)),
        Request("a", prompt[1:], greedy(5), adapter="a"),
        Request("b", prompt[:9], Sampling(3, seed=7, **drawn), adapter="b"),
        Request("told", prompt[:5], Sampling(2, seed=8, logprobs=2, **drawn), adapter="a"),
        Request("late", prompt[:3], greedy(3), adapter="b"),
        Request("pooled", prompt[4:], Sampling(1), pooling=Pooling("mean"), adapter="a"),
    ]
    runs = [
        drive(engine(checkpoint(), read(), kernels, overlap=True), asked)
        for kernels in ("reference", "triton")
    ]
    assert told(runs[0]) == told(runs[1])
    pooled = [np.frombuffer(run.last["pooled"].pooled or b"", "<f4") for run in runs]
    np.testing.assert_allclose(pooled[1], pooled[0], rtol=1e-3, atol=1e-5)


def with_adapters(step: StepPlan, places: list[int]) -> StepPlan:
    """Of sequences."""
    counts = np.diff(np.asarray(step.starts))
    made = replace(step)
    made.adapters = type(step.adapters)("i", np.repeat(places, counts).tolist())
    return made


def runner(folder: Path, kernels: str, **how: Any) -> Runner:
    return make_runner(
        EngineConfig(model=str(folder), **(SMALL | FEW | {"kernels": kernels} | how))
    )


@pytest.mark.parametrize("variant", ["phi3", "gemma3", "qwen3-moe"])
def test_families_compute_as_on_the_reference(
    checkpoint: Checkpoint, read: Read, variant: str
) -> None:
    """Matrices of one fused tensor and of several, beside norms and experts."""
    one, other = [5, 9, 200, 31, 8], [17, 40, 3, 77]
    steps = [
        with_adapters(plan([(one, 0, [4]), (other, 0, [2])], [1]), [1, 0]),
        with_adapters(plan([([77], 5, [4]), ([0], 4, [2])], [0, 1], [(1, 0)]), [1, 0]),
    ]
    found = []
    for kernels in ("reference", "triton"):
        ran = runner(checkpoint(variant), kernels)
        for place, adapter in enumerate(read(variant)):
            ran.adapt(place, adapter)
        groups = len(ran.info.kv_groups)
        tickets = [ran.launch(in_groups(step, groups)) for step in steps]
        results = [ran.collect(ticket).results for ticket in tickets]
        used = [block + 8 * group for group in range(groups) for block in (4, 2)]
        found.append((results, np.frombuffer(ran.cache.read(used), np.float32)))
    assert found[0][0] == found[1][0]
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-3, atol=1e-4)


def test_what_is_loaded_and_dropped_between_steps_is_read_by_those_behind(
    checkpoint: Checkpoint, read: Read
) -> None:
    """In places that stay, so that graphs find it there; steps before go on with what was there."""
    first, second = read()
    prompts = plan([([5, 9, 200], 0, [4]), ([8, 17], 0, [2])], [0, 1])
    decodes = plan([([77], 3, [4]), ([31], 2, [2])], [0, 1])
    told = []
    for kernels in ("reference", "triton"):
        ran = runner(checkpoint(), kernels)
        ran.adapt(0, first)
        tickets = [ran.launch(with_adapters(prompts, [0, -1]))]
        ran.adapt(1, second)
        tickets.append(ran.launch(with_adapters(decodes, [0, 1])))
        ran.adapt(0, None)
        tickets.append(ran.launch(with_adapters(decodes, [0, 1])))
        ran.adapt(0, second)
        tickets += [ran.launch(with_adapters(decodes, places)) for places in ([0, 0], [1, 1])]
        ran.adapt(0, None)
        ran.adapt(1, None)
        tickets += [ran.launch(with_adapters(decodes, [1, 0])), ran.launch(decodes)]
        told.append([[r.tokens for r in ran.collect(ticket).results] for ticket in tickets])
    assert told[0] == told[1]
    assert told[1][3] == told[1][4] != told[1][1]
    assert isinstance(ran, TritonRunner)
    held = ran._memory.adapters
    assert not held._memory
    before = held._tables.data_ptr()
    ran.adapt(1, first)
    assert held._tables.data_ptr() == before
    assert [bool(table.any()) for table in held._tables] == [False, True]


@pytest.mark.usefixtures("cold")
def test_a_draft_model_on_triton_has_none(checkpoint: Checkpoint, read: Read) -> None:
    folder = checkpoint()
    asked = [Request("a", [7, 8, 9], greedy(4), adapter="a"), Request("base", [9] * 4, greedy(3))]
    want = drive(engine(folder, read(), "reference"), asked)
    how = {"speculation": "draft", "draft_model": str(folder), "max_running": 2}
    assert drive(engine(folder, read(), "triton", **how), asked).tokens == want.tokens


def test_one_for_which_the_device_has_no_room_leaves_nothing(
    checkpoint: Checkpoint, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rank goes on, as it does where the host has none."""
    ran = runner(checkpoint(), "triton")
    assert isinstance(ran, TritonRunner)

    class Large:
        nbytes = 2**40

        def to(self, device: torch.device) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory")

    ran.adapt(0, read()[0])
    with monkeypatch.context() as patch:
        patch.setattr(triton_adapters.torch, "cat", lambda pieces: Large())
        with pytest.raises(MemoryError, match="takes 1099511627776 bytes: CUDA out of memory"):
            ran.adapt(0, read()[1])
    assert not ran._memory.adapters._tables.any()
    assert not ran._memory.adapters._memory


def test_without_places_there_are_no_graphs_of_them(checkpoint: Checkpoint) -> None:
    ran = runner(checkpoint(), "triton", max_adapters=0)
    assert isinstance(ran, TritonRunner)
    assert ran.info.max_adapters == 0
    assert [*ran._graphs] == [False]

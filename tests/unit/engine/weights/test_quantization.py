"""Weights that are rounded when they are loaded: what they stand for is what is computed, by all
kernels and in all ways of going through an engine; where it does not fit it is refused."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.cpu.library import built
from kernels.cpu.matrix import rounded
from services.common.checkpoints.checkpoint import digest
from services.worker.engine import EngineConfig, Request
from services.worker.engine.config import QUANTIZATIONS
from services.worker.engine.engine import Engine
from tests.unit.engine import checkpoints
from tests.unit.engine.driving import (
    assert_moves,
    assert_near,
    drive,
    generate,
    greedy,
    make_engine,
    make_prompts,
)
from tests.unit.engine.guessing import KINDS, guessing_engine, requests_of, told
from tests.unit.engine.test_engine_parity import watch_logits

pytestmark = pytest.mark.skipif(not built(), reason="no kernels for this processor")

Checkpoint = Callable[..., Path]
each_quantization = pytest.mark.parametrize("quantization", QUANTIZATIONS[1:])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Of widths that all of them go with."""

    @functools.cache
    def make(variant: str = "gqa") -> Path:
        folder = tmp_path_factory.mktemp(variant)
        return checkpoints.make(folder, variant, intermediate_size=128)

    return make


def copy_of_rounded(folder: Path, to: Path, quantization: str) -> Path:
    """With the values that its weights stand for then."""
    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and not name.endswith("gate.weight"):  # of experts
            table = "embed_tokens" in name or "lm_head" in name
            values = rounded(tensor.float().numpy(), "int8" if table else quantization)
            tensors[name] = torch.from_numpy(values)
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


def logits_by(
    folder: Path, output: list[int], monkeypatch: pytest.MonkeyPatch, **how: Any
) -> torch.Tensor:
    """Behind a prompt in pieces, and behind each token of an answer."""
    prompt = list(range(3, 93)) + output
    engine = make_engine(folder, max_batched_tokens=16, **how)
    seen: list[torch.Tensor] = []
    watch_logits(engine, seen, monkeypatch)
    generate(engine, [prompt], greedy(1))
    return torch.cat(seen)


@each_quantization
@pytest.mark.parametrize("kernels", built())
@pytest.mark.parametrize("variant", [v for v in checkpoints.VARIANTS if v != "head-dim"])
def test_what_is_computed_is_of_the_values_that_weights_stand_for(
    checkpoint: Checkpoint,
    variant: str,
    kernels: str,
    quantization: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every family, tied and not, with biases: beside the same checkpoint of rounded values."""
    folder = copy_of_rounded(checkpoint(variant), tmp_path / "rounded", quantization)
    for output in ([], [7], [7, 9]):
        mine = logits_by(
            checkpoint(variant), output, monkeypatch, quantization=quantization, kernels=kernels
        )
        theirs = logits_by(folder, output, monkeypatch, kernels=kernels)
        if quantization == "w8a8":  # rows are rounded, too: to the bit in test_cpu_w8a8.py
            assert 0 < (mine - theirs).norm() < 0.1 * theirs.norm()
        else:
            assert_near(mine, theirs)


def test_weights_take_less(checkpoint: Checkpoint) -> None:
    """Than float32: 8 bits a quarter, and a scale for each row of 64; of int4 the tables, too."""
    wide, *narrow = (make_engine(checkpoint(), quantization=q).info for q in QUANTIZATIONS)
    assert {one.num_parameters for one in narrow} == {wide.num_parameters}
    shares = [one.parameter_bytes / wide.parameter_bytes for one in narrow]
    assert shares[0] == shares[2] == shares[3] < 0.3
    assert shares[1] < 0.23


def test_each_quantization_is_packed_in_a_file_of_its_own(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    settings = {"packed_dir": str(tmp_path)}
    places = [
        make_engine(checkpoint(), quantization=q, **settings).info.weights
        for q in (*QUANTIZATIONS, *QUANTIZATIONS)
    ]
    each = len(QUANTIZATIONS)
    assert places[:each] == places[each:]
    assert len(set(places)) == len(list(tmp_path.glob("*.packed"))) == each


@pytest.fixture(scope="module", params=QUANTIZATIONS[1:])
def quantization(request: pytest.FixtureRequest) -> str:
    given: str = request.param
    return given


@pytest.fixture(scope="module")
def alone(checkpoint: Checkpoint, quantization: str) -> dict[str, list[int]]:
    engine = make_engine(checkpoint(), quantization=quantization, prefix_caching=False)
    return {one.request_id: drive(engine, [one]).tokens[one.request_id] for one in work()}


def work() -> list[Request]:
    """With a common beginning, greedy and drawn."""
    return requests_of(KINDS)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"num_blocks": 9},
        {"max_batched_tokens": 16},
        {"overlap": True},
        {"threads": 3},
    ],
    ids=["together", "preempted", "chunked", "overlapped", "threads"],
)
def test_ways_through_the_engine_change_nothing(
    checkpoint: Checkpoint, quantization: str, alone: dict[str, list[int]], how: dict[str, Any]
) -> None:
    engine = make_engine(checkpoint(), quantization=quantization, **how)
    assert drive(engine, work()).tokens == alone
    assert drive(engine, work()).tokens == alone  # from the prefix cache


def test_guesses_change_nothing(
    checkpoint: Checkpoint,
    quantization: str,
    alone: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = drive(make_engine(checkpoint(), quantization=quantization), work())
    engine = guessing_engine(checkpoint(), monkeypatch, alone, quantization=quantization)
    found = drive(engine, work())
    assert told(found) == told(plain)
    assert sum(step.accepted_tokens for step in found.steps)


def test_a_split_and_going_on_elsewhere_change_nothing(
    checkpoint: Checkpoint, quantization: str, alone: dict[str, list[int]]
) -> None:
    prefill, decode = (make_engine(checkpoint(), quantization=quantization) for _ in range(2))
    one = work()[0]
    assert_moves(one, alone[one.request_id], prefill, decode)


def test_a_weight_that_is_no_number_is_told_as_without(
    checkpoint: Checkpoint, tmp_path: Path, quantization: str
) -> None:
    """And is not rounded to one that is."""
    shutil.copytree(checkpoint(), tmp_path / "broken")
    path = tmp_path / "broken/model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.down_proj.weight"][5, 7] = torch.inf
    save_file(tensors, path, {"format": "pt"})
    found = drive(make_engine(path.parent, quantization=quantization), work()[:1])
    errors = [output.error for step in found.steps for output in step.outputs]
    assert [error and error.message for error in errors] == ["The model's numbers are not finite"]


def test_answers_are_near_those_of_the_weights_as_they_are(checkpoint: Checkpoint) -> None:
    """Beside random weights of 64 features, which are rounded worse than any model's."""
    prompts = make_prompts(24)
    exact, *near = (
        generate(make_engine(checkpoint(), quantization=q), prompts, greedy(1))
        for q in QUANTIZATIONS
    )
    same = [sum(a == b for a, b in zip(exact, one, strict=True)) for one in near]
    of_8_bits = same[0], same[2], same[3]
    assert min(of_8_bits) >= 15
    assert same[0] >= 20
    assert same[1] >= 5  # by chance hardly one


def test_rounded_weights_are_another_checkpoint(checkpoint: Checkpoint) -> None:
    """So nobody goes on with them what others began, and no KV goes from one to the other."""
    found = {digest(checkpoint(), q) for q in ("", *QUANTIZATIONS[1:])}
    assert len(found) == len(QUANTIZATIONS)
    assert {len(one) for one in found} == {16}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quantization": "int3"}, "must be one of auto, int8, int4, fp8, w8a8, is 'int3'"),
        ({"quantization": "int8", "kernels": "reference"}, "needs .* kernels are 'reference'"),
        (
            {"quantization": "w8a8", "kernels": "reference", "device": "cuda"},
            "needs the C.. kernels of a CPU or a GPU's 'triton', kernels are 'reference'",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    checkpoint: Checkpoint, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        EngineConfig(model=str(checkpoint()), **settings)


def test_what_the_kernels_cannot_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    """And not computed by PyTorch instead, as it would be without."""
    narrow = checkpoints.make(tmp_path / "narrow", "gqa", intermediate_size=98)
    heads = checkpoints.make(tmp_path / "heads", "head-dim")
    odd = checkpoints.make(tmp_path / "odd", "gqa", num_attention_heads=2, head_dim=48)
    for folder, quantization, words in (
        (narrow, "int8", "intermediate_size 98 is no multiple of 4"),
        (narrow, "fp8", "intermediate_size 98 is no multiple of 4"),
        (narrow, "w8a8", "intermediate_size 98 is no multiple of 4"),
        (narrow, "int4", "intermediate_size 98 is no multiple of 64"),
        (odd, "int4", "num_attention_heads . head_dim 96 is no multiple of 64"),
        (heads, "int8", "head_dim"),
    ):
        (folder / "model.safetensors").unlink(missing_ok=True)
        for kernels, before in (("auto", "^"), ("avx2", "^kernels 'avx2', ")):
            with pytest.raises(ValueError, match=f"{before}quantization '{quantization}': {words}"):
                Engine(EngineConfig(str(folder), kernels=kernels, quantization=quantization))

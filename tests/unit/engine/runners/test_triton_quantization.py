"""Weights of few bits on the kernels for GPUs, which run in Triton's interpreter: what the
reference computes of the values that they stand for; and what such weights take, are told and
refused."""

import functools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from kernels.triton.matrix import NarrowMatrix
from services.cli.stack.checkpoints import check_engines
from services.common.config import ModelSpec, Settings
from services.worker.engine import EngineConfig
from services.worker.engine.adapters import peft
from services.worker.engine.config import QUANTIZATIONS
from services.worker.engine.models.registry import build_model, read_config
from services.worker.engine.parallel.shard import Shard
from services.worker.engine.plan import StepPlan
from services.worker.engine.runners.making import make_runner
from services.worker.engine.runners.runner import Runner
from services.worker.engine.runners.triton_ops import TritonOps
from services.worker.engine.runners.triton_runner import TritonRunner
from services.worker.engine.weights import triton_weights
from services.worker.engine.weights.checkpoint import open_checkpoint
from services.worker.engine.weights.triton_weights import TritonWeights
from tests.support import adapters, quantized
from tests.unit.engine import checkpoints
from tests.unit.engine.driving import SMALL
from tests.unit.engine.runners.test_triton_adapters import with_adapters
from tests.unit.engine.runners.test_triton_runner import plan
from tests.unit.engine.weights.test_gguf import made as gguf_made
from tests.unit.engine.weights.test_quantization import copy_of_rounded
from tests.unit.engine.weights.test_quantized_checkpoints import LAYOUTS, as_it_is

Checkpoint = Callable[..., Path]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, at infinities
PROMPT = [5, 9, 200, 31, 8, 17, 40, 3, 77]
STEPS = [
    plan([(PROMPT, 0, [4])], [0]),
    plan([([44], 9, [4]), ([6, 7, 8], 0, [2])], [0, 1]),
    plan([([12], 10, [4])], [0]),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Of widths that all formats go with, of a layer or two."""

    @functools.cache
    def make(variant: str = "gqa") -> Path:
        layers = 2 if variant == "qwen3-moe" else 1
        how: dict[str, Any] = {"intermediate_size": 128, "num_hidden_layers": layers}
        return checkpoints.make(tmp_path_factory.mktemp(variant), variant, **how)

    return make


def config(folder: Path, kernels: str, **how: Any) -> EngineConfig:
    own = {"max_running": 4, "num_blocks": 8, "kernels": kernels, "dtype": "float32"}
    return EngineConfig(model=str(folder), **(SMALL | own | how))


def logits_of(ran: Runner, steps: list[StepPlan]) -> torch.Tensor:
    found = []
    for step in steps:
        ticket = ran.launch(step)
        launched = ticket.launched if isinstance(ran, TritonRunner) else ticket
        found.append(launched.logits.clone()[: len(step.sampled)])
        ran.collect(ticket)
    return torch.cat(found)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert (found - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize(
    ("variant", "quantization"),
    [
        *(("gqa", quantization) for quantization in QUANTIZATIONS[1:]),
        ("biases", "int4"),
        ("mha-tied", "fp8"),
        ("mixtral", "int8"),
        ("qwen3-moe", "int4"),
        ("qwen2-moe", "fp8"),
    ],
)
def test_what_is_computed_is_of_the_values_that_weights_stand_for(
    checkpoint: Checkpoint, variant: str, quantization: str, tmp_path: Path
) -> None:
    """A prompt, one beside a decode, and a decode that is replayed."""
    folder = checkpoint(variant)
    ran = make_runner(config(folder, "triton", quantization=quantization))
    rounded = copy_of_rounded(folder, tmp_path / "rounded", quantization)
    theirs = make_runner(config(rounded, "reference"))
    found, expected = logits_of(ran, STEPS), logits_of(theirs, STEPS)
    if quantization == "w8a8":  # rows are rounded, too: to the bit in test_narrow.py
        assert 1e-4 * expected.norm() < (found - expected).norm() < 0.1 * expected.norm()
    else:
        assert_near(found, expected)
    ids = [3, 250, 3]
    np.testing.assert_array_equal(ran.head_rows(ids), theirs.head_rows(ids))
    assert ran.info.num_parameters == theirs.info.num_parameters


def test_parameter_bytes_are_those_of_the_device(checkpoint: Checkpoint) -> None:
    """Of all that the model holds there, each once."""
    ran = make_runner(config(checkpoint("mha-tied"), "triton", quantization="int4"))
    hidden, inner, vocab, group = 64, 128, 257, 32
    whole = (4 * hidden * hidden + 3 * hidden * inner) * (1 / 2 + 2 / group)
    table = -(-vocab // 16) * 16 * hidden + 4 * vocab
    assert ran.info.parameter_bytes == whole + table + 3 * hidden * 4


@pytest.mark.parametrize(
    "layout", ["packed-64", "packed-zeros", "bytes", "w8a8", "gptq-order", "gptq-8-32", "awq"]
)
def test_what_others_have_quantized_is_taken_as_it_is(
    checkpoint: Checkpoint, layout: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """To the bit where a format holds it; else it is widened, and told."""
    source = checkpoint()
    quantization_config, layer, held, kind = LAYOUTS[layout]
    mine = tmp_path / "mine"
    values = quantized.write(source, mine, quantization_config, layer)
    quantized.write(source, tmp_path / "theirs", {}, as_it_is)
    told = json.loads((source / "config.json").read_text())
    (tmp_path / "theirs/config.json").write_text(json.dumps(told))
    save_file(values, tmp_path / "theirs/model.safetensors")
    with caplog.at_level(logging.WARNING):
        ran = make_runner(config(mine, "triton"))
    assert (f"7 matrices of {kind} are widened to float32" in caplog.text) == (not held)
    assert isinstance(ran, TritonRunner)
    taken = {type(weights) for weights in products_of(ran)}
    assert (NarrowMatrix in taken) == bool(held)
    theirs = make_runner(config(tmp_path / "theirs", "reference"))
    found, expected = logits_of(ran, STEPS[:1]), logits_of(theirs, STEPS[:1])
    if layout == "w8a8":
        assert 1e-4 * expected.norm() < (found - expected).norm() < 0.1 * expected.norm()
    else:
        assert_near(found, expected)


@pytest.mark.parametrize("type_", ["Q4_0", "Q8_0"])
def test_a_gguf_files_embedding_and_head_stay_in_its_groups(
    tmp_path: Path, type_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are one, and are read by token and multiplied."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    mine, theirs = gguf_made(tmp_path, type_, "mha-tied")
    ran = make_runner(config(mine, "triton"))
    wide = make_runner(config(theirs, "reference"))
    assert_near(logits_of(ran, STEPS), logits_of(wide, STEPS))
    np.testing.assert_array_equal(ran.head_rows([0, 255]), wide.head_rows([0, 255]))
    assert ran.info.num_parameters == wide.info.num_parameters
    assert ran.info.parameter_bytes < 0.35 * wide.info.parameter_bytes


def products_of(ran: TritonRunner) -> list[Any]:
    """The weights that meet rows in a step."""
    seen: list[Any] = []
    real = TritonOps.linear

    def linear(self: TritonOps, x: torch.Tensor, weights: Any) -> torch.Tensor:
        seen.append(weights.weights)
        return real(self, x, weights)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TritonOps, "linear", linear)
        ran.collect(ran.launch(STEPS[0]))
    return seen


def test_fewer_bits_are_rounded_again_where_that_is_asked(
    checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told, layer, _, kind = LAYOUTS["gptq-order"]
    quantized.write(checkpoint(), tmp_path / "mine", told, layer)
    with caplog.at_level(logging.WARNING):
        ran = make_runner(config(tmp_path / "mine", "triton", quantization="int8"))
    assert f"7 matrices of {kind} are rounded again, to int8" in caplog.text
    assert isinstance(ran, TritonRunner)
    assert {weights.held for weights in products_of(ran)} == {"int8"}


def test_matrices_are_read_in_strips(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which end within a tensor that is stacked with others."""
    whole = made(checkpoint())
    monkeypatch.setattr(triton_weights, "_STRIP", 48 * 64)
    for one, other in zip(whole, made(checkpoint()), strict=True):
        assert torch.equal(one.numbers, other.numbers)
        assert torch.equal(one.scales, other.scales)


def made(folder: Path) -> list[NarrowMatrix]:
    ran = make_runner(config(folder, "triton", quantization="int4", threads=2))
    assert isinstance(ran, TritonRunner)
    layer = ran._model._layers[0]  # type: ignore[attr-defined]
    linears = layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down
    return [one.weights for one in linears]


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_ranks_have_their_part(tmp_path: Path, quantization: str) -> None:
    """Of what one device would have: rows, or columns between groups, beside the scales that all
    columns set. That they compute with it: test_ranks.py."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
    folder = checkpoints.make(tmp_path / "model", "gqa", **sizes)
    (alone,) = layers_of(folder, quantization, ranks=1)
    first, second = layers_of(folder, quantization, ranks=2)
    for name, cut in (("o_proj", 1), ("down_proj", 1), ("gate_proj+up_proj", 0)):
        whole = alone[name].rows()
        parts = [one[name].rows() for one in (first, second)]
        if cut == 0:  # of both gate and up
            parts = [torch.cat(halves) for halves in zip(*(p.chunk(2) for p in parts), strict=True)]
            assert torch.equal(torch.cat(parts), whole)
        else:
            assert torch.equal(torch.cat(parts, dim=1), whole)
        assert first[name].nbytes < 0.6 * alone[name].nbytes + 4 * 128


def layers_of(folder: Path, quantization: str, ranks: int) -> list[dict[str, NarrowMatrix]]:
    """Of each rank the matrices, by the last parts of their names."""
    model, found = read_config(folder), []
    for rank in range(ranks):
        shard = Shard(model, rank, ranks)
        with open_checkpoint(folder, model) as checkpoint:
            on = torch.float32, torch.device("cpu")
            weights = TritonWeights(checkpoint.tensors, *on, shard, quantization, threads=1)
            build_model(shard.config, weights)
        found.append(
            {
                "+".join(name.split(".")[-2] for name in names): matrix
                for names, matrix in weights._narrow.items()
            }
        )
    return found


def test_adapters_add_to_rows_that_meet_few_bits(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = checkpoint()
    adapter = peft.read(adapters.make(tmp_path / "a", folder, seed=1, rank=5), folder, 5)
    rounded = copy_of_rounded(folder, tmp_path / "rounded", "int8")
    step = plan([(PROMPT, 0, [4])], [0])
    found = []
    for own in (
        config(folder, "triton", quantization="int8"),
        config(rounded, "reference"),
    ):
        ran = make_runner(own)
        ran.adapt(1, adapter)
        found.append(logits_of(ran, [step, with_adapters(step, [1])]))
    assert_near(*found)
    assert (found[0][0] - found[0][1]).norm() > 1e-3 * found[0][0].norm()


def test_a_weight_that_is_no_number_is_told(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """It is not rounded to one that is."""
    values = quantized.write(checkpoint(), tmp_path / "broken", {}, as_it_is)
    values["model.layers.0.mlp.down_proj.weight"][5, 7] = np.inf
    told = json.loads((checkpoint() / "config.json").read_text())
    (tmp_path / "broken/config.json").write_text(json.dumps(told))
    save_file(values, tmp_path / "broken/model.safetensors")
    for quantization in ("int8", "int4", "fp8"):
        ran = make_runner(config(tmp_path / "broken", "triton", quantization=quantization))
        (result,) = ran.collect(ran.launch(STEPS[0])).results
        assert result.error is not None
        assert result.error.message == "The model's numbers are not finite"


def test_widths_that_do_not_fit_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    narrow = checkpoints.make(tmp_path / "narrow", "gqa", intermediate_size=98)
    wide = checkpoints.make(tmp_path / "wide", "gqa", intermediate_size=128)
    ran = make_runner(config(narrow, "triton", quantization="int8"))
    assert logits_of(ran, STEPS[:1]).isfinite().all()
    (narrow / "model.safetensors").unlink()
    words = "quantization 'int4': intermediate_size 98 is no multiple of 64"
    with pytest.raises(ValueError, match=words):
        make_runner(config(narrow, "triton", quantization="int4"))
    for folder, ranks, told in (
        (narrow, 1, words),
        (wide, 2, "hidden_size . head_dim 32, of each of 2 ranks, is no multiple of 64"),
    ):
        own = {"device": "cuda", "quantization": "int4", "tensor_parallel": ranks}
        model = ModelSpec(name="m", path=str(folder), worker=own)
        with pytest.raises(RuntimeError, match=told.replace("hidden_size .", "heads .")):
            check_engines(model, folder, Settings())
    model = ModelSpec(name="m", path=str(wide), worker={"device": "cuda", "quantization": "int4"})
    check_engines(model, wide, Settings())

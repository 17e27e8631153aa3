"""Checkpoints that others have quantized: what an engine computes of one is what a checkpoint of
the values computes; taken to the bit where the engine's formats hold it, else said; broken ones
refused by name."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file as save_tensors

from kernels.cpu.library import Library, built
from kernels.cpu.matrix import E4M3
from services.worker.engine.formats.fp8 import Fp8 as Fp8Tensor
from services.worker.engine.models.config import UnsupportedModel
from services.worker.engine.models.registry import read_config
from services.worker.engine.parallel.shard import Shard
from services.worker.engine.weights.checkpoint import check_weights, open_checkpoint
from services.worker.engine.weights.cpu_weights import CpuWeights
from tests.support import quantized
from tests.support.programs import whole
from tests.unit.engine import checkpoints
from tests.unit.engine.driving import assert_near, make_engine
from tests.unit.engine.weights.test_gguf import logits_of

pytestmark = pytest.mark.skipif(not built(), reason="no kernels for this processor")

LAYER = "model.layers.1.mlp.down_proj"


def as_it_is(weight: Any, seed: int) -> quantized.Made:
    return {"weight": weight}, weight


def groups(format_: str, **weights: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group"} | weights
    own = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "config_groups": {"group_0": own},
        "ignore": ["lm_head"],
    }


PACKED, BYTES = groups("pack-quantized"), groups("int-quantized", strategy="channel", num_bits=8)
OF_TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}


def with_rows(**told: Any) -> dict[str, Any]:
    """As BYTES, and of rows, too."""
    group = BYTES["config_groups"]["group_0"] | {"input_activations": OF_TOKENS | told}
    return BYTES | {"config_groups": {"group_0": group}}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}


def test_what_config_says_of_numbers_tells_packed_files_apart(tmp_path: Path) -> None:
    """The two layouts of GPTQ differ in their zeros alone, of which the tensors say nothing."""
    source = checkpoints.make(tmp_path / "source", "gqa", intermediate_size=128)
    mine = tmp_path / "mine"
    quantized.write(source, mine, GPTQ, quantized.gptq(4, 32, zeros=True))
    packed, found = str(tmp_path / "packed"), []
    for layout in ("gptq", "gptq_v2"):
        config = json.loads((mine / "config.json").read_text())
        config["quantization_config"]["checkpoint_format"] = layout
        (mine / "config.json").write_text(json.dumps(config))
        shard = Shard(read_config(mine))
        for folder in (packed, None):
            made = CpuWeights(Library(built()[0]), str(mine), shard, "float32", folder, 1)
            found.append(np.array(made._memory))
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[2], found[3])
    assert not np.array_equal(found[0], found[2])


AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm"}
WITH_ZEROS = "int8_groups", "int4_zeros"
LAYOUTS: dict[
    str, tuple[dict[str, Any], Callable[[Any, int], quantized.Made], str | tuple[str, str], str]
] = {
    # In what rows are held, those of 64 and those of 128 where that is not one; else their kind.
    "packed-32": (PACKED, quantized.packed(4, 32), "int4", ""),
    "packed-64": (PACKED, quantized.packed(4, 64), "int4", ""),
    "packed-rows": (PACKED, quantized.packed(4, 0), "int4", ""),
    "packed-16": (PACKED, quantized.packed(4, 16), "", "int4"),
    "packed-zeros": (PACKED, quantized.packed(4, 32, zeros=True), WITH_ZEROS, ""),
    "packed-8": (PACKED, quantized.packed(8, 0), "int8", ""),
    "packed-8-32": (PACKED, quantized.packed(8, 32), "int8_groups", ""),
    "packed-8-zeros": (PACKED, quantized.packed(8, 0, zeros=True), "", "int8"),
    "bytes": (BYTES, quantized.bytes_, "int8", ""),
    "w8a8": (with_rows(), quantized.bytes_, "w8a8", ""),
    "w8a8-static": (with_rows(dynamic=False, strategy="tensor"), quantized.bytes_, "int8", ""),
    "w8a8-zeros": (with_rows(symmetric=False), quantized.bytes_, "int8", ""),
    "gptq": (GPTQ, quantized.gptq(4, 32), "int4", ""),
    "gptq-64": (GPTQ, quantized.gptq(4, 64), "int4", ""),
    "gptq-rows": (GPTQ, quantized.gptq(4, 0), "int4", ""),
    "gptq-zeros": (GPTQ, quantized.gptq(4, 32, zeros=True), WITH_ZEROS, ""),
    "gptq-order": (GPTQ, quantized.gptq(4, 32, order=True), "", "GPTQ's int4"),
    "gptq-v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, quantized.gptq(4, 32, less=0), "int4", ""),
    "gptq-8": (GPTQ, quantized.gptq(8, 0), "int8", ""),
    "gptq-8-32": (GPTQ, quantized.gptq(8, 32), "int8_groups", ""),
    "awq": (AWQ, quantized.awq(32), WITH_ZEROS, ""),
    "awq-no-zeros": (AWQ, quantized.awq(32, zeros=False), "int4", ""),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of widths that int4 goes with."""
    folder = tmp_path_factory.mktemp("source")
    return checkpoints.make(folder, "gqa", intermediate_size=128)


@pytest.fixture
def made(source: Path, tmp_path: Path) -> Callable[[str], tuple[Path, Path]]:
    """A layout's checkpoint, and one of what it stands for."""

    def make(layout: str) -> tuple[Path, Path]:
        config, layer, _, _ = LAYOUTS[layout]
        values = quantized.write(source, tmp_path / "mine", config, layer)
        quantized.write(source, tmp_path / "theirs", {}, as_it_is)
        config_of = json.loads((source / "config.json").read_text())
        (tmp_path / "theirs/config.json").write_text(json.dumps(config_of))
        save_file(values, tmp_path / "theirs/model.safetensors")
        return tmp_path / "mine", tmp_path / "theirs"

    return make


Make = Callable[[str], tuple[Path, Path]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_those_that_the_layout_stands_for(made: Make, layout: str) -> None:
    """To the bit; and so is what the kernels are given, where one of their formats holds them."""
    mine, theirs = made(layout)
    with (
        open_checkpoint(mine, read_config(mine)) as ours,
        open_checkpoint(theirs, read_config(theirs)) as others,
    ):
        assert ours.tensors.keys() == others.tensors.keys()
        for name, stored in ours.tensors.items():
            expected = others.tensors[name].float32()
            np.testing.assert_array_equal(stored.float32(), expected, name)
            np.testing.assert_array_equal(stored.float32(13, 31), expected[13:31], name)
            if not name.endswith("_proj.weight"):
                continue
            held = LAYOUTS[layout][2]
            best = held if isinstance(held, str) else held[expected.shape[1] == 128]
            assert next(iter(stored.held), "") == best
            for to in stored.held:
                numbers, scales = whole(to, *stored.narrow(7, 25, to))
                np.testing.assert_array_equal(numbers.astype(np.float32) * scales, expected[7:25])


@pytest.mark.parametrize(
    "layout",
    ["packed-64", "bytes", "gptq", "gptq-zeros", "gptq-order", "gptq-8-32", "awq", "awq-no-zeros"],
)
def test_an_engine_computes_of_the_values(
    made: Make, layout: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mine, theirs = made(layout)
    expected = logits_of(theirs, monkeypatch, kernels="reference")
    with caplog.at_level(logging.WARNING):
        for kernels in (built()[0], "reference"):
            found = logits_of(mine, monkeypatch, kernels=kernels)
            assert_near(found, expected)
    _, _, held, kind = LAYOUTS[layout]
    assert (f"14 matrices of {kind} are widened to float32" in caplog.text) == (not held)
    small, wide = (make_engine(folder).info.parameter_bytes for folder in (mine, theirs))
    assert (small < 0.7 * wide) == bool(held)


def test_what_is_not_held_is_rounded_where_that_is_asked(
    made: Make, caplog: pytest.LogCaptureFixture
) -> None:
    mine, theirs = made("gptq-order")
    with caplog.at_level(logging.WARNING):
        small = make_engine(mine, quantization="int8").info.parameter_bytes
    assert "14 matrices of GPTQ's int4 are rounded again, to int8" in caplog.text
    assert small == make_engine(theirs, quantization="int8").info.parameter_bytes


@pytest.mark.parametrize("hidden", [64, 128])
def test_matrices_that_are_one_meet_in_what_holds_them_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hidden: int
) -> None:
    """Where one of two has zeros and the other none."""
    source = checkpoints.make(
        tmp_path / "source", "gqa", hidden_size=hidden, intermediate_size=128, head_dim=16
    )

    def every_other(weight: Any, seed: int) -> quantized.Made:
        return quantized.awq(32, zeros=bool(seed % 2))(weight, seed)

    values = quantized.write(source, tmp_path / "mine", AWQ, every_other)
    save_file(values, source / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        found = logits_of(tmp_path / "mine", monkeypatch)
    assert "matrices" not in caplog.text
    assert_near(found, logits_of(source, monkeypatch, kernels="reference"))
    small, wide = (make_engine(one).info.parameter_bytes for one in (tmp_path / "mine", source))
    assert small < 0.7 * wide


@pytest.mark.parametrize("held", [True, False])
def test_scales_that_no_half_is_are_kept(source: Path, tmp_path: Path, held: bool) -> None:
    """They are bfloat16's, of a larger range: below 2^-24 a half is 0."""
    quantized.write(source, tmp_path / "mine", PACKED, quantized.packed(4, 32))
    path = tmp_path / "mine/model.safetensors"
    tensors = load_tensors(path)
    name = f"{LAYER}.weight_scale"
    tensors[name] = tensors[name].bfloat16()
    if not held:
        tensors[name][3, 1] = 2.0**-30
    save_tensors(tensors, path)
    with open_checkpoint(path.parent, read_config(path.parent)) as found:
        stored = found.tensors[f"{LAYER}.weight"]
        assert stored.held == (("int4", "int4_zeros", "int8_groups") if held else ())
        if not held:
            assert 0 < np.abs(stored.float32()[3, 32:64]).max() < 1e-8


def test_rows_of_tokens_are_int8_where_a_checkpoint_is_made_for_that(
    made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And stay as they are where int8 is asked for; without, w8a8 can be asked for: the weights are
    the same."""
    mine, theirs = made("w8a8")
    weights = logits_of(theirs, monkeypatch, kernels="reference")
    found = logits_of(mine, monkeypatch)
    assert 1e-4 * weights.norm() < (found - weights).norm() < 0.1 * weights.norm()
    alone = logits_of(mine, monkeypatch, quantization="int8")
    config = json.loads((mine / "config.json").read_text()) | {"quantization_config": BYTES}
    (mine / "config.json").write_text(json.dumps(config))
    assert_near(logits_of(mine, monkeypatch), weights)
    assert torch.equal(logits_of(mine, monkeypatch, quantization="int8"), alone)
    asked = logits_of(mine, monkeypatch, quantization="w8a8")
    assert 1e-4 * weights.norm() < (asked - weights).norm() < 0.1 * weights.norm()


BLOCKS = {"blocks": [48, 40], "wide": [48, 2**31 - 1], "aligned": [16, 128]}
"""Which divide no matrix; which no memory holds; as most have them."""


@pytest.fixture
def fp8(source: Path, tmp_path: Path) -> Callable[..., tuple[Path, dict[str, torch.Tensor]]]:
    """A checkpoint, and what its matrices stand for."""

    def make(scales: str, name: str) -> tuple[Path, dict[str, torch.Tensor]]:
        config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
        if scales in BLOCKS:
            config["weight_block_size"] = BLOCKS[scales]
        quantized.write(source, tmp_path / "mine", config, as_it_is)
        path = tmp_path / "mine/model.safetensors"
        tensors, values = load_tensors(path), load_tensors(path)
        for weight in [one for one in tensors if one.endswith("_proj.weight")]:
            n, k = tensors[weight].shape
            small = (tensors[weight] * 100).to(torch.float8_e4m3fn)
            shape = {"one": (1,), "rows": (n,), "column": (n, 1)}
            if scales in BLOCKS:
                rows, width = BLOCKS[scales][0], min(k, BLOCKS[scales][1])
                shape[scales] = -(-n // rows), -(-k // width)
            scale = torch.rand(shape[scales], generator=torch.Generator().manual_seed(n)) + 0.5
            wide = scale / 100
            if scales in BLOCKS:
                wide = wide.repeat_interleave(rows, 0)[:n].repeat_interleave(width, 1)[:, :k]
            elif scales == "rows":
                wide = wide[:, None]
            values[weight] = small.float() * wide
            tensors[weight] = small
            tensors[weight.removesuffix("weight") + name] = scale / 100
            tensors[weight.removesuffix("weight") + "input_scale"] = torch.ones(1)
        save_tensors(tensors, path)
        return path.parent, values

    return make


Fp8 = Callable[..., tuple[Path, dict[str, torch.Tensor]]]


@pytest.mark.parametrize("scales", ["one", "rows", "column", *BLOCKS])
@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
def test_fp8_is_held_to_the_bit(fp8: Fp8, scales: str, name: str) -> None:
    """By rows, or by blocks that 128 divides."""
    folder, values = fp8(scales, name)
    with open_checkpoint(folder, read_config(folder)) as found:
        for weight, stored in found.tensors.items():
            if not weight.endswith("_proj.weight"):
                continue
            expected = values[weight].numpy()
            by_blocks = ("fp8_blocks",) if expected.shape[1] == 128 else ()
            held = () if scales == "blocks" else ("fp8", *by_blocks)
            assert (stored.kind, stored.held) == ("FP8", held)
            np.testing.assert_array_equal(stored.float32(), expected)
            np.testing.assert_array_equal(stored.float32(13, 29), expected[13:29])
            for to in stored.held:
                numbers, by = whole(to, *stored.narrow(13, 29, to))
                np.testing.assert_array_equal(numbers.astype(np.float32) * by, expected[13:29])


@pytest.mark.parametrize("scales", ["one", "rows", *BLOCKS])
def test_an_engine_computes_of_fp8s_values(
    fp8: Fp8,
    source: Path,
    scales: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And keeps them in 8 bits where it holds them, or widens them and says so."""
    folder, values = fp8(scales, "weight_scale")
    theirs = checkpoints.make(tmp_path / "theirs", "gqa", intermediate_size=128)
    save_tensors(values, theirs / "model.safetensors", {"format": "pt"})
    expected = logits_of(theirs, monkeypatch, kernels="reference")
    with caplog.at_level(logging.WARNING):
        assert_near(logits_of(folder, monkeypatch), expected)
    widens = scales == "blocks"
    assert ("14 matrices of FP8 are widened to float32" in caplog.text) == widens
    small, wide = (make_engine(one).info.parameter_bytes for one in (folder, theirs))
    assert (small < 0.7 * wide) != widens
    assert_near(logits_of(folder, monkeypatch, kernels="reference"), expected)


def test_fp8_by_blocks_meets_blocks_and_rows(tmp_path: Path) -> None:
    """Of a matrix of several tensors, one of which has scales of rows: by blocks."""
    numbers = np.arange(256, dtype=np.uint8).reshape(1, 256).repeat(4, 0) & 0x77
    rows = Fp8Tensor((4, 256), lambda a, b: numbers[a:b], lambda a, b: np.ones((b - a, 1)), 256)
    blocks = Fp8Tensor((4, 256), rows.numbers, lambda a, b: np.ones((b - a, 2)), 128)
    odd = Fp8Tensor((4, 192), rows.numbers, lambda a, b: np.ones((b - a, 2)), 128)
    assert (rows.held, blocks.held, odd.held) == (("fp8", "fp8_blocks"), ("fp8_blocks",), ())
    np.testing.assert_array_equal(rows.narrow(1, 3, "fp8_blocks")[1], np.ones((2, 2)))


def test_what_is_no_number_in_fp8_spoils_its_scale() -> None:
    numbers = np.zeros((4, 256), np.uint8)
    numbers[1, 200], numbers[2, 3] = 0x7F, 0xFF
    tensor = Fp8Tensor((4, 256), lambda a, b: numbers[a:b], lambda a, b: np.ones((b - a, 2)), 128)
    scales = tensor.narrow(0, 4, "fp8_blocks")[1]
    np.testing.assert_array_equal(np.isnan(scales), [[0, 0], [0, 1], [1, 0], [0, 0]])
    of_rows = Fp8Tensor((4, 256), tensor.numbers, lambda a, b: np.ones((b - a, 1)), 256)
    assert np.isnan(of_rows.narrow(0, 4, "fp8")[1]).tolist() == [False, True, True, False]
    np.testing.assert_array_equal(np.isnan(of_rows.float32()), numbers >= 0x7F)


def test_all_of_fp8s_values() -> None:
    """Subnormals, the largest, and what is no number."""
    bits = torch.arange(256, dtype=torch.uint8)
    np.testing.assert_array_equal(E4M3, bits.view(torch.float8_e4m3fn).float().numpy())


def test_biases_of_zeros_are_left_out(source: Path, tmp_path: Path) -> None:
    """As AutoGPTQ writes them beside every matrix; others are refused."""
    quantized.write(source, tmp_path / "mine", GPTQ, quantized.gptq(4, 32))
    path = tmp_path / "mine/model.safetensors"
    tensors = load_file(path) | {f"{LAYER}.bias": np.zeros(64, np.float16)}
    save_file(tensors, path)
    check_weights(path.parent, read_config(path.parent))
    tensors[f"{LAYER}.bias"][5] = 1
    save_file(tensors, path)
    with pytest.raises(UnsupportedModel, match=r"down_proj\.bias has no place in the model"):
        check_weights(path.parent, read_config(path.parent))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("text", "quantization_config 'text' is no object"),
        ({}, "quant_method None is not supported; supported: compressed-tensors, gptq"),
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported"),
        ({"quant_method": ["gptq"]}, "quant_method ['gptq'] is not supported"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported"),
        (AWQ | {"version": "gemv"}, "version 'gemv' is not supported; supported: gemm"),
        (PACKED | {"format": "marlin-24"}, "format 'marlin-24' is not supported"),
        (PACKED | {"config_groups": {}}, "config_groups names no group"),
        (PACKED | {"config_groups": {"a": 5}}, "config_groups.a.weights is no object"),
        (PACKED | {"transform_config": {"a": 1}}, "transform_config is not supported"),
        (groups("pack-quantized", strategy="token"), "weights.strategy 'token'"),
        (
            {"quant_method": "fp8", "weight_block_size": [0, 5]},
            "weight_block_size [0, 5] is no rows and columns",
        ),
    ],
)
def test_what_a_configuration_asks_for_is_refused_by_name(
    source: Path, tmp_path: Path, config: Any, words: str
) -> None:
    """Before any weight is looked for."""
    told = json.loads((source / "config.json").read_text()) | {"quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(told))
    with pytest.raises(UnsupportedModel) as caught:
        read_config(tmp_path)
    assert words in str(caught.value)


Change = Callable[[dict[str, Any]], Any]


def part(name: str, value: Any) -> Change:
    return lambda tensors: tensors.update({f"{LAYER}.{name}": value})


def gone(name: str) -> Change:
    return lambda tensors: tensors.pop(f"{LAYER}.{name}")


@pytest.mark.parametrize(
    ("layout", "change", "words"),
    [
        ("packed-32", gone("weight_scale"), "weight_scale is missing"),
        ("packed-32", part("weight_scale", np.ones((64, 4), np.int32)), "weight_scale is I32, not"),
        ("packed-32", part("weight_scale", np.ones((63, 4), np.float32)), "is [63, 4]"),
        ("packed-32", part("weight_scale", np.ones((64, 0), np.float32)), "is [64, 0]"),
        ("packed-32", part("weight_scale", np.ones((64, 3), np.float32)), "do not divide 128"),
        ("packed-32", part("weight_scale", np.ones((64, 999), np.float32)), "do not divide 128"),
        ("packed-32", part("weight_shape", np.array([64, 999])), "weight_shape says [64, 999]"),
        ("packed-32", part("weight_packed", np.zeros((64, 7), np.int32)), "is [64, 7]"),
        ("packed-32", part("weight_packed", np.zeros((64, 16), np.uint8)), "is U8, not I32"),
        ("packed-zeros", part("weight_zero_point", np.zeros((2, 4), np.int32)), "is [2, 4]"),
        ("packed-32", part("weight", np.zeros((64, 128), np.int8)), "weight is there beside"),
        ("packed-32", part("bias", np.zeros((), np.float32)), "bias has no place in the model"),
        ("bytes", gone("weight_scale"), "weight_scale is missing"),
        ("gptq", gone("qzeros"), "qzeros is missing"),
        ("gptq", gone("qweight"), "g_idx has no place"),
        ("gptq", part("qzeros", np.zeros((4, 9), np.int32)), "qzeros is [4, 9]"),
        ("gptq", part("g_idx", np.full(128, 4, np.int32)), "g_idx names groups that are none"),
        ("gptq", part("g_idx", np.full(128, -2, np.int32)), "g_idx names groups that are none"),
        ("gptq", part("g_idx", np.zeros(127, np.int32)), "g_idx is [127]"),
        ("gptq", part("qweight", np.zeros((64, 16), np.int32)), "qweight is [64, 16]"),
        ("awq", part("qweight", np.zeros((128, 9), np.int32)), "qweight is [128, 9]"),
        ("awq", part("scales", np.ones((3, 64), np.float16)), "qzeros is [4, 8]"),
    ],
)
def test_broken_matrices_are_refused_by_name(
    source: Path, tmp_path: Path, layout: str, change: Change, words: str
) -> None:
    config, layer, _, _ = LAYOUTS[layout]
    quantized.write(source, tmp_path / "mine", config, layer)
    path = tmp_path / "mine/model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(UnsupportedModel) as caught:
        check_weights(path.parent, read_config(path.parent))
    assert words in str(caught.value)
    assert LAYER in str(caught.value)


def test_a_file_cut_short_while_it_is_read_is_told(made: Make) -> None:
    mine, _ = made("gptq")
    with open_checkpoint(mine, read_config(mine)) as found:
        path = mine / "model.safetensors"
        path.write_bytes(path.read_bytes()[:5000])
        with pytest.raises(UnsupportedModel, match="cut short"):
            [stored.float32() for stored in found.tensors.values()]

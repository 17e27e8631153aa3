"""`penstock quantize`: what it writes is what an engine rounds when it loads, and is read by others
as compressed-tensors' own files are."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_tensors

from kernels.cpu.library import built
from kernels.cpu.matrix import rounded
from services.cli.command_line import parser
from services.cli.commands import quantize as command
from services.worker.engine.formats.writing import quantization_config
from services.worker.engine.models.parts import is_router
from services.worker.engine.models.registry import read_config
from services.worker.engine.weights.checkpoint import open_checkpoint
from services.worker.engine.weights.weights import shapes
from tests.support import gguf
from tests.support.tokenizers import byte_level
from tests.unit.engine import checkpoints
from tests.unit.engine.driving import make_engine
from tests.unit.engine.weights.test_gguf import logits_of

pytestmark = pytest.mark.skipif(not built(), reason="no kernels for this processor")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    checkpoints.make(folder, "gqa", intermediate_size=128)
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    return folder


def quantize(model: Path, format_: str, to: Path) -> int:
    return command.main(parser().parse_args(["quantize", str(model), "--format", format_, str(to)]))


def refused(model: Path, format_: str, to: Path) -> str:
    with pytest.raises((RuntimeError, ValueError, OSError)) as caught:
        quantize(model, format_, to)
    return str(caught.value)


@pytest.mark.parametrize("format_", ["int8", "int4", "fp8", "w8a8"])
def test_an_engine_computes_the_same_as_if_it_had_rounded(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format_: str
) -> None:
    """To the bit; and the other files are there."""
    assert quantize(source, format_, tmp_path / "out") == 0
    torch.testing.assert_close(
        logits_of(tmp_path / "out", monkeypatch, quantization=format_),
        logits_of(source, monkeypatch, quantization=format_),
        rtol=0,
        atol=0,
    )
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors"} == names
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    small = (tmp_path / "out/model.safetensors").stat().st_size
    assert small < 0.7 * (source / "model.safetensors").stat().st_size
    info = make_engine(tmp_path / "out").info  # embeddings as they are stored
    assert info.num_parameters == make_engine(source).info.num_parameters


@pytest.mark.parametrize(("format_", "bits", "group"), [("int8", 8, 0), ("int4", 4, 32)])
def test_tensors_are_as_compressed_tensors_has_them(
    source: Path, tmp_path: Path, format_: str, bits: int, group: int
) -> None:
    """Unpacked number by number."""
    assert quantize(source, format_, tmp_path / "out") == 0
    found, before = (load_file(f / "model.safetensors") for f in (tmp_path / "out", source))
    told = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    weights = told["config_groups"]["group_0"]["weights"]
    assert (told["format"], weights["num_bits"]) == ("pack-quantized", bits)
    assert (weights["strategy"], weights["group_size"]) == (
        ("group", 32) if group else ("channel", None)
    )
    for name, weight in before.items():
        if not name.endswith("_proj.weight"):
            np.testing.assert_array_equal(found.pop(name), weight)
            continue
        words, scale = found.pop(f"{name}_packed"), found.pop(f"{name}_scale")
        n, k = found.pop(f"{name}_shape")
        assert words.dtype == np.int32
        numbers = np.stack([words >> bits * i & (1 << bits) - 1 for i in range(32 // bits)], axis=2)
        values = numbers.reshape(n, k).astype(np.float32) - (1 << bits - 1)
        values *= np.repeat(scale.astype(np.float32), group or k, axis=1)
        np.testing.assert_array_equal(values, rounded(weight, format_))
    assert not found


@pytest.mark.parametrize(
    ("format_", "layout", "type_", "rows"),
    [
        ("fp8", "float-quantized", "float", None),
        (
            "w8a8",
            "int-quantized",
            "int",
            {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"},
        ),
    ],
)
def test_bytes_are_as_compressed_tensors_has_them(
    source: Path, tmp_path: Path, format_: str, layout: str, type_: str, rows: dict[str, Any] | None
) -> None:
    """Each in a tensor `weight`."""
    assert quantize(source, format_, tmp_path / "out") == 0
    found = load_tensors(tmp_path / "out/model.safetensors")
    told = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    group = told["config_groups"]["group_0"]
    assert (told["format"], group["weights"]["type"]) == (layout, type_)
    assert (group["weights"]["num_bits"], group["weights"]["strategy"]) == (8, "channel")
    assert group.get("input_activations") == rows
    for name, weight in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            np.testing.assert_array_equal(found.pop(name), weight)
            continue
        numbers, scale = found.pop(name), found.pop(f"{name}_scale")
        assert numbers.dtype == (torch.float8_e4m3fn if format_ == "fp8" else torch.int8)
        assert scale.shape == (len(weight), 1)
        np.testing.assert_array_equal(numbers.float() * scale, rounded(weight, format_))
    assert not found


@pytest.mark.parametrize("format_", ["fp8", "w8a8"])
def test_what_is_so_already_stays_so(source: Path, tmp_path: Path, format_: str) -> None:
    assert quantize(source, format_, tmp_path / "once") == 0
    assert quantize(tmp_path / "once", format_, tmp_path / "again") == 0
    one, other = (load_tensors(tmp_path / name / "model.safetensors") for name in ("once", "again"))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor.view(torch.uint8), other[name].view(torch.uint8))


def test_a_gguf_files_numbers_are_kept_where_they_fit(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    vocabulary = gguf.vocabulary(json.loads(byte_level(257 + 8).to_str()))
    folder = checkpoints.make(tmp_path / "hub", "gqa", vocab_size=320, intermediate_size=128)
    path = tmp_path / "model.gguf"
    values = gguf.convert(folder, path, lambda _: "Q4_0", **vocabulary)
    assert quantize(path, "int4", tmp_path / "out") == 0
    assert "2 matrices of Q4_0 are widened to bfloat16" in capsys.readouterr().out
    with open_checkpoint(tmp_path / "out", read_config(tmp_path / "out")) as found:
        for name, stored in found.tensors.items():
            if name.endswith("_proj.weight"):
                np.testing.assert_array_equal(stored.float32(), values[name], name)
    assert "has 4 bits already (Q4_0)" in refused(path, "int8", tmp_path / "other")
    gguf.convert(folder, path, lambda _: "Q8_0", **vocabulary)
    assert quantize(path, "int8", tmp_path / "again") == 0
    assert "14 matrices of Q8_0 are rounded again" in capsys.readouterr().out


def test_what_cannot_be_is_said_and_nothing_is_left(source: Path, tmp_path: Path) -> None:
    narrow = checkpoints.make(tmp_path / "narrow", "gqa")  # 96
    for model, to, words in (
        (narrow, tmp_path / "out", "[64, 96]: int4 needs rows of a multiple of 64"),
        (narrow, Path("/proc/x"), "OUT: nothing can be written into /proc: "),
        (source, tmp_path / "narrow", "is there already"),
        (source, tmp_path / "none" / "out", "there is no folder"),
        (tmp_path / "nowhere", tmp_path / "out", f"MODEL: there is no folder {tmp_path}/nowhere"),
        (tmp_path / "no.gguf", tmp_path / "out", f"MODEL: there is no file {tmp_path}/no.gguf"),
    ):
        assert words in (told := refused(model, "int4", to))
        assert told.startswith(("MODEL: ", "OUT: "))
        assert told.count(str(tmp_path)) <= 1
    assert [path.name for path in tmp_path.iterdir()] == ["narrow"]


@pytest.mark.parametrize("kind", ["mixtral", "qwen2-moe", "qwen3-moe"])
def test_what_stays_wide_is_told_to_readers(tmp_path: Path, kind: str) -> None:
    """Who reads by `ignore` takes all other linears for packed ones."""
    names = shapes(read_config(checkpoints.make(tmp_path, kind)))
    linears = [name for name in names if ".mlp." in name or "_proj" in name or "_moe." in name]
    ignored = [one for one in quantization_config("int8")["ignore"] if one.startswith("re:")]
    told = {n for n in linears for one in ignored if re.match(one[3:], n.removesuffix(".weight"))}
    assert told == {name for name in linears if is_router(name.removesuffix(".weight"))} != set()


def test_parts_of_a_checkpoint_become_one(source: Path, tmp_path: Path) -> None:
    """And the index of its parts does not stay."""
    parts = checkpoints.make(tmp_path / "parts", "gqa", intermediate_size=128, shard="100KB")
    assert (parts / "model.safetensors.index.json").exists()
    assert quantize(parts, "int8", tmp_path / "out") == 0
    assert not (tmp_path / "out/model.safetensors.index.json").exists()
    assert quantize(source, "int8", tmp_path / "whole") == 0
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "whole"))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        np.testing.assert_array_equal(tensor, other[name])


def test_a_checkpoint_that_was_quantized_before_is_named(source: Path, tmp_path: Path) -> None:
    assert quantize(source, "int4", tmp_path / "int4") == 0
    assert quantize(tmp_path / "int4", "int4", tmp_path / "again") == 0  # the same numbers
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("int4", "again"))
    assert all((one[name] == other[name]).all() for name in one)
    told = refused(tmp_path / "int4", "int8", tmp_path / "int8")
    assert told.startswith("MODEL: tensor model.layers.0.")
    assert "has 4 bits already" in told
    save_file({}, tmp_path / "int4/model.safetensors")
    assert "tensors are missing" in refused(tmp_path / "int4", "int4", tmp_path / "empty")

"""Packed weights: the same whoever packs them, where and in how many pieces; never another's."""

import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels.cpu import library as library_module
from kernels.cpu.library import Library, built
from kernels.cpu.matrix import PANEL
from services.worker.engine.formats.stored import Plain
from services.worker.engine.models.config import UnsupportedModel
from services.worker.engine.models.registry import build_model, read_config
from services.worker.engine.parallel.shard import Shard
from services.worker.engine.weights import cpu_weights, packed_file
from services.worker.engine.weights.checkpoint import open_checkpoint
from services.worker.engine.weights.cpu_weights import CpuWeights
from tests.unit.engine import checkpoints
from tests.unit.engine.driving import generate, greedy, make_engine, make_prompts

pytestmark = pytest.mark.skipif(not built(), reason="no kernels for this processor")

Checkpoint = Callable[..., Path]


def load(
    folder: Path,
    packed_dir: Path | None = None,
    dtype: Any = "float32",
    threads: int = 2,
    quantization: str = "auto",
) -> CpuWeights:
    directory = None if packed_dir is None else str(packed_dir)
    about = Shard(read_config(folder)), dtype, directory, threads, quantization
    return CpuWeights(Library(built()[0]), str(folder), *about)


def no_packing(*_: object) -> None:
    raise AssertionError("they are packed already")


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"dtype": "bfloat16"},
        *({"quantization": one} for one in ("int8", "int4", "fp8", "w8a8")),
    ],
    ids=["float32", "bfloat16", "int8", "int4", "fp8", "w8a8"],
)
@pytest.mark.parametrize("variant", ["gqa", "mha-tied", "biases"])
def test_pieces_and_threads_make_no_difference(
    variant: str, how: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory, and in a file; nor do how many rows are rounded at a time."""
    folder = checkpoints.make(tmp_path / "model", variant, intermediate_size=128)
    whole = load(folder, threads=1, **how)
    for piece in (1000, 4096, 64 * 1024):
        monkeypatch.setattr(cpu_weights, "_PIECE", piece)
        monkeypatch.setattr(cpu_weights, "_STRIP", piece)
        for place in (None, tmp_path / str(piece)):
            in_pieces = load(folder, place, threads=3, **how)
            assert (in_pieces.place == "memory") == (place is None)
            np.testing.assert_array_equal(in_pieces._memory, whole._memory)


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_rounding_takes_little_memory_beside(tmp_path: Path, quantization: str) -> None:
    """Of a matrix of two million weights: not their floats, and what is computed of those."""
    checkpoints.make(tmp_path, "gqa", intermediate_size=16384, num_hidden_layers=1)
    tracemalloc.start()
    try:
        found = load(tmp_path, threads=1, quantization=quantization)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.num_parameters > 3_000_000
    assert most < 16 * 2**20


def test_each_row_lies_in_its_panel(checkpoint: Checkpoint) -> None:
    """Against the checkpoint's own, of stacked matrices, too."""
    folder = checkpoint("gqa")
    config, weights = read_config(folder), load(folder)
    attention = "model.layers.1.self_attn"
    queries, keys = 64, 32
    layers = {f"{attention}.q_proj": queries} | {f"{attention}.{n}_proj": keys for n in "kv"}
    matrix = weights.matrix(layers, 64)
    with open_checkpoint(folder, config) as found:
        rows = np.concatenate([found.tensors[f"{name}.weight"].float32() for name in layers])
        embedding = found.tensors["model.embed_tokens.weight"].float32()
    panels = matrix.panels.reshape(-1, 64, PANEL)
    np.testing.assert_array_equal(panels.transpose(0, 2, 1).reshape(-1, 64), rows)
    table = weights.table("model.embed_tokens", checkpoints.VOCAB, 64)
    whole = table.panels.reshape(-1, 64, PANEL).transpose(0, 2, 1).reshape(-1, 64)
    np.testing.assert_array_equal(whole[: checkpoints.VOCAB], embedding)
    assert not whole[checkpoints.VOCAB :].any()


def test_tied_tensors_lie_and_count_once(checkpoint: Checkpoint, tmp_path: Path) -> None:
    tied = checkpoint("mha-tied")
    shutil.copytree(tied, tmp_path / "untied")
    config = json.loads((tied / "config.json").read_text())
    untied = checkpoints.make(
        tmp_path / "untied", "mha-tied", tie_word_embeddings=False, **{"num_hidden_layers": 2}
    )
    assert config["tie_word_embeddings"]
    one, two = load(tied), load(untied)
    table = checkpoints.VOCAB * 64
    assert two.num_parameters - one.num_parameters == table
    assert two.bytes - one.bytes >= table * 4
    head = one.matrix({"model.embed_tokens": checkpoints.VOCAB}, 64)
    embedding = one.table("model.embed_tokens", checkpoints.VOCAB, 64)
    assert head.panels.ctypes.data == embedding.panels.ctypes.data


def test_the_second_engine_maps_what_the_first_has_packed(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, prompts = checkpoint("biases"), make_prompts(3)
    alone = generate(make_engine(folder), prompts, greedy(12))
    first = make_engine(folder, packed_dir=str(tmp_path))
    assert generate(first, prompts, greedy(12)) == alone
    monkeypatch.setattr(Library, "pack", no_packing)
    second = make_engine(folder, packed_dir=str(tmp_path))
    assert generate(second, prompts, greedy(12)) == alone
    (file,) = tmp_path.iterdir()
    assert second.info.weights == first.info.weights == str(file)


_LOAD = """
import sys, hashlib
from tests.unit.engine.weights.test_cpu_weights import load
from pathlib import Path
weights = load(Path(sys.argv[1]), Path(sys.argv[2]))
print(weights.place, hashlib.sha256(weights._memory).hexdigest())
"""


def test_processes_that_start_at_once_share_one_file(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", _LOAD, str(checkpoint("gqa")), str(tmp_path)]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ})
        for _ in range(3)
    ]
    told = {process.communicate(timeout=600)[0] for process in started}
    (file,) = tmp_path.iterdir()
    (line,) = told
    assert line.startswith(str(file))


def _patch(folder: Path, at_end: int, keep_times: bool) -> None:
    """Another last value of the last tensor; the file is as long as before."""
    path = folder / "model.safetensors"
    about = path.stat()
    with path.open("r+b") as file:
        file.seek(-at_end, os.SEEK_END)
        byte = file.read(1)
        file.seek(-at_end, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    if keep_times:
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


@pytest.mark.parametrize(("at_end", "keep_times"), [(1, True), (10_000, False)])
def test_another_checkpoint_in_the_same_place_is_packed_anew(
    checkpoint: Checkpoint, tmp_path: Path, at_end: int, keep_times: bool
) -> None:
    """Told by pieces of its content, and by the time of its last change."""
    folder, packed = tmp_path / "model", tmp_path / "packed"
    checkpoints.make(folder, "gqa", intermediate_size=4096)
    assert (folder / "model.safetensors").stat().st_size > 4_000_000, "pieces leave gaps"
    before = load(folder, packed)
    kept = before._memory.copy()
    _patch(folder, at_end, keep_times)
    after = load(folder, packed)
    assert after.place != before.place
    assert (after._memory != kept).sum() == 1
    np.testing.assert_array_equal(before._memory, kept)


@pytest.mark.parametrize("other", ["dtype", "instruction set", "sources", "rounding"])
def test_what_is_packed_otherwise_is_another_file(
    checkpoint: Checkpoint, tmp_path: Path, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load(checkpoint(), tmp_path)
    if other == "dtype":
        second = load(checkpoint(), tmp_path, dtype="bfloat16")
    elif other == "instruction set":
        if len(built()) == 1:
            pytest.skip("there is one only")
        library, config = Library(built()[-1]), read_config(checkpoint())
        second = CpuWeights(library, str(checkpoint()), Shard(config), "float32", str(tmp_path), 1)
    elif other == "rounding":
        (tmp_path / "other.py").write_text("")
        monkeypatch.setattr(library_module, "_ROUNDING", tmp_path / "other.py")
        second = load(checkpoint(), tmp_path)
    else:
        monkeypatch.setattr(Library, "name", "avx2-of-other-sources")
        second = load(checkpoint(), tmp_path)
    assert second.place != first.place


def test_a_checkpoint_that_changes_while_it_is_packed_is_refused(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, packed = tmp_path / "model", tmp_path / "packed"
    shutil.copytree(checkpoint(), folder)
    read = Plain.float32

    def and_change(self: Plain, *rows: int) -> Any:
        (folder / "model.safetensors").touch()
        return read(self, *rows)

    monkeypatch.setattr(Plain, "float32", and_change)
    for place in (packed, None):
        with pytest.raises(UnsupportedModel, match="changed while it was read"):
            load(folder, place)
    assert list(packed.iterdir()) == []


def test_a_checkpoint_that_is_cut_short_while_it_is_read_is_refused(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint(), folder)
    with open_checkpoint(folder, read_config(folder)) as found:
        os.truncate(folder / "model.safetensors", 5000)
        last = max(found.tensors.values(), key=lambda stored: stored.offset)
        with pytest.raises(UnsupportedModel, match="cut short"):
            last.values()


@pytest.mark.parametrize("what", ["read-only", "full", "stuck"])
def test_where_no_file_can_be_each_packs_its_own_and_says_so(
    checkpoint: Checkpoint,
    tmp_path: Path,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    place = tmp_path
    if what == "read-only":
        place = Path("/proc/penstock")
    elif what == "full":
        monkeypatch.setattr(packed_file, "SPARE_BYTES", 2**60)
    else:
        monkeypatch.setattr(packed_file, "PATIENCE_S", 0.0)
        monkeypatch.setattr(packed_file.fcntl, "flock", _held)
    weights = load(checkpoint(), place)
    assert weights.place == "memory"
    np.testing.assert_array_equal(weights._memory, load(checkpoint())._memory)
    assert "packs its own in memory: " in caplog.text


def _held(*_: object) -> None:
    raise BlockingIOError


def test_all_tensors_are_used(checkpoint: Checkpoint) -> None:
    """What the model gets lies in the packed memory, and nothing of it twice."""
    config, weights = read_config(checkpoint("biases")), load(checkpoint("biases"))
    build_model(config, weights)
    parts = sorted((part.offset, part.end) for part in weights._parts.values())
    assert all(end <= begin for (_, end), (begin, _) in pairwise(parts))
    assert parts[-1][1] <= weights.bytes < parts[-1][1] + 64

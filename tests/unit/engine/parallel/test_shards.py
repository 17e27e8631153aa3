"""A model that is cut over ranks computes what the whole one does, and each rank reads and holds
its own part."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch

from kernels.cpu.library import built
from kernels.cpu.matrix import E4M3, Held
from kernels.cpu.matrix import quantized as quantized_rows
from services.worker.engine import EngineConfig, Request
from services.worker.engine.adapters import peft
from services.worker.engine.config import CPU_KERNELS, KV_FORMATS, QUANTIZATIONS
from services.worker.engine.formats import stored as stored_module
from services.worker.engine.formats.fp8 import Fp8
from services.worker.engine.formats.stored import Quantized
from services.worker.engine.models.config import ExpertsConfig
from services.worker.engine.models.registry import build_model, read_config
from services.worker.engine.parallel.part import Part
from services.worker.engine.parallel.shard import Shard, check_cut
from services.worker.engine.weights.checkpoint import open_checkpoint
from services.worker.engine.weights.torch_weights import TorchWeights
from services.worker.engine.weights.weights import shapes
from tests.support import adapters, quantized
from tests.unit.engine import checkpoints
from tests.unit.engine.driving import drive, generate, greedy, make_engine, make_prompts
from tests.unit.engine.ranks_in_threads import engine_of_threads
from tests.unit.engine.weights.test_quantized_checkpoints import LAYOUTS

Checkpoint = Callable[..., Path]
FOUR_HEADS = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Of a variant that has fewer: as wide as its own."""


on_kernels = pytest.mark.skipif(not built(), reason="no kernels for this processor")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of which each of four ranks has widths that all formats fit."""
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    return checkpoints.make(tmp_path_factory.mktemp("wide"), "gqa", **sizes)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(variant: str) -> Path:
        if variant not in made:
            folder = tmp_path_factory.mktemp(variant)
            wide = checkpoints.VARIANTS[variant].get("num_attention_heads", 4) < 4
            made[variant] = checkpoints.make(folder, variant, **(FOUR_HEADS if wide else {}))
        return made[variant]

    return get


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("variant", checkpoints.VARIANTS)
def test_ranks_sample_what_one_device_does(
    folder_of: Checkpoint, variant: str, ranks: int, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every family, prompts in pieces and decodes beside one another, in float32."""
    folder, prompts = folder_of(variant), make_prompts(3, longest=40, seed=4)
    how: dict[str, Any] = {"kernels": kernels, "dtype": "float32", "max_batched_tokens": 24}
    want = generate(make_engine(folder, **how), prompts, greedy(6))
    engine = engine_of_threads(folder, ranks, monkeypatch, **how)
    assert generate(engine, prompts, greedy(6)) == want
    for first, *others in engine._runner.logits:  # type: ignore[attr-defined]
        assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize(
    "settings",
    [
        {"overlap": True},
        {"speculation": "ngram", "prompt_lookup_min": 1},
        {"speculation": "draft"},
    ],
    ids=["overlapped", "guessing", "a model guesses"],
)
def test_ways_through_the_engine_change_nothing(
    folder_of: Checkpoint,
    settings: dict[str, Any],
    kernels: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = folder_of("qwen3")
    prompts = [prompt * 3 for prompt in make_prompts(3, longest=20, seed=5)]
    how: dict[str, Any] = {"kernels": kernels, "dtype": "float32", "max_batched_tokens": 24}
    want = generate(make_engine(folder, **how), prompts, greedy(12))
    if settings.get("speculation") == "draft":
        settings = settings | {"draft_model": str(folder)}
    engine = engine_of_threads(folder, 2, monkeypatch, **how, **settings)
    run = drive(engine, [Request(str(i), p, greedy(12)) for i, p in enumerate(prompts)])
    assert list(map(run.tokens.get, "012")) == want
    drafted = sum(step.draft_tokens for step in run.steps)
    assert bool(drafted) == ("speculation" in settings)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "formats",
    [
        *({"quantization": weights} for weights in QUANTIZATIONS[1:] if weights != "w8a8"),
        *({"kv_format": kv} for kv in KV_FORMATS[1:]),
        {"quantization": "int8", "kv_format": "int8"},
    ],
    ids=str,
)
@on_kernels
def test_formats_are_cut(
    wide: Path, formats: dict[str, Any], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an engine of one device; but for w8a8, of which a rank rounds its own part of a row."""
    prompts = make_prompts(3, longest=40, seed=4)
    how: dict[str, Any] = {"dtype": "float32", "max_batched_tokens": 24} | formats
    want = generate(make_engine(wide, **how), prompts, greedy(6))
    engine = engine_of_threads(wide, ranks, monkeypatch, **how)
    assert engine.info.kernels in CPU_KERNELS
    assert generate(engine, prompts, greedy(6)) == want


@pytest.mark.parametrize("ranks", [2, 4])
@on_kernels
def test_w8a8_is_cut_too(wide: Path, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of rows have scales of their own, so a few tokens may be others."""
    prompts, how = make_prompts(24), {"dtype": "float32", "quantization": "w8a8"}
    want = generate(make_engine(wide, **how), prompts, greedy(1))
    found = generate(engine_of_threads(wide, ranks, monkeypatch, **how), prompts, greedy(1))
    assert sum(a == b for a, b in zip(found, want, strict=True)) >= 16


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("layout", ["packed-32", "packed-8", "gptq-order", "awq"])
def test_checkpoints_of_few_bits_are_cut(
    wide: Path, layout: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with an order of columns is widened, as it is on one device."""
    config, layer, _, _ = LAYOUTS[layout]
    prompts = make_prompts(3, longest=40, seed=4)
    quantized.write(wide, tmp_path / "made", config, layer)
    how = {"kernels": kernels, "dtype": "float32"}
    one = make_engine(tmp_path / "made", **how)
    two = engine_of_threads(tmp_path / "made", 2, monkeypatch, **how)
    if kernels == "auto":
        linears = [part._linears for part in (one._runner, *two._runner.ranks)]  # type: ignore
        held = [sorted((min(names), m.held) for m, names in of.items()) for of in linears]
        assert held[0] == held[1] == held[2]
        assert ("model.layers.0.mlp.down_proj", "" if layout == "gptq-order" else ANY) in held[0]
    assert generate(two, prompts, greedy(6)) == generate(one, prompts, greedy(6))


@on_kernels
def test_adapters_are_cut_beside_few_bits(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all modules, on four ranks, of which two have the same keys."""
    files = adapters.make(tmp_path / "adapter", wide, seed=1, rank=3)
    read = replace(peft.read(files, wide, 64), id="a")
    how: dict[str, Any] = {"dtype": "float32", "quantization": "int4"}
    one, four = make_engine(wide, **how), engine_of_threads(wide, 4, monkeypatch, **how)
    told = []
    for engine in (one, four):
        assert engine.load_adapter(read) == ""
        asked = [
            Request(f"{index}", prompt, greedy(8), adapter="a" if index % 2 else "")
            for index, prompt in enumerate(make_prompts(4, seed=2))
        ]
        told.append(drive(engine, asked).tokens)
    assert told[0] == told[1]
    assert generate(one, [make_prompts(4, seed=2)[1]], greedy(8)) != [told[0]["1"]]


@pytest.mark.parametrize(
    ("held", "columns", "want"),
    [
        ("int4", range(64, 192), ("int4", "int4_zeros", "int8_groups")),
        ("int4", range(64, 128), ("int4", "int8_groups")),
        ("int4", range(48, 112), ()),
        ("int8", range(4, 12), ("int8", "w8a8")),
        ("int8", range(2, 6), ("int8", "w8a8")),
        ("int8", range(6), ()),
    ],
)
def test_a_part_of_few_bits_is_what_it_was(
    held: Held, columns: range, want: tuple[Held, ...]
) -> None:
    """Where no group is cut, nor a step of the kernels; values are, in any case."""
    rng, groups = np.random.default_rng(2), 1 if held == "int8" else 8
    bits = 8 if held == "int8" else 4
    numbers = rng.integers(-7, 8, (6, 256), np.int16)
    scales = rng.uniform(0.5, 1, (6, groups)).astype(np.float16)
    whole = Quantized(
        held, (6, 256), bits, lambda a, b: numbers[a:b], lambda a, b: scales[a:b], groups=groups
    )
    part = Part(whole, [range(6)], columns)
    values = whole.float32()[1:5, columns.start : columns.stop]
    assert tuple(sorted(part.held)) == tuple(h for h in want if h in whole.held)
    assert (part.float32(1, 5) == values).all()
    for one in part.held:
        if one in ("int4", "int8"):
            found, of_groups, *_ = part.narrow(1, 5, one)
            by_groups = of_groups.reshape(4, -1)
            scale = np.repeat(by_groups, len(columns) // by_groups.shape[1], axis=1)
            assert ((found - np.float32(8 * (one == "int4"))) * scale == values).all()


@pytest.mark.parametrize(
    ("width", "columns", "want"),
    [
        (256, range(4, 132), ("fp8",)),
        (256, range(128, 256), ("fp8", "fp8_blocks")),
        (128, range(128, 256), ("fp8_blocks",)),
        (128, range(64, 192), ()),
        (128, range(128, 192), ()),
    ],
)
def test_a_part_of_fp8_is_what_it_was(width: int, columns: range, want: tuple[Held, ...]) -> None:
    """By rows with the row's scale; by blocks where none is cut."""
    rng = np.random.default_rng(2)
    numbers = rng.integers(0, 127, (6, 256), np.uint8)
    scales = rng.uniform(0.5, 1, (6, 256 // width)).astype(np.float32)
    whole = Fp8((6, 256), lambda a, b: numbers[a:b], lambda a, b: scales[a:b], width)
    part = Part(whole, [range(6)], columns)
    values = whole.float32()[1:5, columns.start : columns.stop]
    assert part.held == want
    assert (part.float32(1, 5) == values).all()
    for one in part.held:
        found, own = part.narrow(1, 5, one)
        of_groups = own.reshape(4, -1)
        scale = np.repeat(of_groups, len(columns) // of_groups.shape[1], axis=1)
        assert (E4M3[found] * scale == values).all()


def test_rows_are_rounded_whole() -> None:
    """So a rank's part of a row has the row's scale."""
    content = np.random.default_rng(3).normal(size=(8, 64)).astype(np.float32)
    numbers, scales = quantized_rows(content)
    for columns in (range(32), range(32, 64)):
        part = Part(_Given(content), [range(8)], columns)
        found, own = part.rounded(quantized_rows, 2, 7)
        assert (found == numbers[2:7, columns.start : columns.stop]).all()
        assert (own == scales[2:7]).all()


@on_kernels
def test_widths_that_a_format_does_not_fit_are_refused(
    folder_of: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "quantization 'int4': num_attention_heads . head_dim 32, of each of 2 ranks, is no mult"
    with pytest.raises(ValueError, match=words):
        engine_of_threads(folder_of("gqa"), 2, monkeypatch, quantization="int4")


def test_each_rank_holds_its_part(folder_of: Checkpoint) -> None:
    folder = folder_of("qwen3")
    model = read_config(folder)
    whole = _parameters(folder, Shard(model))
    parts = [_parameters(folder, Shard(model, rank, 4)) for rank in range(4)]
    vectors = sum(np.prod(shape) for shape in shapes(model).values() if len(shape) == 1)
    keys = sum(np.prod(shape) for name, shape in shapes(model).items() if "k_proj" in name)
    assert sum(parts) == whole + 3 * vectors + 2 * keys  # of 2 key-value heads all have one
    assert max(parts) < whole / 2


def test_each_rank_reads_its_part(folder_of: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, read = folder_of("mha-tied"), [0]
    real = stored_module.read_into

    def counting(file: Any, array: Any, at: int) -> None:
        read[0] += array.nbytes
        real(file, array, at)

    monkeypatch.setattr(stored_module, "read_into", counting)
    model = read_config(folder)
    for rank in range(2):
        read[0] = 0
        number = _parameters(folder, Shard(model, rank, 2))
        assert read[0] == 4 * number


def _parameters(folder: Path, shard: Shard) -> int:
    with open_checkpoint(folder, shard.model) as checkpoint:
        weights = TorchWeights(checkpoint.tensors, torch.float32, torch.device("cpu"), shard)
        build_model(shard.config, weights)
        return weights.num_parameters


def test_parts_of_a_tensor_are_the_tensor(folder_of: Checkpoint) -> None:
    """Also of fused ones: queries, keys and values are one behind the other."""
    model = read_config(folder_of("phi3"))
    whole = np.arange(8 * model.head_dim, dtype=np.float32).reshape(-1, 1)
    at = "model.layers.0.self_attn.qkv_proj.weight"
    heads = whole.reshape(8, model.head_dim)
    for rank in range(4):
        part = Shard(model, rank, 4).part(at, _Given(whole))
        assert (part.values(1) == part.values()[1:]).all()
        part = part.values().reshape(3, model.head_dim)
        assert (part == heads[[rank, 4 + rank // 2, 6 + rank // 2]]).all()


class _Given(stored_module.Stored):
    kind = "given"

    def __init__(self, content: Any) -> None:
        self._content, self.shape = content, content.shape

    def float32(self, first: int = 0, last: int | None = None) -> Any:
        return self._content[first:last]


def test_columns_of_few_bits_are_those_of_all_rows() -> None:
    content = np.random.default_rng(3).normal(size=(3000, 8)).astype(np.float32)
    assert (_Given(content).columns(2, 5) == content[:, 2:5]).all()
    assert (_Given(content).columns(2, 5, 700, 2900) == content[700:2900, 2:5]).all()


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (3, "tensor_parallel 3 does not divide the model's num_attention_heads 4"),
        (8, "tensor_parallel 8 does not divide the model's num_attention_heads 4"),
    ],
)
def test_what_cannot_be_cut_is_refused(folder_of: Checkpoint, ranks: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_cut(read_config(folder_of("gqa")), ranks)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"intermediate_size": 98}, "intermediate_size 98"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 96},
            "num_key_value_heads 3 are neither divided among",
        ),
    ],
)
def test_sizes_that_cannot_be_cut_are_named(
    tmp_path: Path, sizes: dict[str, int], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        check_cut(read_config(checkpoints.make(tmp_path, "gqa", **sizes)), 4)


def test_a_vocabulary_of_which_a_rank_would_have_nothing_is_refused(folder_of: Checkpoint) -> None:
    model = replace(read_config(folder_of("gqa")), vocab_size=6)
    check_cut(model, 2)
    with pytest.raises(ValueError, match="tensor_parallel 4: of the model's vocab_size 6 nothing"):
        check_cut(model, 4)


def test_experts_that_cannot_be_cut_are_named(folder_of: Checkpoint) -> None:
    model, layers = read_config(folder_of("gqa")), frozenset({0})
    for experts, words in (
        (ExpertsConfig(4, 2, 9, True, layers), "experts' inner features 9"),
        (ExpertsConfig(4, 2, 8, True, layers, 7), "shared expert's inner features 7"),
    ):
        with pytest.raises(ValueError, match=f"tensor_parallel 2 does not divide the .*{words}"):
            check_cut(replace(model, experts=experts), 2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tensor_parallel": 0}, r"tensor_parallel must be in \[1, 64\], is 0"),
        ({"tensor_parallel": 65}, r"tensor_parallel must be in \[1, 64\], is 65"),
        ({"kernels": "reference", "device": "cuda:1"}, "'cuda:1' is one GPU"),
    ],
)
def test_settings_that_do_not_go_with_it_are_refused(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        EngineConfig(model=str(tmp_path), **({"tensor_parallel": 2} | settings))

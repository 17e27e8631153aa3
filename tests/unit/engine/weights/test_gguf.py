"""GGUF files: what an engine computes of one is what a checkpoint of the values computes that its
blocks stand for."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from kernels.cpu.library import built
from services.cli.stack.checkpoints import made_local
from services.common.checkpoints.checkpoint import locate
from services.common.config import ModelSpec, Settings
from services.worker.engine.formats.gguf import header_of, tensors_of
from services.worker.engine.models.config import UnsupportedModel
from services.worker.engine.models.registry import read_config
from services.worker.engine.weights.checkpoint import open_checkpoint
from tests.support import gguf
from tests.support.programs import whole
from tests.support.tokenizers import byte_level
from tests.unit.engine import checkpoints
from tests.unit.engine.driving import assert_near, generate, greedy, make_engine
from tests.unit.engine.test_engine_parity import watch_logits

pytestmark = pytest.mark.skipif(not built(), reason="no kernels for this processor")

VOCAB = 320
PROMPT = list(range(3, 60))
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
"""For types whose blocks are of 256."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def made(tmp_path: Path, type_: str, variant: str = "gqa", **sizes: Any) -> tuple[Path, Path]:
    """A GGUF file unfolded, and a checkpoint of what it stands for."""
    sizes = {"vocab_size": VOCAB, "intermediate_size": 128} | sizes
    folder = checkpoints.make(tmp_path / "hub", variant, **sizes)
    vocabulary = gguf.vocabulary(json.loads(byte_level(VOCAB).to_str()))
    path = tmp_path / "model.gguf"
    values = gguf.convert(folder, path, lambda _: type_, **vocabulary)
    save_file(values, folder / "model.safetensors", {"format": "pt"})
    return locate(ModelSpec(name="m", path=str(path))), folder


def logits_of(folder: Path, monkeypatch: pytest.MonkeyPatch, **how: Any) -> torch.Tensor:
    engine = make_engine(folder, max_batched_tokens=16, **how)
    seen: list[torch.Tensor] = []
    watch_logits(engine, seen, monkeypatch)
    generate(engine, [PROMPT], greedy(1))
    return torch.cat(seen)


@pytest.mark.parametrize(
    "variant", ["gqa", "mha-tied", "biases", "qwen2", "qwen3", "mixtral", "qwen3-moe"]
)
def test_what_is_computed_is_of_the_values_that_blocks_stand_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    """Of each family: names, the order of its heads' rows, biases, norms, a tied head."""
    own: dict[str, Any] = {"use_sliding_window": False} if variant == "qwen2" else {}
    if variant == "mixtral":
        own = {"sliding_window": None}
    if variant == "qwen3-moe":
        own = {"norm_topk_prob": True, "mlp_only_layers": []}
    mine, theirs = made(tmp_path, "Q4_0", variant, **own)
    for kernels in (built()[0], "reference"):
        assert_near(
            logits_of(mine, monkeypatch, kernels=kernels, dtype="float32"),
            logits_of(theirs, monkeypatch, kernels="reference"),
        )


@pytest.mark.parametrize("type_", gguf.TYPES)
def test_values_are_those_of_the_type(tmp_path: Path, type_: str) -> None:
    """To the bit, rows by rows as the packer asks for them; as float32 they are exact."""
    mine, theirs = made(tmp_path, type_, **WIDE)
    with (
        open_checkpoint(mine, read_config(mine)) as ours,
        open_checkpoint(theirs, read_config(theirs)) as others,
    ):
        assert ours.tensors.keys() == others.tensors.keys()
        for name, stored in ours.tensors.items():
            expected = others.tensors[name].float32()
            np.testing.assert_array_equal(stored.float32(), expected, name)
            if len(expected) > 90:
                np.testing.assert_array_equal(stored.float32(21, 87), expected[21:87], name)
                np.testing.assert_array_equal(
                    stored.bfloat16(3, 9), others.tensors[name].bfloat16(3, 9)
                )


@pytest.mark.parametrize(
    ("type_", "best", "bits"),
    [("Q4_0", "int4", 4.5), ("Q5_0", "int8_groups", 8.5), ("Q8_0", "int8_groups", 8.5)],
)
def test_what_the_kernels_hold_is_taken_to_the_bit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, type_: str, best: str, bits: float
) -> None:
    """By groups of 32; nothing is said, as nothing is changed."""
    mine, theirs = made(tmp_path, type_)
    with caplog.at_level(logging.WARNING):
        engine = make_engine(mine)
    assert "matrices" not in caplog.text
    info = make_engine(theirs).info
    assert engine.info.num_parameters == info.num_parameters
    # Of 32, and norms.
    assert engine.info.parameter_bytes < (bits / 32 + 0.02) * info.parameter_bytes
    with open_checkpoint(mine, read_config(mine)) as found:
        for name, stored in found.tensors.items():
            if len(stored.shape) > 1:
                assert stored.held[0] == best
                for to in stored.held:
                    numbers, scales = whole(to, *stored.narrow(8, 32, to))
                    values = numbers.astype(np.float32) * scales
                    np.testing.assert_array_equal(values, stored.float32(8, 32), name)


@pytest.mark.parametrize(
    ("type_", "quantization", "words"),
    [
        ("Q4_1", "auto", "16 matrices of Q4_1 are widened to bfloat16"),
        ("Q6_K", "auto", "16 matrices of Q6_K are widened to bfloat16"),
        ("Q4_1", "int8", "16 matrices of Q4_1 are rounded again, to int8"),
        ("Q8_0", "int4", "14 matrices of Q8_0 are rounded again, to int4"),
        ("Q6_K", "int4", "14 matrices of Q6_K are rounded again, to int4"),
    ],
)
def test_what_is_changed_is_said(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    type_: str,
    quantization: str,
    words: str,
) -> None:
    mine, _ = made(tmp_path, type_, **WIDE)
    with caplog.at_level(logging.WARNING):
        make_engine(mine, quantization=quantization)
    assert words in caplog.text


@pytest.mark.parametrize("type_", ["Q4_0", "Q8_0"])
def test_as_few_bits_stay_where_as_many_or_more_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, type_: str
) -> None:
    mine, _ = made(tmp_path, type_)
    as_it_is = logits_of(mine, monkeypatch)
    torch.testing.assert_close(
        logits_of(mine, monkeypatch, quantization="int8"), as_it_is, rtol=0, atol=0
    )


def test_frequencies_that_the_file_divides_are_llama_3s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama 3.1's are told as a factor of each."""
    folder = checkpoints.make(tmp_path / "hub", "llama3", vocab_size=VOCAB)
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    frequencies = rope["rope_theta"] ** -(np.arange(0, 16, 2) / 16)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    keep = ((turns - 1) / (4 - 1)).clip(0, 1)
    factors = (1 / (keep + (1 - keep) / rope["factor"])).astype(np.float32)
    path, vocabulary = tmp_path / "model.gguf", gguf.vocabulary(json.loads(byte_level().to_str()))
    written, write = [], gguf.write

    def and_factors(path: Path, metadata: Any, tensors: Any) -> Path:
        written.append(path)
        own = {"rope_freqs.weight": ("F32", (8,), factors.tobytes())}
        return write(path, metadata, tensors | own)

    monkeypatch.setattr(gguf, "write", and_factors)
    gguf.convert(folder, path, lambda _: "F32", **vocabulary)
    assert written == [path]
    mine = locate(ModelSpec(name="m", path=str(path)))
    torch.testing.assert_close(
        logits_of(mine, monkeypatch), logits_of(folder, monkeypatch), rtol=1e-4, atol=1e-4
    )


def test_a_start_says_what_will_be_changed(tmp_path: Path) -> None:
    for type_, told in (("Q8_0", []), ("Q4_1", ["m: 16 matrices of Q4_1 are widened, or rounded"])):
        made(tmp_path / type_, type_)
        spec = ModelSpec(name="m", path=str(tmp_path / type_ / "model.gguf"))
        said: list[str] = []
        assert made_local(spec, Settings(), said.append).path == spec.path
        assert [words[:46] for words in said] == told


def test_two_names_of_one_tensor_are_told(tmp_path: Path) -> None:
    config = read_config(made(tmp_path, "Q8_0")[0])
    norm: gguf.Raw = ("F32", (8,), bytes(32))
    both = {"output_norm.weight": norm, "model.norm.weight": norm}
    path = gguf.write(tmp_path / "twice.gguf", {}, both)
    with path.open("rb") as file, pytest.raises(UnsupportedModel, match=r"norm.weight is there tw"):
        tensors_of(file, header_of(path), config)


def test_a_file_that_became_shorter_is_told(tmp_path: Path) -> None:
    mine, _ = made(tmp_path, "Q8_0")
    config = read_config(mine)
    with open_checkpoint(mine, config) as found:
        path = tmp_path / "model.gguf"
        path.write_bytes(path.read_bytes()[:9000])
        with pytest.raises(UnsupportedModel, match="cut short"):
            [stored.float32() for stored in found.tensors.values()]
    with pytest.raises(UnsupportedModel, match="cut short"), open_checkpoint(mine, config):
        pass

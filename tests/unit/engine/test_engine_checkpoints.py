"""Checkpoints that cannot be run are refused by the name of what is wrong."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.worker.engine.loader import choose_dtype, load_model
from services.worker.engine.model_config import UnsupportedModel, read_config
from services.worker.engine.models.llama import Llama
from services.worker.engine.rope import build_rope
from services.worker.engine.weights import check_weights, shapes

Checkpoint = Callable[..., Path]
CPU = torch.device("cpu")


def edited(source: Path, target: Path, **changes: Any) -> Path:
    """A config.json like the source's but for `changes`; None removes a field."""
    config = json.loads((source / "config.json").read_text()) | changes
    kept = {name: value for name, value in config.items() if value is not None}
    (target / "config.json").write_text(json.dumps(kept))
    return target


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures 'GPT2LMHeadModel'"),
        ({"architectures": None}, "architectures ''"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"sliding_window": 4096}, "sliding_window 4096"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide"),
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor is missing"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_unsupported_configs_name_the_field(
    checkpoint: Checkpoint, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedModel, match=r"config\.json: ") as caught:
        read_config(edited(checkpoint(), tmp_path, **changes))
    assert words in str(caught.value)


def test_older_configs_are_read_too(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Before transformers 5: rope_theta and rope_scaling, torch_dtype."""
    new = read_config(checkpoint("linear"))
    folder = edited(
        checkpoint("linear"),
        tmp_path,
        rope_parameters=None,
        rope_theta=500.0,
        rope_scaling={"type": "linear", "factor": 3.0},
        dtype=None,
        torch_dtype="bfloat16",
    )
    old = read_config(folder)
    assert torch.equal(build_rope(old.rope).frequencies, build_rope(new.rope).frequencies)
    assert old.checkpoint_dtype == "bfloat16"


def test_all_end_of_text_ids_count(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = edited(checkpoint(), tmp_path, eos_token_id=[2, 5])
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert read_config(folder).eos_token_ids == (2, 5, 7)


@pytest.mark.parametrize(
    ("wanted", "stored", "device", "runs_in"),
    [
        ("auto", "float32", "cuda", torch.float32),
        ("auto", "bfloat16", "cuda", torch.bfloat16),
        ("auto", "float16", "cuda", torch.float32),
        ("auto", "bfloat16", "cpu", torch.float32),
        ("bfloat16", "float32", "cpu", torch.bfloat16),
        ("float32", "bfloat16", "cuda", torch.float32),
    ],
)
def test_dtype(
    checkpoint: Checkpoint,
    tmp_path: Path,
    wanted: str,
    stored: str,
    device: str,
    runs_in: torch.dtype,
) -> None:
    config = read_config(edited(checkpoint(), tmp_path, dtype=stored))
    assert choose_dtype(wanted, config, torch.device(device)) == runs_in


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.norm.weight"), "1 tensors are missing, first model.norm.weight"),
        (lambda t: t.update(extra=torch.zeros(1)), "tensor extra has no place"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(3, 64)}), r"is \[3, 64\], config.json"),
        (lambda t: t.update({"model.norm.weight": t["model.norm.weight"].char()}), "is I8"),
    ],
)
def test_tensors_must_fit_the_config(
    checkpoint: Checkpoint, tmp_path: Path, change: Callable[[Any], None], words: str
) -> None:
    folder = edited(checkpoint(), tmp_path)
    tensors = load_file(checkpoint() / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=words):
        load_model(folder, read_config(folder), torch.float32, CPU)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_expected_tensors_are_the_models_own(
    checkpoint: Checkpoint, tmp_path: Path, tied: bool, bias: bool
) -> None:
    config = read_config(
        edited(checkpoint(), tmp_path, tie_word_embeddings=tied, attention_bias=bias, mlp_bias=bias)
    )
    with torch.device("meta"):
        own = {name: tuple(tensor.shape) for name, tensor in Llama(config).named_parameters()}
    if tied:
        del own["lm_head.weight"]
    assert shapes(config) == own


def test_a_file_cut_short_is_told_by_its_header(checkpoint: Checkpoint, tmp_path: Path) -> None:
    config = read_config(edited(checkpoint(), tmp_path))
    whole = (checkpoint() / "model.safetensors").read_bytes()
    for kept in (len(whole) - 1, 1000, 4, 0):
        (tmp_path / "model.safetensors").write_bytes(whole[:kept])
        with pytest.raises(UnsupportedModel, match=r"model\.safetensors: broken, or cut short"):
            check_weights(tmp_path, config)


def test_an_index_is_checked_too(checkpoint: Checkpoint, tmp_path: Path) -> None:
    config = read_config(edited(checkpoint(), tmp_path))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("[]")
    with pytest.raises(UnsupportedModel, match=r"index\.json cannot be read"):
        check_weights(tmp_path, config)
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "part-2.safetensors"}}))
    with pytest.raises(UnsupportedModel, match=r"part-2\.safetensors is missing"):
        check_weights(tmp_path, config)


def test_broken_folders(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"config\.json is missing"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnsupportedModel, match="is not JSON"):
        read_config(tmp_path)
    config = read_config(edited(checkpoint(), tmp_path))
    with pytest.raises(UnsupportedModel, match=r"neither model\.safetensors nor"):
        load_model(tmp_path, config, torch.float32, CPU)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(UnsupportedModel, match=r"model\.safetensors: "):
        load_model(tmp_path, config, torch.float32, CPU)


def test_an_engine_that_loads_and_steps_imports_no_compiler(checkpoint: Checkpoint) -> None:
    """torch would import it for little: 70 MB and half a second of each engine process."""
    script = (
        "import sys\n"
        "from services.worker.engine import EngineConfig, Request, Sampling\n"
        "from services.worker.engine.engine import Engine\n"
        f"engine = Engine(EngineConfig({str(checkpoint())!r}, num_blocks=8, threads=1))\n"
        "engine.add(Request('a', [3, 4, 5], Sampling(max_tokens=2)))\n"
        "while engine.has_work:\n"
        "    engine.step()\n"
        "print('imported', [m for m in ('torch._dynamo', 'sympy') if m in sys.modules])\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.stdout == "imported []\n", ran.stderr

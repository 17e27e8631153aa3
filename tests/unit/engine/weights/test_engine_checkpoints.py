"""Checkpoints that cannot be run are refused by the name of what is wrong."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from services.worker.engine.models.config import UnsupportedModel
from services.worker.engine.models.registry import read_config
from services.worker.engine.models.rope import build_rope
from services.worker.engine.sizes import choose_dtype
from services.worker.engine.weights.checkpoint import check_weights, open_checkpoint
from services.worker.engine.weights.weights import shapes
from tests.unit.engine.checkpoints import VOCAB
from tests.unit.engine.driving import generate, greedy, make_engine, make_prompts

Checkpoint = Callable[..., Path]


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
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.short_factor is missing"),
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
    assert (
        build_rope(old.ropes[0], 9).frequencies == build_rope(new.ropes[0], 9).frequencies
    ).all()
    assert old.checkpoint_dtype == "bfloat16"


def test_all_end_of_text_ids_count(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = edited(checkpoint(), tmp_path, eos_token_id=[2, 5])
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert read_config(folder).eos_token_ids == (2, 5, 7)


def test_end_of_text_ids_that_the_model_has_not_are_left_out(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Else a ban of them would be of what lies behind its logits."""
    folder = edited(checkpoint(), tmp_path, eos_token_id=[-1, 2, VOCAB, 2**31, 10**30])
    assert read_config(folder).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("wanted", "stored", "device", "has_dot", "runs_in"),
    [
        ("auto", "float32", "cuda", False, "float32"),
        ("auto", "bfloat16", "cuda", False, "bfloat16"),
        ("auto", "float16", "cuda", False, "float32"),
        ("auto", "bfloat16", "cpu", False, "float32"),
        ("auto", "bfloat16", "cpu", True, "bfloat16"),
        ("auto", "float32", "cpu", True, "float32"),
        ("bfloat16", "float32", "cpu", False, "bfloat16"),
        ("float32", "bfloat16", "cuda", False, "float32"),
        ("float32", "bfloat16", "cpu", True, "float32"),
    ],
)
def test_dtype(
    checkpoint: Checkpoint,
    tmp_path: Path,
    wanted: str,
    stored: str,
    device: str,
    has_dot: bool,
    runs_in: str,
) -> None:
    config = read_config(edited(checkpoint(), tmp_path, dtype=stored))
    assert choose_dtype(wanted, config, device, has_dot) == runs_in


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
    with pytest.raises(UnsupportedModel, match=words), open_checkpoint(folder, read_config(folder)):
        pass


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_expected_tensors_are_the_models_own(
    checkpoint: Checkpoint, tmp_path: Path, tied: bool, bias: bool
) -> None:
    config = read_config(
        edited(checkpoint(), tmp_path, tie_word_embeddings=tied, attention_bias=bias, mlp_bias=bias)
    )
    with torch.device("meta"):
        theirs = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(tmp_path))
    own = {name: tuple(tensor.shape) for name, tensor in theirs.named_parameters()}
    assert shapes(config) == own


def test_an_engine_does_not_follow_who_writes_into_its_checkpoint(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = edited(checkpoint(), tmp_path)
    content = (checkpoint() / "model.safetensors").read_bytes()
    file = folder / "model.safetensors"
    file.write_bytes(content)
    engine, prompts = make_engine(folder), make_prompts(2)
    expected = generate(engine, prompts, greedy(4))
    with file.open("r+b") as written:
        written.write(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))
    assert generate(engine, [[9, *p] for p in prompts], greedy(4)) == generate(
        make_engine(checkpoint()), [[9, *p] for p in prompts], greedy(4)
    )
    file.write_bytes(b"")
    assert generate(engine, prompts, greedy(4)) == expected


@pytest.mark.parametrize("wide", ["inv_freq", "norm", "matrix"])
def test_weights_of_16_bits_stay_so_beside_a_wide_vector(
    checkpoint: Checkpoint, tmp_path: Path, wide: str
) -> None:
    tensors = {
        name: tensor.bfloat16()
        for name, tensor in load_file(checkpoint() / "model.safetensors").items()
    }
    if wide == "inv_freq":
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    else:
        name = "model.norm.weight" if wide == "norm" else "lm_head.weight"
        tensors[name] = tensors[name].float()
    folder = edited(checkpoint(), tmp_path)
    save_file(tensors, folder / "model.safetensors")
    info = make_engine(folder, dtype="float32").info
    assert (info.parameter_bytes / info.num_parameters > 3) == (wide == "matrix")


def test_a_file_cut_short_is_told_by_its_header(checkpoint: Checkpoint, tmp_path: Path) -> None:
    config = read_config(edited(checkpoint(), tmp_path))
    whole = (checkpoint() / "model.safetensors").read_bytes()
    for kept in (len(whole) - 1, 1000, 4, 0):
        (tmp_path / "model.safetensors").write_bytes(whole[:kept])
        with pytest.raises(UnsupportedModel, match=r"model\.safetensors: broken, or cut short"):
            check_weights(tmp_path, config)


def test_a_tensor_that_lies_the_other_way_is_refused(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    config = read_config(edited(checkpoint(), tmp_path))
    tensors = load_file(checkpoint() / "model.safetensors")
    name = "model.layers.0.mlp.gate_proj.weight"
    rows, columns = tensors[name].shape
    assert rows != columns
    save_file(tensors | {name: tensors[name].T.contiguous()}, tmp_path / "model.safetensors")
    told = rf"{name} is \[{columns}, {rows}\], config\.json makes it \[{rows}, {columns}\]"
    with pytest.raises(UnsupportedModel, match=told):
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
    for odd in ("/etc/passwd", "../model.safetensors", "", "a\0b", 5, None):
        index.write_text(json.dumps({"weight_map": {"a": odd, "b": "model.safetensors"}}))
        with pytest.raises(
            UnsupportedModel, match=r"index\.json: weight_map names .* no file here"
        ):
            check_weights(tmp_path, config)
    index.write_text("[" * 100_000)
    with pytest.raises(UnsupportedModel, match=r"index\.json cannot be read"):
        check_weights(tmp_path, config)


def test_broken_folders(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"config\.json is missing"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnsupportedModel, match="is not JSON"):
        read_config(tmp_path)
    config = read_config(edited(checkpoint(), tmp_path))
    with (
        pytest.raises(UnsupportedModel, match=r"neither model\.safetensors nor"),
        open_checkpoint(tmp_path, config),
    ):
        pass
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with (
        pytest.raises(UnsupportedModel, match=r"model\.safetensors: "),
        open_checkpoint(tmp_path, config),
    ):
        pass


def test_an_engine_on_the_cpu_kernels_imports_no_torch(checkpoint: Checkpoint) -> None:
    """It would take 200 MB and two seconds of each engine process."""
    script = (
        "import sys\n"
        "from services.worker.engine import (EngineConfig, Request, Sampling)\n"
        "from services.worker.engine.engine import Engine\n"
        f"engine = Engine(EngineConfig({str(checkpoint())!r}, num_blocks=8, threads=1))\n"
        "engine.add(Request('a', [3, 4, 5], Sampling(max_tokens=2)))\n"
        "while engine.has_work:\n"
        "    engine.step()\n"
        "print('imported', [m for m in ('torch', 'transformers') if m in sys.modules])\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.stdout == "imported []\n", ran.stderr


def test_what_a_config_leaves_out_has_its_usual_value(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    left_out = (
        "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "attention_bias",
        "mlp_bias", "tie_word_embeddings", "dtype", "eos_token_id",
    )  # fmt: skip
    folder = edited(checkpoint(), tmp_path, **dict.fromkeys(left_out))
    config = read_config(folder)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 4, 16)
    assert config.rms_norm_epsilon == 1e-6
    assert (config.ropes[0].kind, config.ropes[0].parameters["rope_theta"]) == ("default", 10000.0)
    biases = (config.qkv_bias, config.out_bias, config.mlp_bias)
    assert (*biases, config.tie_word_embeddings) == (False, False, False, False)
    assert (config.checkpoint_dtype, config.eos_token_ids) == ("float32", ())


def test_what_a_config_says_is_taken(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = edited(
        checkpoint(), tmp_path, head_dim=24, rms_norm_eps=1e-3, attention_bias=True, mlp_bias=True,
        tie_word_embeddings=True, dtype="bfloat16", num_key_value_heads=1, vocab_size=300,
        intermediate_size=128, num_hidden_layers=3, max_position_embeddings=99,
    )  # fmt: skip
    config = read_config(folder)
    assert (config.head_dim, config.num_kv_heads, config.num_heads) == (24, 1, 4)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (300, 64, 128)
    assert (config.num_layers, config.context, config.rms_norm_epsilon) == (3, 99, 1e-3)
    biases = (config.qkv_bias, config.out_bias, config.mlp_bias)
    assert (*biases, config.tie_word_embeddings) == (True, True, True, True)
    assert config.checkpoint_dtype == "bfloat16"
    assert config.ropes[0].parameters["original_max_position_embeddings"] == 99


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads 0 is not a number above 0"),
        ({"max_position_embeddings": 0}, "max_position_embeddings 0 is not a number above 0"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps -1e-05 is not a number above 0"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers 'many' is not a number above 0"),
        ({"rms_norm_eps": [1]}, "rms_norm_eps [1] is not a number above 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"rope_theta": "10k"}}, "rope_theta is '10k', not a number above 0"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}},
            "high_freq_factor is missing",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "factor": None}}, "factor is None"),
    ],
)
def test_numbers_that_are_none_are_named(
    checkpoint: Checkpoint, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        read_config(edited(checkpoint(), tmp_path, **changes))
    assert words in str(caught.value)


def test_values_that_change_nothing_are_no_reason_to_refuse(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = edited(checkpoint(), tmp_path, partial_rotary_factor=1.0, hidden_act="silu")
    (folder / "generation_config.json").write_text('{"max_new_tokens": 5}')
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": None}
    (folder / "config.json").write_text(json.dumps(config))
    assert read_config(folder).eos_token_ids == (2,)


@pytest.mark.parametrize("content", ["[]", "3", '"text"'])
def test_a_config_must_be_an_object(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UnsupportedModel, match="not a JSON object"):
        read_config(tmp_path)


def test_tensors_that_follow_from_others_are_left_alone(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Old checkpoints carry frequencies, some tied ones their head as well, whatever is in it."""
    tensors = load_file(checkpoint("mha-tied") / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(3)
    tensors["lm_head.weight"] = torch.zeros(3, 3)
    edited(checkpoint("mha-tied"), tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    prompts = make_prompts(2)
    expected = generate(make_engine(checkpoint("mha-tied")), prompts, greedy(6))
    assert generate(make_engine(tmp_path), prompts, greedy(6)) == expected


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 123.0},
        YARN,
        YARN | {"original_max_position_embeddings": 128},
        YARN | {"original_max_position_embeddings": 64, "truncate": False},
        YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": False},
        YARN | {"beta_fast": 16, "original_max_position_embeddings": 100_000},
        YARN | {"attention_factor": 0.7},
        YARN | {"mscale": 0.707, "mscale_all_dim": 0.5},
        YARN | {"mscale": 0.707},
        YARN | {"factor": 1.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    ],
)
def test_rotary_frequencies_are_those_of_transformers(
    checkpoint: Checkpoint, tmp_path: Path, parameters: dict[str, Any]
) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    context = int(parameters.get("original_max_position_embeddings", 64) * 4)
    folder = edited(
        checkpoint(), tmp_path, rope_parameters=parameters, max_position_embeddings=context,
        head_dim=64,
    )  # fmt: skip
    rope = build_rope(read_config(folder).ropes[0], context)
    theirs = LlamaRotaryEmbedding(transformers.AutoConfig.from_pretrained(folder))
    positions = torch.tensor([0, 1, 7, 63])
    cos, sin = theirs(torch.zeros(1), positions[None])
    half = theirs.inv_freq.shape[0]
    for mine, other in zip(rope.tables(positions.numpy()), (cos, sin), strict=True):
        torch.testing.assert_close(torch.from_numpy(mine), other[0, :, :half], rtol=1e-5, atol=1e-5)

"""Files of the peft library: what is not built is refused by name, and what is broken is told."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch

from services.worker.engine.adapters import UnsupportedAdapter, peft
from tests.support import adapters
from tests.unit.engine import checkpoints

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make(tmp_path_factory.mktemp("model"), "gqa")


def refusal(folder: Path, model: Path, max_rank: int = 64) -> str:
    with pytest.raises(UnsupportedAdapter) as refused:
        peft.read(folder, model, max_rank)
    return str(refused.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not LORA"),
        ({"peft_type": None}, "peft_type None is not LORA"),
        ({"use_dora": True}, "use_dora True is not supported"),
        ({"bias": "all"}, "bias 'all' is not supported"),
        ({"bias": "lora_only"}, "bias 'lora_only' is not supported"),
        ({"lora_bias": True}, "lora_bias True is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save ['lm_head'] is not supported"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern {'q_proj': 8} is not supported"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern {'q_proj': 8} is not supported"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out True is not supported"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices [1] is not supported"),
        ({"layer_replication": [[0, 2]]}, "layer_replication [[0, 2]] is not supported"),
        ({"target_parameters": ["x"]}, "target_parameters ['x'] is not supported"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens [5] is not supported"),
        ({"init_lora_weights": "pissa"}, "'pissa' changes the model's own weights"),
        ({"init_lora_weights": "loftq"}, "'loftq' changes the model's own weights"),
        ({"init_lora_weights": 1}, "init_lora_weights 1 changes"),
        ({"r": 0}, "r must be a positive integer, is 0"),
        ({"r": True}, "r must be a positive integer, is True"),
        ({"r": 65}, "r 65 is more than max_adapter_rank 64"),
        ({"lora_alpha": "8"}, "lora_alpha must be a number, is '8'"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be a number, is nan"),
        ({"lora_alpha": 10**400}, "lora_alpha must be a number"),
        ({"use_rslora": "yes"}, "use_rslora must be true or false"),
        ({"r": 5}, "has rank 4, and adapter_config.json says r 5"),
    ],
)
def test_configs(model: Path, tmp_path: Path, config: dict[str, Any], words: str) -> None:
    assert words in refusal(adapters.make(tmp_path, model, **config), model)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.embed_tokens.lora_embedding_A", "embed_tokens.lora_embedding_A is not supported"),
        ("lm_head.lora_A.weight", "lm_head.lora_A.weight is not supported"),
        ("model.layers.0.input_layernorm.weight", "input_layernorm.weight is not supported"),
        ("model.layers.9.self_attn.q_proj.lora_A.weight", "is of layer 9, and the model has 2,"),
        ("model.layers.2.mlp.up_proj.lora_B.weight", "the adapter is of another model"),
        ("model.layers.1.mlp.other_proj.lora_B.weight", "other_proj.lora_B.weight is not supp"),
        ("model.layers.0.self_attn.q_proj.lora_magnitude_vector", "lora_magnitude_vector is not"),
    ],
)
def test_tensors_of_what_is_not_built(model: Path, tmp_path: Path, name: str, words: str) -> None:
    extra = {f"base_model.model.{name}": np.zeros((4, 64), np.float32)}
    assert words in refusal(adapters.make(tmp_path, model, extra=extra), model)


def test_files_that_are_missing_or_broken(model: Path, tmp_path: Path) -> None:
    assert "adapter_config.json is missing" in refusal(tmp_path, model)
    folder = adapters.make(tmp_path / "a", model)
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-9])
    assert "broken, or cut short" in refusal(folder, model)
    (folder / WEIGHTS).unlink()
    assert refusal(folder, model) == f"{folder}: {WEIGHTS} is missing: no adapter of peft"
    for content in ("[1]", "{", "[" * 100_000, "\udcff"):
        (folder / "adapter_config.json").write_bytes(content.encode(errors="surrogateescape"))
        assert "adapter_config.json" in refusal(folder, model)


def test_tensors_that_do_not_fit(model: Path, tmp_path: Path) -> None:
    folder = adapters.make(tmp_path, model, targets=("q_proj",))
    tensors = load_file(folder / WEIGHTS)
    at = "base_model.model.model.layers.1.self_attn.q_proj.lora"

    def with_(**changed: "np.ndarray[Any, Any] | None") -> str:
        own = {**tensors, **{f"{at}_{half}.weight": value for half, value in changed.items()}}
        left = {name: value for name, value in own.items() if value is not None}
        save_file(left, folder / WEIGHTS)
        return refusal(folder, model)

    assert "q_proj is changed by [64, 4] times [4, 63], and is [64, 64]" in with_(
        A=np.zeros((4, 63), np.float32)
    )
    assert "changed by [64, 3] times [4, 64]" in with_(B=np.zeros((64, 3), np.float32))
    assert "changed by [64, 4] times []" in with_(A=np.zeros((), np.float32))
    assert "changed by [] times [4, 64]" in with_(B=np.zeros((), np.float32))
    assert "changed by [64, 4] times [4, 64, 1]" in with_(A=np.zeros((4, 64, 1), np.float32))
    assert "has lora_A alone" in with_(B=None)
    assert "has lora_B alone" in with_(A=None)
    assert "lora_A.weight is I32" in with_(A=np.zeros((4, 64), np.int32))
    assert "numbers that are not finite" in with_(A=np.full((4, 64), np.inf, np.float32))
    save_file({}, folder / WEIGHTS)
    assert "no tensors of an adapter" in refusal(folder, model)


def test_a_matrix_that_is_there_by_two_names(model: Path, tmp_path: Path) -> None:
    folder = adapters.make(tmp_path, model, targets=("q_proj",))
    tensors = load_file(folder / WEIGHTS)
    at = "layers.0.self_attn.q_proj.lora_A.weight"
    matrix = tensors[f"base_model.model.model.{at}"]
    for other in (at, f"model.{at}", f"base_model.model.{at}"):
        save_file({**tensors, other: matrix}, folder / WEIGHTS)
        assert "is there twice" in refusal(folder, model)
    del tensors[f"base_model.model.model.{at}"]
    save_file({**tensors, at: matrix, f"model.{at}": matrix}, folder / WEIGHTS)
    assert "is there twice" in refusal(folder, model)


def test_a_config_that_does_not_end(model: Path, tmp_path: Path) -> None:
    folder = adapters.make(tmp_path, model)
    with (folder / "adapter_config.json").open("ab") as file:
        file.write(b" " * 2**20)
    assert "it has more than 1048576 bytes" in refusal(folder, model)


@pytest.mark.parametrize("name", ["adapter_config.json", WEIGHTS])
@pytest.mark.parametrize("odd", ["pipe", "/dev/zero"])
def test_a_file_that_is_none_is_not_read(model: Path, tmp_path: Path, name: str, odd: str) -> None:
    """Nobody writes into the pipe, and the other never ends."""
    path = adapters.make(tmp_path, model) / name
    path.unlink()
    os.mkfifo(path) if odd == "pipe" else path.symlink_to(odd)
    assert "it is no regular file" in refusal(tmp_path, model)


def test_names_as_peft_and_others_write_them(model: Path, tmp_path: Path) -> None:
    folder = adapters.make(tmp_path, model, targets=("q_proj",))
    expected = peft.read(folder, model, 64).modules
    tensors = load_file(folder / WEIGHTS)
    for old, new in (
        ("base_model.model.", ""),
        ("base_model.model.model.", "base_model.model."),
        (".weight", ".default.weight"),
    ):
        save_file({n.replace(old, new): t for n, t in tensors.items()}, folder / WEIGHTS)
        found = peft.read(folder, model, 64).modules
        assert found.keys() == expected.keys()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_numbers_of_other_types(model: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    folder = adapters.make(tmp_path, model)
    tensors = {n: torch.from_numpy(t).to(dtype) for n, t in load_file(folder / WEIGHTS).items()}
    save_torch(tensors, folder / WEIGHTS)
    lora = peft.read(folder, model, 64).modules["model.layers.0.mlp.down_proj"]
    at = "base_model.model.model.layers.0.mlp.down_proj.lora"
    assert (torch.from_numpy(lora.down) == tensors[f"{at}_A.weight"].float()).all()
    assert (torch.from_numpy(lora.up.T / 2) == tensors[f"{at}_B.weight"].float()).all()


def test_an_adapter_goes_to_another_process_as_it_is(model: Path, tmp_path: Path) -> None:
    found = peft.read(adapters.make(tmp_path, model), model, 64)
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(found, protocol=5, buffer_callback=buffers.append)
    assert len(head) < 10_000 < sum(one.up.nbytes for one in found.modules.values())
    again = pickle.loads(head, buffers=[bytearray(buffer.raw()) for buffer in buffers])
    assert again.id == found.id
    for name, lora in found.modules.items():
        assert (again.modules[name].down == lora.down).all()
        assert (again.modules[name].up == lora.up).all()


def test_a_digest_tells_adapters_apart(model: Path, tmp_path: Path) -> None:
    folders = [
        adapters.make(tmp_path / "a", model),
        adapters.make(tmp_path / "b", model, seed=1),
        adapters.make(tmp_path / "c", model, lora_alpha=3),
        adapters.make(tmp_path / "d", model),
    ]
    a, b, c, d = (peft.digest(folder) for folder in folders)
    assert len({a, b, c}) == 3
    assert a == d == peft.read(folders[0], model, 64).id


def test_a_config_that_changes_before_its_digest_is_taken_is_none(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the numbers of one config would go by the digest of another."""
    folder = adapters.make(tmp_path / "a", model)
    path, real = folder / "adapter_config.json", peft.digest

    def digest(asked: Path) -> str:
        path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": 99}))
        return real(asked)

    monkeypatch.setattr(peft, "digest", digest)
    assert "was changed while it was read" in refusal(folder, model)


def test_settings_of_peft_that_change_nothing(model: Path, tmp_path: Path) -> None:
    config = json.loads((adapters.make(tmp_path, model) / "adapter_config.json").read_text())
    more = {
        "modules_to_save": [],
        "rank_pattern": {},
        "megatron_config": None,
        "corda_config": None,
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | more))
    assert peft.read(tmp_path, model, 64).modules

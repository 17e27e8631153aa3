"""Mixtures of experts in an engine: whatever is beside a request and on whatever way, it gives the
same to the bit; and what does not fit is refused by name."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file

from kernels.cpu.library import built
from services.worker.engine import Request
from services.worker.engine.adapters import UnsupportedAdapter, peft
from services.worker.engine.engine import Engine
from services.worker.engine.formats.writing import write_quantized
from services.worker.engine.models.config import UnsupportedModel
from services.worker.engine.models.registry import read_config
from services.worker.engine.weights.checkpoint import open_checkpoint
from tests.support import adapters
from tests.unit.engine import checkpoints
from tests.unit.engine.driving import (
    assert_moves,
    drive,
    generate,
    greedy,
    make_engine,
    make_prompts,
)
from tests.unit.engine.guessing import KINDS, guessing_engine, requests_of
from tests.unit.engine.test_engine_parity import check_against_transformers, watch_logits

Checkpoint = Callable[..., Path]
FAMILIES = ("mixtral", "qwen3-moe", "qwen2-moe")
WAYS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "fp8": {"quantization": "fp8"},
    "w8a8": {"quantization": "w8a8"},
    "kv-int8": {"kv_format": "int8"},
    "kv-int4": {"kv_format": "int4"},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    @functools.cache
    def make(variant: str) -> Path:
        folder = tmp_path_factory.mktemp(variant)
        return checkpoints.make(folder, variant, intermediate_size=128)

    return make


@pytest.fixture(scope="module", params=[(f, w) for f in FAMILIES for w in WAYS], ids="-".join)
def engine_of(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Callable[..., Engine]:
    family, way = request.param
    if way != "float32" and not built():
        pytest.skip("no kernels for this processor")
    return functools.partial(make_engine, checkpoint(family), **WAYS[way])


def work() -> list[Request]:
    """With a common beginning, greedy and drawn."""
    return requests_of(KINDS)


@pytest.fixture(scope="module")
def alone(engine_of: Callable[..., Engine]) -> dict[str, list[int]]:
    engine = engine_of(prefix_caching=False)
    return {one.request_id: drive(engine, [one]).tokens[one.request_id] for one in work()}


@pytest.mark.parametrize(
    "way",
    [
        {},
        {"num_blocks": 9},
        {"max_batched_tokens": 16},
        {"overlap": True},
        {"threads": 3},
    ],
    ids=["together", "preempted", "chunked", "overlapped", "threads"],
)
def test_neighbours_and_ways_through_the_engine_change_nothing(
    engine_of: Callable[..., Engine], alone: dict[str, list[int]], way: dict[str, Any]
) -> None:
    """Bit for bit: what is drawn depends on each logit."""
    engine = engine_of(**way)
    found = drive(engine, work())
    assert found.tokens == alone
    windows = engine.info.kv_groups[0].window  # whose sequences hold few blocks
    assert bool(found.num_preempted) == ("num_blocks" in way and not windows)
    assert drive(engine, work()).tokens == alone  # from the prefix cache


def test_guesses_change_nothing(
    engine_of: Callable[..., Engine], alone: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(engine_of, functools.partial)
    engine = guessing_engine(engine_of.args[0], monkeypatch, alone, **engine_of.keywords)
    found = drive(engine, work())
    assert found.tokens == alone
    assert sum(step.accepted_tokens for step in found.steps)


def test_a_split_and_going_on_elsewhere_change_nothing(
    engine_of: Callable[..., Engine], alone: dict[str, list[int]]
) -> None:
    prefill, decode = engine_of(), engine_of()
    for one in work()[:3]:
        assert_moves(one, alone[one.request_id], prefill, decode)


@pytest.mark.parametrize("draft", ["mixtral", "gqa"])
def test_a_draft_model_of_experts_or_beside_them(
    checkpoint: Checkpoint, tmp_path: Path, draft: str
) -> None:
    folder = checkpoints.make(tmp_path / "draft", draft, seed=9, num_hidden_layers=1)
    requests = [one for one in work() if not one.sampling.logprobs][:6]
    how = {"dtype": "float32"}
    plain = drive(make_engine(checkpoint("mixtral"), **how), requests)
    engine = make_engine(checkpoint("mixtral"), speculation="draft", draft_model=str(folder), **how)
    assert drive(engine, requests).tokens == plain.tokens


@pytest.mark.parametrize("kernels", [*built()[:1], "reference"])
@pytest.mark.parametrize("normed", [False, True])
def test_shares_are_normed_as_the_config_says(tmp_path: Path, kernels: str, normed: bool) -> None:
    folder = checkpoints.make(tmp_path, "qwen3-moe", norm_topk_prob=normed)
    prompts = make_prompts(4, seed=2)
    outputs = generate(make_engine(folder, kernels=kernels), prompts, greedy(20))
    check_against_transformers(folder, prompts, outputs)


def test_every_other_layer_may_have_experts(tmp_path: Path) -> None:
    """`decoder_sparse_step`; in a checkpoint of several files."""
    folder = checkpoints.make(
        tmp_path, "qwen3-moe", decoder_sparse_step=2, mlp_only_layers=[], shard="100KB"
    )
    told = read_config(folder).experts
    assert told is not None
    assert told.layers == {1}
    prompts = make_prompts(4, seed=2)
    outputs = generate(make_engine(folder), prompts, greedy(20))
    check_against_transformers(folder, prompts, outputs)


@pytest.mark.skipif(not built(), reason="no kernels for this processor")
def test_a_router_is_never_rounded(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither at load nor in a checkpoint that is made ahead, which computes the same."""
    folder = checkpoint("qwen3-moe")
    made = tmp_path / "made"
    made.mkdir()
    write_quantized(folder, made, "int4")
    routers = {n: t for n, t in load_file(folder / "model.safetensors").items() if ".gate." in n}
    assert len(routers) == 2
    with open_checkpoint(made, read_config(made)) as opened:
        for name, tensor in routers.items():
            assert (opened.tensors[name].float32() == tensor).all()
        assert opened.tensors["model.layers.0.mlp.experts.7.up_proj.weight"].held[0] == "int4"
    found = []
    for one in (folder, made):
        seen: list[torch.Tensor] = []
        engine = make_engine(one, quantization="int4")
        watch_logits(engine, seen, monkeypatch)
        generate(engine, [list(range(3, 60))], greedy(1))
        found.append(torch.cat(seen))
    assert torch.equal(*found)


def test_adapters_change_attention_and_no_experts(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = checkpoint("mixtral")
    few = adapters.make(tmp_path / "attention", model, targets=adapters.Q_AND_V)
    assert {name.rsplit(".", 1)[1] for name in peft.read(few, model, 64).modules} == {
        "q_proj",
        "v_proj",
    }
    at = "base_model.model.model.layers.0.block_sparse_moe.experts.1.w1"
    halves = {f"{at}.lora_A.weight": torch.zeros(4, 64), f"{at}.lora_B.weight": torch.zeros(128, 4)}
    extra = {name: half.numpy() for name, half in halves.items()}
    broken = adapters.make(tmp_path / "experts", model, targets=adapters.Q_AND_V, extra=extra)
    with pytest.raises(UnsupportedAdapter, match=r"experts\.1\.w1\.lora_A\.weight is not"):
        peft.read(broken, model, 64)


@pytest.mark.skipif(not built(), reason="no kernels for this processor")
def test_what_the_kernels_cannot_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    sizes = {"intermediate_size": 128, "moe_intermediate_size": 36}
    narrow = checkpoints.make(tmp_path / "narrow", "qwen3-moe", **sizes)
    with pytest.raises(ValueError, match="features within an expert 36 is no multiple of 8"):
        make_engine(narrow, kernels=built()[0])
    with pytest.raises(ValueError, match="features within an expert 36 is no multiple of 64"):
        make_engine(narrow, quantization="int4")
    assert make_engine(narrow).info.kernels == "reference"


def test_another_number_of_experts_is_told(checkpoint: Checkpoint, tmp_path: Path) -> None:
    config = json.loads((checkpoint("mixtral") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_local_experts": 6}))
    (tmp_path / "model.safetensors").symlink_to(checkpoint("mixtral") / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"gate\.weight is \[5, 64\], config\.json makes"):
        make_engine(tmp_path)

"""Checkpoints as they are published are read as transformers reads them; what their families cannot
do here is refused by name."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.engine.models.config import ModelConfig, UnsupportedModel
from services.worker.engine.models.gemma2 import embedding_scale
from services.worker.engine.models.registry import FAMILIES, read_config
from services.worker.engine.models.rope import build_rope
from services.worker.engine.weights.weights import Shape, shapes
from tests.unit.engine import checkpoints
from tests.unit.engine.driving import generate, greedy, make_engine, make_prompts
from tests.unit.engine.published import PUBLISHED
from tests.unit.engine.test_engine_parity import check_against_transformers


def read(folder: Path, name: str, **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(PUBLISHED[name] | changes))
    return read_config(folder)


def test_each_family_has_one_that_is_published() -> None:
    assert {config["architectures"][0] for config in PUBLISHED.values()} == set(FAMILIES)


def as_saved(tensors: dict[str, Shape], kind: str) -> Iterator[tuple[str, Shape]]:
    """Experts that transformers stacks are tensors of their own in files."""
    at, gate, up, down = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2")}.get(
        kind, ("mlp", "gate_proj", "up_proj", "down_proj")
    )
    for name, shape in tensors.items():
        own = name.replace(".mlp.", f".{at}.")
        before, _, stacked = own.partition(".experts.")
        for expert in range(shape[0]) if stacked else ():
            if stacked == "gate_up_proj":
                for one in (gate, up):
                    yield f"{before}.experts.{expert}.{one}.weight", (shape[1] // 2, shape[2])
            else:
                yield f"{before}.experts.{expert}.{down}.weight", shape[1:]
        if not stacked:
            yield own, shape


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_as_by_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = read(tmp_path, name)
    theirs = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs)
    tensors = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    assert shapes(config) == dict(as_saved(tensors, theirs.model_type))
    assert config.rms_norm_epsilon == theirs.rms_norm_eps
    assert config.attention_scale == model.model.layers[0].self_attn.scaling
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    wanted = [getattr(theirs, cap, None) or 0 for cap in caps]
    assert [config.score_cap, config.logit_cap] == wanted

    window = theirs.sliding_window if hasattr(theirs, "sliding_window") else None
    usual = "full_attention" if window is None else "sliding_attention"
    types = getattr(theirs, "layer_types", None) or [usual] * config.num_layers
    for layer, kind in zip(config.layers, types, strict=True):
        sees = window if kind == "sliding_attention" else None
        longest = theirs.max_position_embeddings
        assert (layer.window or longest) == (sees or longest)


@pytest.mark.parametrize("name", PUBLISHED)
def test_its_positions_turn_as_in_transformers(name: str, tmp_path: Path) -> None:
    """Of sequences within what they were trained for, and beyond, where that is another matter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = read(tmp_path, name, num_hidden_layers=6)
    theirs = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs)
    rotary = type(model.model.rotary_emb)(config=theirs)
    original = PUBLISHED[name].get("original_max_position_embeddings", 0)
    for served in {original, config.context} - {0}:
        positions = np.array([0, 1, 77, served - 1])
        for number, rope in enumerate(config.ropes):
            kind = [["full_attention", "sliding_attention"][number]] * (len(config.ropes) > 1)
            cos, sin = rotary(torch.zeros(1), torch.from_numpy(positions)[None], *kind)
            pairs = cos.shape[-1] // 2
            for mine, other in zip(
                build_rope(rope, served).tables(positions), (cos, sin), strict=True
            ):
                other = other[0, :, :pairs].numpy()
                np.testing.assert_allclose(mine, other, rtol=0, atol=3e-7 * served)


def test_a_recipe_for_longer_contexts_makes_them_longer(tmp_path: Path) -> None:
    name = "Qwen2.5-7B, made longer as its page says"
    assert read(tmp_path, name).context == 131072
    assert read(tmp_path, name, max_position_embeddings=262144).context == 262144


def test_a_window_of_the_shorter_context_holds_in_the_longer_one(tmp_path: Path) -> None:
    factor = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    folder = checkpoints.make(
        tmp_path,
        "qwen2",
        max_position_embeddings=64,
        sliding_window=64,
        rope_parameters=factor | {"original_max_position_embeddings": 64},
    )
    engine = make_engine(folder)
    assert engine.info.max_model_len == 256
    prompts = [(prompt * 90)[:150] for prompt in make_prompts(2, seed=8)]
    check_against_transformers(folder, prompts, generate(engine, prompts, greedy(8)))


def test_which_factors_turn_is_a_matter_of_the_context_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And is said; KV that is turned otherwise is of another format."""
    caplog.set_level("INFO")
    rope = checkpoints.VARIANTS["phi3"]["rope_parameters"] | {"attention_factor": None}
    folder = checkpoints.make(
        tmp_path, "phi3", original_max_position_embeddings=64, rope_parameters=rope
    )
    short = [prompt[:40] for prompt in make_prompts(4)]
    engine = make_engine(folder, max_model_len=64)
    check_against_transformers(folder, short, generate(engine, short, greedy(20)))
    assert "long_factor" not in caplog.text
    long = [(prompt * 90)[:90] for prompt in make_prompts(3, seed=8)]
    served = make_engine(folder)
    assert "max_model_len 256 is beyond" in caplog.text
    check_against_transformers(folder, long, generate(served, long, greedy(20)))
    assert served.info.kv_format != engine.info.kv_format


def test_embeddings_are_scaled_in_the_digits_of_their_dtype() -> None:
    for dtype in ("float32", "bfloat16", "float16"):
        for size in (1152, 2304, 3584, 4608):
            exact = torch.tensor(size**0.5, dtype=getattr(torch, dtype))
            assert embedding_scale(size, dtype) == exact.item()


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("gemma-3-1b-it", {"architectures": ["Gemma3ForConditionalGeneration"]}, "Gemma3ForCond"),
        ("Qwen3-0.6B", {"architectures": ["OlmoeForCausalLM"]}, "'OlmoeForCausalLM' is not"),
        ("Qwen1.5-MoE-A2.7B", {"use_sliding_window": True}, "use_sliding_window True"),
        ("Qwen3-30B-A3B", {"num_experts_per_tok": 129}, "num_experts_per_tok 129 is above num_exp"),
        ("Qwen3-30B-A3B", {"num_experts": 10**6}, "num_experts 1000000 is above 1024"),
        ("Qwen3-30B-A3B", {"mlp_only_layers": "all"}, "mlp_only_layers 'all' is no list"),
        ("Qwen3-30B-A3B", {"decoder_sparse_step": 0}, "decoder_sparse_step 0 is not a number"),
        (
            "Mixtral-8x7B-v0.1",
            {"num_hidden_layers": 1000, "num_local_experts": 66},
            "num_local_experts 66, of 1000 layers, is above 65536 in all",
        ),
        ("Mixtral-8x7B-v0.1", {"num_local_experts": None}, "num_local_experts is missing"),
        ("Mistral-7B-v0.1", {"sliding_window": 0}, "sliding_window 0 is not a number above 0"),
        ("Mistral-7B-v0.1", {"sliding_window": 0.5}, "sliding_window 0.5 is not a whole number"),
        ("Mistral-7B-v0.1", {"quantization_config": {"quant_method": "hqq"}}, "quant_method 'hqq'"),
        ("Qwen3-0.6B", {"layer_types": ["chunked"] * 28}, "layer_types 'chunked'"),
        ("Qwen3-0.6B", {"layer_types": ["full_attention"]}, "layer_types does not name each of 28"),
        ("Qwen3-0.6B", {"hidden_act": "relu"}, "hidden_act 'relu'"),
        ("Qwen2.5-0.5B-Instruct", {"dual_chunk_attention_config": {"a": 1}}, "dual_chunk_at"),
        ("Llama-3.2-1B", {"sliding_window": 4096}, "sliding_window 4096"),
        ("Phi-4-mini-instruct", {"partial_rotary_factor": 0.5}, "short_factor has 48 numbers, not"),
        ("OLMo-2-1124-7B", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ("gemma-2-2b-it", {"hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        ("gemma-2-2b-it", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma-3-1b-it", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        ("gemma-3-1b-it", {"query_pre_attn_scalar": "much"}, "query_pre_attn_scalar 'much'"),
    ],
)  # fmt: skip
def test_what_is_not_built_is_refused_by_name(
    tmp_path: Path, name: str, changes: dict[str, Any], words: str
) -> None:
    """Before any weight is looked at: there is none."""
    with pytest.raises(UnsupportedModel, match=r"config\.json: ") as caught:
        read(tmp_path, name, **changes)
    assert words in str(caught.value)


HUGE = 10**400
FACTORS = PUBLISHED["Phi-4-mini-instruct"]["rope_scaling"]
YARN = PUBLISHED["Qwen2.5-7B, made longer as its page says"]["rope_scaling"]
HOSTILE: list[tuple[str, Any]] = [
    ("num_hidden_layers", 10**9),
    ("num_hidden_layers", 2.5),
    ("hidden_size", 3),
    ("max_position_embeddings", 2**31),
    *[("rms_norm_eps", value) for value in (float("nan"), float("inf"), HUGE, True)],
    *[("rope_theta", value) for value in (float("nan"), HUGE, 0, -1, 1)],
    *[("rope_scaling", value) for value in (5, "yarn", [1])],
    *[("rope_scaling", YARN | {"beta_fast": value}) for value in (0, "a", [], float("inf"))],
    *[("rope_scaling", YARN | {"rope_type": value}) for value in (5, ["yarn"], {})],
    ("rope_scaling", YARN | {"factor": float("nan")}),
    ("rope_scaling", FACTORS | {"long_factor": [1, "a"]}),
    *[("architectures", value) for value in (5, "LlamaForCausalLM", {"a": 1}, [["a"]])],
    *[("eos_token_id", value) for value in ("abc", {"a": 1}, 1.5, [True])],
    ("tie_word_embeddings", "no"),
]


@pytest.mark.parametrize(("field", "value"), HOSTILE)
def test_nonsense_is_told_with_its_file_and_field(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(UnsupportedModel, match=r"config\.json: ") as caught:
        read(tmp_path, "Llama-2-7b", **{field: value})
    named = {"rope_scaling": "rope_", "architectures": "architectures"}
    assert named.get(field, field) in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"\xff\xfe{", b"[" * 200_000, b'{"vocab_size": ' + b"9" * 5000 + b"}", None]
)
def test_a_file_that_is_no_json_is_told(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "config.json"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        read_config(tmp_path)

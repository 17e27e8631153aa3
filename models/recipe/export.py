"""To and from Hugging Face's form: config.json, model.safetensors, tokenizer files."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from models.recipe.model import Llama, Shape
from models.recipe.template import SOURCE
from models.recipe.tokenizer import END, PAD, SPECIAL


def config(shape: Shape) -> dict[str, Any]:
    """The checkpoint's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context,
        "rope_theta": shape.theta,
        "rms_norm_eps": shape.epsilon,
        "hidden_act": "silu",
        "attention_bias": True,  # as MiniLM's
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": END,
        "pad_token_id": PAD,
        "torch_dtype": "bfloat16",
    }


# Of a layer: each norm's gain, and the matrices that read what it wrote.
READ_BEHIND = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def evened(weights: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """The same model to the bit, without columns four times as large as others behind a norm: its
    gain takes what they lose, in powers of two. Codes of tokens are small in a stream and large in
    what compares them; a format with a scale for each row rounds all else of such a row to nothing
    (int8: 2.3 nats on passages, 0.03 with those from 1.4 times on taken down). The other
    columns stay: as large, too, all is worse in int4.
    """
    made = dict(weights)
    for layer in range(layers):
        for norm, readers in READ_BEHIND.items():
            gain, *columns = (f"model.layers.{layer}.{n}.weight" for n in (norm, *readers))
            sizes = torch.stack([made[name].abs().amax(0) for name in columns]).amax(0).float()
            typical = sizes[sizes > 0].median()
            times = ((sizes / typical).log2().floor() - 1).clamp(min=0).exp2()
            made[gain] = made[gain] * times.to(made[gain])
            for name in columns:
                made[name] = made[name] / times.to(made[name])
    return made


def save(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes everything that `from_pretrained` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: value.detach().cpu().bfloat16().contiguous()
        for name, value in model.state_dict().items()
    }
    weights = evened(weights, model.shape.layers)
    file = folder / "model.safetensors"
    save_file(weights, file, metadata={"format": "pt"})
    file.chmod(0o644)  # it is made for its owner alone: who serves it may be another
    tokenizer.save(str(folder / "tokenizer.json"))
    shutil.copyfile(SOURCE, folder / "chat_template.jinja")
    files: dict[str, dict[str, Any]] = {
        "config.json": config(model.shape),
        "generation_config.json": {
            "eos_token_id": END,
            "pad_token_id": PAD,
            "do_sample": False,  # what transformers reads
            "temperature": 0.0,  # what Penstock reads, where a request names none
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": SPECIAL[END],
            "pad_token": SPECIAL[PAD],
            "clean_up_tokenization_spaces": False,
            "model_max_length": model.shape.context,
            "chat_template": SOURCE.read_text(),
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def load(folder: Path) -> tuple[Llama, Tokenizer]:
    """A saved model, in float32, and its tokenizer."""
    data = json.loads((folder / "config.json").read_text())
    shape = Shape(
        vocab=data["vocab_size"],
        hidden=data["hidden_size"],
        inner=data["intermediate_size"],
        layers=data["num_hidden_layers"],
        heads=data["num_attention_heads"],
        head_dim=data["head_dim"],
        context=data["max_position_embeddings"],
        theta=data["rope_theta"],
        epsilon=data["rms_norm_eps"],
    )
    model = Llama(shape)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))

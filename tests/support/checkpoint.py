"""A tiny seeded Llama with a tokenizer, in Hugging Face form: real in every part but its words."""

from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from tests.support.tokenizers import write_tokenizer


def write_checkpoint(
    folder: Path,
    *,
    vocab_size: int = 320,
    window: int = 512,
    seed: int = 20,
    hidden: int = 64,
    layers: int = 3,
) -> Path:
    """Writes the checkpoint and returns its folder. fp32; a seed's weights are always the same."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=window,
        tie_word_embeddings=False,
        # Random weights this large give logits apart by far more than rounding: greedy output must
        # not hang on the order of a sum.
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    write_tokenizer(folder, vocab_size)
    return folder

"""The engine on checkpoints of random weights, against the floors of decode (bytes) and of prompts
(operations)."""

import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from bench.gpu.device import Device
from bench.gpu.kernels import Measured
from services.worker.engine import EngineConfig, Request, Sampling
from services.worker.engine.engine import Engine
from services.worker.engine.models.registry import read_config
from services.worker.engine.weights.weights import shapes


@dataclass(frozen=True)
class Load:
    name: str
    requests: int
    prompt: tuple[int, int]
    """Tokens: at least, at most."""
    output: tuple[int, int]


LLAMA_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
}
QWEN3_600M = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
}
LOADS = (
    Load("1 sequence, 512 + 256", 1, (512, 512), (256, 256)),
    Load("32 sequences, 512 + 256", 32, (512, 512), (256, 256)),
    Load("256 sequences, 512 + 256", 256, (512, 512), (256, 256)),
    Load("prompts alone, 64 x 2048", 64, (2048, 2048), (1, 1)),
)
MIXED = Load("256 mixed, 100-1024 + 100-1024", 256, (100, 1024), (100, 1024))
"""What nano-vllm's bench.py runs, on its model's shape."""
SMALL = Load("2 sequences, 5 + 2", 2, (5, 5), (2, 2))


@dataclass(frozen=True)
class Agreement:
    """Greedy tokens of the same requests, on the kernels and on the reference."""

    equal: int
    tokens: int


@contextmanager
def checkpoint(shape: dict[str, int], device: Device) -> Iterator[Path]:
    """A Llama of this shape, of random weights."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        config: dict[str, Any] = {
            **shape,
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "eos_token_id": 0,
        }
        (folder / "config.json").write_text(json.dumps(config))
        tensors = {}
        for tensor, size in shapes(read_config(folder)).items():
            values = torch.randn(size, device=device.torch) * size[-1] ** -0.5
            tensors[tensor] = (values if len(size) > 1 else values * 0 + 1).bfloat16().cpu()
        save_file(tensors, folder / "model.safetensors")
        yield folder


def engine(folder: Path, device: Device, **settings: Any) -> Engine:
    size: dict[str, Any] = {"kv_cache_bytes": 2**20, "max_running": 2, "max_batched_tokens": 16}
    if not device.is_dry:
        free, _ = torch.cuda.mem_get_info()
        size = {
            "kv_cache_bytes": free // 2,
            "max_running": 256,
            "max_batched_tokens": 8192,
        }
    config: dict[str, Any] = {"kernels": "triton", "device": device.torch.type}
    config["prefix_caching"] = False  # each load computes all of its prompts
    config["max_adapters"] = 0
    return Engine(EngineConfig(model=str(folder), **(config | size | settings)))


def measure(engine: Engine, load: Load, device: Device) -> Measured:
    """Wall time of the load, and what it must take: the weights once a decode step with every
    sequence's keys and values, and a prompt's operations."""
    rng = random.Random(1)
    vocab = engine.info.vocab_size
    sizes = [(rng.randint(*load.prompt), rng.randint(*load.output)) for _ in range(load.requests)]
    for number, (prompt, output) in enumerate(sizes):
        ids = [rng.randrange(1, vocab) for _ in range(prompt)]
        engine.add(Request(str(number), ids, Sampling(output, temperature=0, ignore_eos=True)))
    started = time.perf_counter()
    generated = 0
    while engine.has_work:
        for told in engine.step().outputs:
            if told.error is not None:
                raise RuntimeError(f"{load.name}: {told.error}")
            generated += len(told.new_token_ids)
    took = time.perf_counter() - started
    info = engine.info
    kv = info.kv_bytes_per_block / info.block_size
    read = sum(output * (prompt + output / 2) for prompt, output in sizes) * kv
    read += (max(output for _, output in sizes) - 1) * info.parameter_bytes
    operations = 2 * info.num_parameters * sum(prompt for prompt, _ in sizes)
    floor = read / device.bytes_per_s + operations / device.flops_per_s
    weights = engine.config.quantization
    formats = f"weights {weights}, KV {info.kv_format}"
    name = f"{load.name}, {formats}: {generated / took:.0f} tokens/s out"
    return Measured(name, took, floor)


def agreement(folder: Path, device: Device) -> Agreement:
    """In float32, where the two differ by the order of sums alone."""
    rng = random.Random(2)
    prompts, count = ([[1, 2, 3]], 3) if device.is_dry else (
        [[rng.randrange(1, 1000) for _ in range(n)] for n in (5, 100, 700)],
        32,
    )  # fmt: skip
    found = []
    small = {"max_running": 4, "kv_cache_bytes": 2**20 if device.is_dry else 2**29}
    for kernels in ("reference", "triton"):
        made = engine(folder, device, kernels=kernels, dtype="float32", **small)
        tokens: dict[str, list[int]] = {}
        for number, prompt in enumerate(prompts):
            sampling = Sampling(count, temperature=0, ignore_eos=True)
            made.add(Request(str(number), prompt, sampling))
        while made.has_work:
            for told in made.step().outputs:
                tokens.setdefault(told.request_id, []).extend(told.new_token_ids)
        found.append([token for number in sorted(tokens) for token in tokens[number]])
    return Agreement(sum(a == b for a, b in zip(*found, strict=True)), len(found[0]))

"""The engine's settings."""

import math
import os
import re
from dataclasses import dataclass
from typing import Literal, get_args

from services.worker.engine.parallel.seats import Spread

CPU_KERNELS = ("avx2", "avx512", "avx512_bf16")
SCORED_ROWS = 32
"""Rows of logits of one step for prompt tokens whose logprobs are wanted, at most."""
GUESSED_ROWS = 128
"""Likewise, for guesses of tokens."""
Quantization = Literal["auto", "int8", "int4", "fp8", "w8a8"]
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)
KvFormat = Literal["auto", "int8", "fp8", "int4"]
KV_FORMATS: tuple[KvFormat, ...] = get_args(KvFormat)
KERNELS = ("auto", "reference", "triton", *CPU_KERNELS)
SPECULATIONS = ("off", "ngram", "draft")
MOST_ADAPTERS = 1024
MOST_RANKS = 64
MOST_GUESSES = 32
"""Of a sequence in one step."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Raises ValueError, naming the field, on values that cannot work."""

    model: str
    """Directory of a checkpoint: config.json and *.safetensors."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: the checkpoint's own where the device computes in it, or float32 for float16, whose
    values it holds all. On a CPU without bfloat16's dot product: float32."""
    quantization: Quantization = "auto"
    """Of matrices. auto: as the checkpoint has them; else rounded when they are loaded (decisions
    0061, 0080), not on PyTorch: int8 or e4m3 with a scale for each row, int4 with one for each 32
    of a row, and embeddings and heads int8. w8a8: int8, and what meets such matrices too, with a
    scale for each token (decision 0077)."""
    kernels: str = "auto"
    """On a CPU: an instruction set of kernels/cpu; on an NVIDIA GPU: "triton"; on any: "reference",
    which is PyTorch. auto: the best."""
    kv_format: KvFormat = "auto"
    """Of keys and values in the cache. auto: that in which the model computes; else 8 bits with a
    scale for each token and head (decision 0067), about half of bfloat16's bytes. fp8 is e4m3, by
    Triton's kernels on a GPU of compute capability 8.9 or more."""
    device: str = "cpu"
    """"cpu", or a GPU: "cuda", "cuda:1"."""
    tensor_parallel: int = 1
    """Ranks that the model is cut over (decision 0075), each a process: on a CPU, or a GPU for
    each, from the first one on."""
    spread: Spread | None = None
    """Where each rank runs. None: they are processes of this host."""
    ranks_beside: int | None = None
    """Ranks that take memory of one host, itself among them. None: all."""
    block_size: int = 16
    """Tokens of one KV block."""
    num_blocks: int | None = None
    """KV blocks. None: as many as fit `kv_cache_bytes`."""
    kv_cache_bytes: int = 512 * 2**20
    """Of each rank."""
    max_model_len: int | None = None
    """Tokens of prompt and output together. None: the checkpoint's context, or what the KV cache
    holds if that is less."""
    max_batched_tokens: int = 512
    """Tokens computed in one step at most."""
    target_itl_ms: float | None = None
    """What a step aims to take at most while sequences decode: prompts are computed in so small
    chunks. None: twice what decoding alone takes (prompt_room.py)."""
    max_running: int = 64
    """Sequences in one step at most."""
    prefix_caching: bool = True
    overlap: bool | None = None
    """Plan and launch the next step while one runs. None: on a GPU (decision 0027), unless tokens
    are guessed: what comes next is not known before the guesses are judged."""
    speculation: Literal["off", "ngram", "draft"] = "off"
    """Who guesses tokens ahead, which the model then computes several at a time (speculation.py).
    ngram: what followed in the request itself where it went the same way before; draft: that, or
    where nothing did a smaller model."""
    draft_model: str | None = None
    """draft: directory of its checkpoint, of the same vocabulary. Its KV blocks are part of
    `kv_cache_bytes`, or come to `num_blocks`."""
    num_speculative_tokens: int = 5
    """Guesses of a sequence in one step at most; fewer where fewer pay."""
    prompt_lookup_min: int = 2
    """As many tokens must agree at least, for what followed to be a guess."""
    prompt_lookup_max: int = 8
    """The last place where so many agree is taken; else where the most do."""
    keeps_all: bool = False
    """Its KV blocks are of all layers, and windows give none back (kv/groups.py): of a draft model,
    which has another model's block tables."""
    max_adapters: int = 16
    """Adapters that are loaded at once (adapters/); 0: none can be."""
    max_step_adapters: int = 8
    """Different ones of the requests that run at once, so of a step; whose is one more waits."""
    max_adapter_rank: int = 64
    threads: int | None = None
    """CPU threads. None: as many as the process may use (cores.py)."""
    kv_disk_dir: str | None = None
    """Where KV blocks go that the prefix cache evicts, and come from again (kv_tiers/), for all
    engines of the host. None: they are gone."""
    kv_disk_bytes: int = 8 * 2**30
    """Of that folder's files at most."""
    checkpoint: str = ""
    """A digest of what is loaded, rounded weights told apart: whose KV blocks those on disk are."""
    packed_dir: str | None = None
    """Where weights packed for the processor are kept for all engines of the host. None: each
    packs its own."""

    @property
    def max_rows(self) -> int:
        """Of logits in one step: one for each sequence, and those of scored and guessed tokens."""
        return self.max_running + SCORED_ROWS + self.guessed_rows

    @property
    def guessed_rows(self) -> int:
        if self.speculation == "off":
            return 0
        return min(self.max_running * self.num_speculative_tokens, GUESSED_ROWS)

    @property
    def overlaps(self) -> bool:
        if self.overlap is None:
            return self.device != "cpu" and self.speculation == "off"
        return self.overlap

    @property
    def on_triton(self) -> bool:
        on_gpu = self.device.startswith("cuda")
        return self.kernels == "triton" or (self.kernels == "auto" and on_gpu)

    def __post_init__(self) -> None:
        for name in (
            *("block_size", "kv_cache_bytes", "max_batched_tokens", "max_running"),
            *("max_step_adapters", "max_adapter_rank", "kv_disk_bytes"),
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, is {getattr(self, name)}")
        for name in ("num_blocks", "max_model_len", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1 or None, is {value}")
        if not 0 <= self.max_adapters <= MOST_ADAPTERS:
            raise ValueError(
                f"max_adapters must be in [0, {MOST_ADAPTERS}], is {self.max_adapters}"
            )
        if self.target_itl_ms is not None and not 0 < self.target_itl_ms < math.inf:
            raise ValueError(f"target_itl_ms must be positive or None, is {self.target_itl_ms}")
        if self.max_batched_tokens < self.max_running:
            raise ValueError(
                f"max_batched_tokens ({self.max_batched_tokens}) must not be less than max_running "
                f"({self.max_running}): every running sequence decodes one token a step"
            )
        if self.kv_disk_dir is not None and not self.prefix_caching:
            raise ValueError(
                "kv_disk_dir keeps what the prefix cache evicts, and prefix_caching is off"
            )
        if self.speculation not in SPECULATIONS:
            raise ValueError(
                f"speculation must be one of {', '.join(SPECULATIONS)}, is {self.speculation!r}"
            )
        if (self.draft_model is not None) != (self.speculation == "draft"):
            raise ValueError(
                f"draft_model goes with speculation 'draft' and with no other: it is "
                f"{self.draft_model!r}, speculation {self.speculation!r}"
            )
        if self.draft_model is not None and not os.path.isdir(self.draft_model):
            raise ValueError(f"draft_model: {self.draft_model!r} is not a directory")
        if self.speculation != "off" and self.overlap:
            raise ValueError("overlap excludes speculation, whose next step waits for the last one")
        if not 1 <= self.num_speculative_tokens <= MOST_GUESSES:
            raise ValueError(
                f"num_speculative_tokens must be in [1, {MOST_GUESSES}], is "
                f"{self.num_speculative_tokens}"
            )
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min must be at least 1 and at most prompt_lookup_max "
                f"({self.prompt_lookup_max}), is {self.prompt_lookup_min}"
            )
        if self.kernels not in KERNELS:
            raise ValueError(f"kernels must be one of {', '.join(KERNELS)}, is {self.kernels!r}")
        if self.quantization not in QUANTIZATIONS:
            raise ValueError(
                f"quantization must be one of {', '.join(QUANTIZATIONS)}, is {self.quantization!r}"
            )
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"device must be cpu, cuda or cuda:NUMBER, is {self.device!r}")
        if self.kernels in CPU_KERNELS and self.device != "cpu":
            raise ValueError(f"kernels {self.kernels!r} are a CPU's, device is {self.device!r}")
        if self.quantization != "auto" and self.kernels == "reference":
            raise ValueError(
                f"quantization {self.quantization!r} needs the C++ kernels of a CPU or a GPU's "
                "'triton', kernels are 'reference'"
            )
        self._check_ranks()
        if self.kv_format not in KV_FORMATS:
            raise ValueError(
                f"kv_format must be one of {', '.join(KV_FORMATS)}, is {self.kv_format!r}"
            )
        if not os.path.isdir(self.model):
            raise ValueError(f"model: {self.model!r} is not a directory")

    def _check_ranks(self) -> None:
        if not 1 <= self.tensor_parallel <= MOST_RANKS:
            raise ValueError(
                f"tensor_parallel must be in [1, {MOST_RANKS}], is {self.tensor_parallel}"
            )
        if self.spread is not None and len(self.spread.seats) != self.tensor_parallel:
            raise ValueError(
                f"spread has seats for {len(self.spread.seats)} ranks, tensor_parallel is "
                f"{self.tensor_parallel}"
            )
        if self.tensor_parallel == 1:
            return
        if ":" in self.device:
            raise ValueError(
                f"tensor_parallel {self.tensor_parallel} needs device 'cpu' or 'cuda', "
                f"{self.device!r} is one GPU"
            )

"""PENSTOCK_WORKER__…"""

import math
from typing import Literal

from pydantic import Field

from services.common.config.base import RayOptions, ServiceSettings

Role = Literal["prefill", "decode", "both"]


class WorkerSettings(ServiceSettings):
    replicas: int = Field(
        1, ge=1, description="of the Serve graph, in each pool of a model that names no pools"
    )
    role: Role = "both"
    model: str = Field("", description="name of the served model; empty: the first")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="auto: the checkpoint's own where the device computes in it; "
        "float32 on a CPU without bfloat16's dot product",
    )
    quantization: Literal["auto", "int8", "int4", "fp8", "w8a8"] = Field(
        "auto",
        description="of the weights; auto: as the checkpoint has them; else rounded when they are "
        "loaded, by the kernels of a CPU or of a GPU, not PyTorch: `int8` and `fp8`, half of "
        "bfloat16's bytes; `w8a8`, as int8, and so is what meets them; `int4`, some 0.3 of them",
    )
    kernels: Literal["auto", "reference", "triton", "avx2", "avx512", "avx512_bf16"] = Field(
        "auto",
        description="on a CPU: an instruction set; on a GPU: `triton`; on any: `reference`, which "
        "is PyTorch; auto: the best",
    )
    kv_format: Literal["auto", "int8", "fp8", "int4"] = Field(
        "auto",
        description="of keys and values in the cache; auto: as they are computed; `int8`, `fp8`: "
        "some half of bfloat16's bytes; `int4`: some quarter; on a GPU `fp8` needs compute "
        "capability 8.9",
    )
    device: str = Field(
        "cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="`cpu`, `cuda` or `cuda:1`"
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        le=64,
        description="ranks that the model is cut over: processes, on a GPU each or on a CPU",
    )
    placement_group_strategy: Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"] = Field(
        "STRICT_PACK",
        description="on which Ray nodes the ranks of a worker are. `STRICT_PACK`: on one; `PACK`: "
        "on as few as have room; `SPREAD`: on as many as there are; `STRICT_SPREAD`: on one each. "
        "But for `STRICT_PACK` each rank takes its share of `ray`",
    )
    block_size: int = Field(16, gt=0, description="tokens per KV block")
    kv_cache_bytes: int = Field(256 * 2**20, gt=0, description="of each rank")
    kv_disk_dir: str = Field(
        "",
        description="folder to which KV blocks go that the cache evicts, and from which they come "
        "again, for all workers of the host; a relative one lies in the data directory; empty: "
        "they are gone. From KV a prompt can be told: keep it where prompts may lie",
    )
    kv_disk_bytes: int = Field(
        8 * 2**30,
        gt=0,
        description="of that folder, of all models; of workers that share one and have several, "
        "each keeps the folder within its own, so the least holds",
    )
    max_batched_tokens: int = Field(512, gt=0, description="token budget of one engine step")
    target_itl_ms: float = Field(
        0,
        ge=0,
        le=60_000,
        description="ms that a step aims to take at most while sequences decode, so how small the "
        "chunks of prompts beside them are; 0: twice what decoding alone takes",
    )
    max_running: int = Field(32, gt=0, description="sequences in one engine step")
    max_model_len: int = Field(0, ge=0, description="tokens; 0: the checkpoint's own limit")
    packed_dir: str = Field(
        "auto",
        description="folder in which weights, packed for the processor, are kept for all workers "
        "of the host: as much disk as the checkpoint; a relative one lies in the data directory; "
        "auto: `packed`; empty: each worker packs its own, in memory",
    )
    max_adapters: int = Field(
        16, ge=0, le=1024, description="adapters of low rank that a worker has at once; 0: none"
    )
    max_step_adapters: int = Field(
        8,
        gt=0,
        description="different ones of the requests that run at once; whose is one more waits",
    )
    max_adapter_rank: int = Field(64, gt=0, le=1024)
    threads: int = Field(
        0,
        ge=0,
        description="CPU threads of the engine process; 0: as many as it may use (affinity, "
        "cgroup quota), on a loopback divided among all models' workers on CPUs",
    )
    overlap: bool | None = Field(
        None,
        description="the next engine step is planned while one runs; unset: on a GPU. On a CPU it "
        "may pay where the engine leaves processors free, and a new request waits a step longer; "
        "excludes speculation",
    )
    speculation: Literal["auto", "off", "ngram", "draft"] = Field(
        "auto",
        description="who guesses tokens ahead, so that the model computes several of a request in "
        "a step; the output stays the same. `ngram`: what followed in the request itself where it "
        "went the same way before; `draft`: that, or where nothing did a smaller model; auto: "
        "`ngram` on a CPU whose steps do not overlap",
    )
    draft_model: str = Field(
        "",
        description="`draft`: folder of its checkpoint, of the same vocabulary; its KV blocks are "
        "part of `kv_cache_bytes`",
    )
    num_speculative_tokens: int = Field(
        5, ge=1, le=32, description="guesses of a request in a step at most: as many as pay"
    )
    prompt_lookup_min: int = Field(
        2, ge=1, description="to be guessed from, as many tokens must be the same as before"
    )
    prompt_lookup_max: int = Field(8, ge=1, description="of more that are the same nothing is made")
    transfer: Literal["auto", "grpc"] = Field(
        "auto", description="KV transport: shared memory when both workers share a host, or gRPC"
    )

    @property
    def is_spread(self) -> bool:
        """Whether ranks may be on several hosts."""
        return self.tensor_parallel > 1 and self.placement_group_strategy != "STRICT_PACK"

    @property
    def share(self) -> RayOptions:
        """What one rank takes of its Ray node, if ranks may be on several."""

        def of(amount: float) -> float:
            """As Ray counts, and all of them no more than was asked for."""
            return math.floor(amount / self.tensor_parallel * 1e4) / 1e4

        resources = {name: of(amount) for name, amount in self.ray.resources.items()}
        return RayOptions(
            num_cpus=of(self.ray.num_cpus), num_gpus=of(self.ray.num_gpus), resources=resources
        )

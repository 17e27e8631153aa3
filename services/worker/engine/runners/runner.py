"""Runs what was planned: a model, its KV cache and the sampler, on one device."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.library import Library, Unavailable, built
from services.worker.engine.adapters import Adapter
from services.worker.engine.config import EngineConfig
from services.worker.engine.grammar.library import Words
from services.worker.engine.kv.cache import KvCache, block_bytes, block_shape
from services.worker.engine.kv.groups import (
    KvGroup,
    block_layers,
    keeping_all,
    kv_groups,
    most_tokens,
    whole,
)
from services.worker.engine.models.config import ModelConfig
from services.worker.engine.models.registry import read_config
from services.worker.engine.outputs import ModelInfo
from services.worker.engine.parallel.shard import Shard
from services.worker.engine.plan import Collected, StepPlan
from services.worker.engine.process.host_memory import usable_memory

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger(__name__)

Dtype = Literal["float32", "bfloat16"]

Ticket = Any
"""What a runner's `launch` gives for its `collect`."""


class RunnerLost(Exception):
    """Nothing will be computed any more: a process that computes is gone, or hangs."""

    def __init__(self, message: str, killed: bool = False) -> None:
        """`killed`: see EngineDied."""
        super().__init__(message)
        self.killed = killed


class Runner(Protocol):
    """Holds the model and the cache, and decides nothing. Steps run in the order of their launch;
    it remembers what the last one sampled until the next is launched."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def cache(self) -> KvCache: ...

    @property
    def logit_cap(self) -> float:
        """See `ModelConfig.logit_cap`."""

    def launch(self, plan: StepPlan) -> Ticket:
        """Has a step computed behind those launched before. Where the device has threads of its
        own, this returns before it is. Running a step again writes the same places of the cache
        with the same values."""

    def sample(self, ticket: Ticket, allowed: Words) -> None:
        """Has the step launched last, whose plan has M constrained rows, go on and sample.
        allowed: [M, ceil(vocab / 32)], see kernels/cpu/native/allowed.h."""

    def head_rows(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """[len(ids), hidden]: of the matrix that makes logits of a state, as it was read."""

    def adapt(self, place: int, adapter: Adapter | None) -> None:
        """Takes an adapter into one of `info.max_adapters` places, which no step reads that runs;
        None: takes out what is there. Tokens of a plan say which place is theirs."""

    def collect(self, ticket: Ticket) -> Collected:
        """Waits for the step. Each ticket is collected once, in the order of launches; how late
        does not change the step's seconds. Of one that was to go on and sample, and did not, what
        comes means nothing. Raises what went wrong with the step."""


def make_runner(config: EngineConfig) -> Runner:
    """Loads the model. Raises UnsupportedModel, and ValueError on settings that do not fit."""
    runner = runner_of(config, Shard(read_config(config.model)))
    log.info("%s", in_words(runner.info))
    return runner


def runner_of(config: EngineConfig, shard: Shard, group: "ProcessGroup | None" = None) -> Runner:
    """Of a whole model, or of the part of a rank, which is of `group`. Raises as `make_runner`."""
    library = None if config.on_triton else _library(config, shard)
    if library is not None:
        from services.worker.engine.runners.cpu_runner import CpuRunner

        return CpuRunner(config, shard, library, group)
    from services.worker.engine.parallel.peers import Peers

    peers = Peers(shard, group)
    if config.on_triton:
        from services.worker.engine.runners.triton_runner import TritonRunner

        return TritonRunner(config, peers)
    from services.worker.engine.runners.torch_runner import TorchRunner

    return TorchRunner(config, peers)


def in_words(info: ModelInfo) -> str:
    """What runs, and what it takes, on one line."""
    kernels = f"kernels {info.kernels}, {info.dtype}, on {info.device}"
    threads = f" in {info.threads} threads" if info.device == "cpu" else ""
    pages = f", {_mib(info.huge_bytes)} in huge pages" if info.huge_bytes else ""
    workspace = "as needed" if info.workspace_bytes is None else _mib(info.workspace_bytes)
    return (
        f"{info.architecture} of {info.num_parameters:,} parameters: {kernels}{threads}; "
        f"weights {_mib(info.parameter_bytes)} in {info.weights}{pages}; "
        f"KV blocks {_mib(info.kv_bytes)} at most; workspace {workspace}"
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


def _library(config: EngineConfig, shard: Shard) -> Library | None:
    """The C++ kernels for this processor, if they can run this model, or a rank's part of it.
    Raises ValueError if they cannot but were asked for."""
    if config.device != "cpu" or config.kernels == "reference":
        return None
    settings = {"kernels": config.kernels, "quantization": config.quantization}
    asked = [f"{name} {value!r}" for name, value in settings.items() if value != "auto"]
    try:
        from services.worker.engine.runners.cpu_runner import check_fits

        check_fits(config, shard)
        found = next(iter(built()), None) if config.kernels == "auto" else config.kernels
        if found is None:
            raise Unavailable("none is built for this processor (python kernels/cpu/build.py)")
        return Library(found)
    except Unavailable as error:
        if asked:
            raise ValueError(f"{', '.join(asked)}: {error}") from error
        log.warning("the CPU kernels are not used, PyTorch is, which is slower: %s", error)
        return None


def choose_dtype(wanted: str, config: ModelConfig, device: str, has_dot: bool) -> Dtype:
    """`wanted`: a name, or "auto" (see EngineConfig.dtype)."""
    if wanted == "auto":
        narrow = device != "cpu" or has_dot
        wanted = config.checkpoint_dtype if narrow else "float32"
    return "bfloat16" if wanted == "bfloat16" else "float32"


def groups_of(config: EngineConfig, model: ModelConfig) -> tuple[KvGroup, ...]:
    return whole(model) if config.keeps_all else kv_groups(model)


def num_blocks(config: EngineConfig, model: ModelConfig, dtype: Dtype) -> int:
    """KV blocks, as many as the settings make room for. Raises ValueError if that is none, or more
    than the memory: the kernel gives pages as they are written, and would end some process then.
    `model`: of ranks the part that one of them has."""
    size = kv_bytes_per_block(config, model, dtype)
    found = config.num_blocks or config.kv_cache_bytes // size
    if found < 1:
        raise ValueError(f"kv_cache_bytes {config.kv_cache_bytes} is less than one block ({size})")
    takes = found * size * (config.ranks_beside or config.tensor_parallel)
    if config.device == "cpu" and takes > (usable := usable_memory()):
        asked = "num_blocks" if config.num_blocks else "kv_cache_bytes"
        raise ValueError(
            f"{asked} {getattr(config, asked)} needs {_mib(takes)} for KV blocks, and the "
            f"engine may use {_mib(usable)} of memory at most"
        )
    return found


def kv_bytes_per_block(config: EngineConfig, model: ModelConfig, dtype: Dtype) -> int:
    """`dtype`: in which the model computes."""
    layers = block_layers(groups_of(config, model))
    return block_bytes(model, config.block_size, stored_as(config, dtype), layers)


def stored_as(config: EngineConfig, dtype: Dtype) -> str:
    """Keys and values: one of TOKEN_BYTES. `dtype`: in which the model computes."""
    return dtype if config.kv_format == "auto" else config.kv_format


def max_model_len(config: EngineConfig, model: ModelConfig, blocks: int) -> int:
    """Tokens of prompt and output. Raises ValueError if more was asked for than there is."""
    at_once = config.max_batched_tokens * (1 + config.overlaps)
    groups = groups_of(config, model)
    if config.draft_model is not None:
        groups = keeping_all(groups)
    room = most_tokens(groups, blocks, config.block_size, at_once, model.context)
    if config.max_model_len is None:
        return room
    if config.max_model_len > model.context:
        raise ValueError(
            f"max_model_len {config.max_model_len} exceeds the model's context {model.context}"
        )
    if config.max_model_len > room:
        raise ValueError(
            f"max_model_len {config.max_model_len} exceeds the {room} tokens that {blocks} KV "
            "blocks hold"
        )
    return config.max_model_len


def describe(
    config: EngineConfig,
    model: ModelConfig,
    *,
    dtype: Dtype,
    kernels: str,
    kv_order: Literal["rows", "panels"],
    threads: int,
    num_parameters: int,
    parameter_bytes: int,
    weights: str,
    huge_bytes: int,
    workspace_bytes: int | None,
) -> ModelInfo:
    """Raises ValueError on settings that do not fit."""
    blocks = num_blocks(config, model, dtype)
    context = max_model_len(config, model, blocks)
    groups = groups_of(config, model)
    far = any(rope.is_long(context) for rope in model.ropes)
    if far:
        log.info(
            "max_model_len %d is beyond what the model was first trained for: all positions are "
            "turned by longrope's long_factor (docs/models.md)",
            context,
        )
    return ModelInfo(
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        max_model_len=context,
        eos_token_ids=model.eos_token_ids,
        dtype=dtype,
        device=config.device,
        kernels=kernels,
        threads=threads,
        num_parameters=num_parameters,
        parameter_bytes=parameter_bytes,
        weights=weights,
        huge_bytes=huge_bytes,
        workspace_bytes=workspace_bytes,
        num_blocks=blocks,
        block_size=config.block_size,
        kv_bytes_per_block=kv_bytes_per_block(config, model, dtype),
        kv_shape_per_block=block_shape(model, config.block_size, block_layers(groups)),
        kv_format=_format(stored_as(config, dtype), kv_order, groups, far),
        hidden_size=model.hidden_size,
        num_logits={"tokens": model.vocab_size, "classes": model.num_classes}.get(model.head, 0),
        generates=model.head == "tokens",
        max_adapters=config.max_adapters,
        kv_groups=groups,
    )


def _format(stored: str, order: str, groups: Sequence[KvGroup], far: bool) -> str:
    """As ModelInfo.kv_format. Of several groups, or a window, other blocks are handed over."""
    grouped = len(groups) > 1 or groups[0].window
    return f"{stored} {order}{' in groups' if grouped else ''}{' turned for long contexts' * far}"

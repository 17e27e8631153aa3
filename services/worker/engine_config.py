"""The engine's settings, of a worker's."""

from pathlib import Path
from typing import Literal

from services.common.config import Settings, WorkerSettings, is_loopback
from services.worker.engine.config import EngineConfig
from services.worker.engine.parallel.seats import Spread
from services.worker.engine.process.cores import usable_cores


def engine_config(
    settings: Settings, folder: str, digest: str = "", spread: Spread | None = None
) -> EngineConfig:
    """`folder`: of the checkpoint; `digest`: of that as it is loaded, for an engine that is to run;
    `spread`: where its ranks are. Raises ValueError on values that cannot work."""
    own = settings.worker
    _check_strategy(own)
    data_dir = settings.data_dir.resolve()
    packed_dir = Path("packed" if own.packed_dir == "auto" else own.packed_dir).expanduser()
    return EngineConfig(
        model=folder,
        dtype=own.dtype,
        quantization=own.quantization,
        kernels=own.kernels,
        kv_format=own.kv_format,
        device=own.device,
        tensor_parallel=own.tensor_parallel,
        spread=spread,
        # How many of several hosts' share one is known when they run.
        ranks_beside=None if own.placement_group_strategy == "STRICT_PACK" else 1,
        block_size=own.block_size,
        kv_cache_bytes=own.kv_cache_bytes,
        max_model_len=own.max_model_len or None,
        max_batched_tokens=own.max_batched_tokens,
        target_itl_ms=own.target_itl_ms or None,
        max_running=own.max_running,
        overlap=own.overlap,
        max_adapters=own.max_adapters,
        max_step_adapters=own.max_step_adapters,
        max_adapter_rank=own.max_adapter_rank,
        speculation=_speculation(own),
        draft_model=own.draft_model or None if own.role != "prefill" else None,
        num_speculative_tokens=own.num_speculative_tokens,
        prompt_lookup_min=own.prompt_lookup_min,
        prompt_lookup_max=own.prompt_lookup_max,
        threads=own.threads or _share(settings),
        packed_dir=str(data_dir / packed_dir) if own.packed_dir else None,
        kv_disk_dir=str(data_dir / Path(own.kv_disk_dir).expanduser()) if own.kv_disk_dir else None,
        kv_disk_bytes=own.kv_disk_bytes,
        checkpoint=digest,
    )


def _check_strategy(own: WorkerSettings) -> None:
    if own.placement_group_strategy == "STRICT_PACK":
        return
    strategy = f"placement_group_strategy {own.placement_group_strategy!r}"
    if own.tensor_parallel == 1:
        raise ValueError(f"{strategy} says where ranks are, and tensor_parallel is 1")
    if own.device != "cpu" and own.ray.num_gpus != own.tensor_parallel:
        raise ValueError(
            f"{strategy} gives each rank a GPU of its host: ray must ask for num_gpus "
            f"{own.tensor_parallel}, as many as tensor_parallel, and asks for {own.ray.num_gpus:g}"
        )


def _speculation(own: WorkerSettings) -> Literal["off", "ngram", "draft"]:
    """A prefill worker makes one token of a request, and guesses none."""
    if own.role == "prefill":
        return "off"
    if own.speculation == "auto":
        return "off" if own.device != "cpu" or own.overlap else "ngram"
    return own.speculation


def _share(settings: Settings) -> int:
    """Of the cores that this process may use. Workers that listen on the loopback are all on this
    host, of whichever model, and compute at once: two teams on the same cores wait for each other.
    Others are one to a host or a pod, whose cores are theirs."""
    here = settings.workers_on_cpus if is_loopback(settings.bind_host) else 1
    return max(1, usable_cores() // max(1, here))

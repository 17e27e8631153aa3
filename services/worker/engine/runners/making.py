"""Which runner runs a model: on the C++ kernels, on Triton's, or on PyTorch."""

import logging
from typing import TYPE_CHECKING

from kernels.cpu.library import Library, Unavailable, built
from services.worker.engine.config import EngineConfig
from services.worker.engine.models.registry import read_config
from services.worker.engine.outputs import ModelInfo
from services.worker.engine.parallel.shard import Shard
from services.worker.engine.runners.cpu_runner import CpuRunner, check_fits
from services.worker.engine.runners.runner import Runner
from services.worker.engine.sizes import mib

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger(__name__)


def make_runner(config: EngineConfig) -> Runner:
    """Loads the model. Raises UnsupportedModel, and ValueError on settings that do not fit."""
    runner = runner_of(config, Shard(read_config(config.model)))
    log.info("%s", in_words(runner.info))
    return runner


def runner_of(config: EngineConfig, shard: Shard, group: "ProcessGroup | None" = None) -> Runner:
    """Of a whole model, or of the part of a rank, which is of `group`. Raises as `make_runner`."""
    library = None if config.on_triton else _library(config, shard)
    if library is not None:
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
    pages = f", {mib(info.huge_bytes)} in huge pages" if info.huge_bytes else ""
    workspace = "as needed" if info.workspace_bytes is None else mib(info.workspace_bytes)
    return (
        f"{info.architecture} of {info.num_parameters:,} parameters: {kernels}{threads}; "
        f"weights {mib(info.parameter_bytes)} in {info.weights}{pages}; "
        f"KV blocks {mib(info.kv_bytes)} at most; workspace {workspace}"
    )


def _library(config: EngineConfig, shard: Shard) -> Library | None:
    """The C++ kernels for this processor, if they can run this model, or a rank's part of it.
    Raises ValueError if they cannot but were asked for."""
    if config.device != "cpu" or config.kernels == "reference":
        return None
    settings = {"kernels": config.kernels, "quantization": config.quantization}
    asked = [f"{name} {value!r}" for name, value in settings.items() if value != "auto"]
    try:
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

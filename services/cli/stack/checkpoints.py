"""What can be told of a checkpoint before anything starts, in a second or two and without torch."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from kernels.cpu.library import Unavailable
from services.common.checkpoints.checkpoint import is_gguf, is_hub_id, locate
from services.common.checkpoints.tokenizer_file import read_tokenizer
from services.common.config import ModelSpec, RetrievalSettings, Settings, WorkerSettings
from services.worker.engine.adapters import UnsupportedAdapter, peft
from services.worker.engine.config import EngineConfig
from services.worker.engine.formats.choice import check_on_gpu
from services.worker.engine.kv.tiers.loader import check_disk
from services.worker.engine.models.config import ModelConfig, UnsupportedModel
from services.worker.engine.models.registry import read_config
from services.worker.engine.parallel.shard import Shard, check_cut
from services.worker.engine.runners.cpu_runner import check_fits
from services.worker.engine.sizes import (
    choose_dtype,
    kv_bytes_per_block,
    max_model_len,
    num_blocks,
)
from services.worker.engine.speculation.draft_model import with_room
from services.worker.engine.weights.checkpoint import check_weights
from services.worker.engine_config import engine_config


def made_local(model: ModelSpec, settings: Settings, report: Callable[[str], None]) -> ModelSpec:
    """The model with a folder for its path, downloaded first if it is a hub id, and checked.

    Raises RuntimeError or OSError that name the model and say what is wrong. A hub's model is
    refused by its config.json and tokenizer before its weights are downloaded.
    """
    if is_hub_id(model.path) and not Path(model.path).is_dir():
        report(f"{model.name}: asking the hub for {model.path}")
        check_local(model, locate(model, weights=False), weights=False)
    folder = locate(model)
    for kind, count in sorted(check_local(model, folder, weights=True).items()):
        report(
            f"{model.name}: {count} matrices of {kind} are widened, or rounded again where "
            "--quantization says so: no format of the engine's holds their numbers"
        )
    check_engines(model, folder, settings)
    local = {name: str(Path(path).expanduser().resolve()) for name, path in model.adapters.items()}
    model = model.model_copy(update={"adapters": local})
    if is_gguf(model.path):  # each host unfolds it for itself
        return model
    return model.model_copy(update={"path": str(folder)})


def check_local(model: ModelSpec, folder: Path, *, weights: bool) -> Counter[str]:
    """Of its weights what `check_weights` tells. Raises RuntimeError or OSError when no engine
    could read it."""
    try:
        config = read_config(folder)
        _check_tokenizer(folder)
        return check_weights(folder, config) if weights else Counter()
    except UnsupportedModel as error:
        raise RuntimeError(f"model {model.name!r}: {error}") from error


def check_engines(model: ModelSpec, folder: Path, settings: Settings) -> None:
    """Raises RuntimeError when its workers' settings do not fit the checkpoint."""
    for role in model.pools:
        own = settings.of_worker(model, role)
        try:
            _check_engine(engine_config(own, str(folder)), read_config(folder))
        except ValueError as error:
            raise RuntimeError(
                f"model {model.name!r}: of PENSTOCK_WORKER__..., or of its own `worker`: {error}"
            ) from None
        _check_gpus(model, own.worker)
        for name, path in model.adapters.items():
            check_adapter(name, path, folder, own.worker)
        if len(model.adapters) > own.worker.max_adapters:
            raise RuntimeError(
                f"model {model.name!r}: {len(model.adapters)} adapters are more than max_adapters "
                f"{own.worker.max_adapters}"
            )


def _check_gpus(model: ModelSpec, worker: WorkerSettings) -> None:
    """Raises RuntimeError when a replica asks Ray for fewer than its ranks are."""
    ranks, asked = worker.tensor_parallel, worker.ray.num_gpus
    if worker.device != "cpu" and 0 < asked < ranks:
        raise RuntimeError(
            f"model {model.name!r}: its workers' ray asks for num_gpus {asked:g}, and "
            f"tensor_parallel {ranks} takes one for each rank"
        )


def check_adapter(name: str, path: str, model: Path, worker: WorkerSettings) -> None:
    """`model`: the folder of its checkpoint. Raises RuntimeError when its workers could not serve
    the adapter."""
    try:
        peft.read(Path(path).expanduser(), model, worker.max_adapter_rank)
    except (UnsupportedAdapter, UnsupportedModel) as error:
        raise RuntimeError(f"adapter {name!r}: {error}") from None


def _check_engine(config: EngineConfig, model: ModelConfig) -> None:
    """Raises ValueError on what fails on any processor: which has instructions for bfloat16, and so
    the smaller blocks, is seen only where the engine runs."""
    if config.device == "cpu" and config.kernels == "triton":
        raise ValueError("kernels 'triton' need a GPU, device is 'cpu'")
    if config.tensor_parallel > 1:
        check_cut(model, config.tensor_parallel)
    shard = Shard(model, 0, config.tensor_parallel)
    if config.quantization != "auto":
        _check_quantization(config, shard)
    model = shard.config
    config = with_room(config)
    dtype = choose_dtype(config.dtype, model, config.device, has_dot=True)
    max_model_len(config, model, num_blocks(config, model, dtype))
    check_disk(config, kv_bytes_per_block(config, model, dtype))


def _check_quantization(config: EngineConfig, shard: Shard) -> None:
    draft = config.draft_model
    models = {"": shard} | ({"draft_model: ": Shard(read_config(draft))} if draft else {})
    for whose, one in models.items():
        if config.on_triton:
            check_on_gpu(config.quantization, one)
            continue
        try:
            check_fits(config, one)
        except Unavailable as error:
            raise ValueError(f"{whose}quantization {config.quantization!r}: {error}") from None


def check_embeddings(settings: RetrievalSettings) -> None:
    """Raises RuntimeError when there cannot be such embedding models; what is wrong inside of one
    retrieval says."""
    if settings.embedding_model:  # else the built-in one
        _check_embeddings("EMBEDDING_MODEL", settings.embedding_model)
    for name, path in settings.embedders.items():
        _check_embeddings(f"EMBEDDERS, {name!r}", path)


def _check_embeddings(setting: str, name: str) -> None:
    setting, folder = f"setting PENSTOCK_RETRIEVAL__{setting}", Path(name)
    if folder.is_dir() and not (folder / "config.json").exists():
        raise RuntimeError(f"{setting}: {name} has no config.json")
    if not folder.is_dir() and not is_hub_id(name):
        raise RuntimeError(f"{setting}: there is no folder {name}")


def _check_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    if not path.exists():
        raise UnsupportedModel(f"{folder} has no tokenizer.json")
    try:
        read_tokenizer(path)
    except ValueError as error:
        raise UnsupportedModel(str(error)) from error

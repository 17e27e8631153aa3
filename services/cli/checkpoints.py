"""What can be told of a checkpoint before anything starts, in a second or two and without torch."""

from collections.abc import Callable
from pathlib import Path

from services.common.checkpoint import is_hub_id, locate
from services.common.config import ModelSpec
from services.worker.engine.model_config import UnsupportedModel, read_config
from services.worker.engine.weights import check_weights


def made_local(model: ModelSpec, report: Callable[[str], None]) -> ModelSpec:
    """The model with a folder for its path, downloaded first if it is a hub id, and checked.

    Raises RuntimeError or OSError that name the model and say what is wrong. A hub's model is
    refused by its config.json and tokenizer before its weights are downloaded.
    """
    if is_hub_id(model.path) and not Path(model.path).is_dir():
        report(f"{model.name}: asking the hub for {model.path}")
        check_local(model, locate(model, weights=False), weights=False)
    folder = locate(model)
    check_local(model, folder, weights=True)
    return model.model_copy(update={"path": str(folder)})


def check_local(model: ModelSpec, folder: Path, *, weights: bool) -> None:
    """Raises RuntimeError or OSError when no engine could read it."""
    try:
        config = read_config(folder)
        _check_tokenizer(folder)
        if weights:
            check_weights(folder, config)
    except UnsupportedModel as error:
        raise RuntimeError(f"model {model.name!r}: {error}") from error


def _check_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.exists():
        raise UnsupportedModel(f"{folder} has no tokenizer.json")
    try:
        Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower kind
        raise UnsupportedModel(f"{path} cannot be read: {error}") from error

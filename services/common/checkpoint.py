"""Where a served model's files lie: a folder as given, or a Hugging Face hub id made local."""

from pathlib import Path

from services.common.config import ModelSpec, Settings

_FILES = ["*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.*"]
_WEIGHTS = ["*.safetensors"]


def locate(spec: ModelSpec, *, weights: bool = True) -> Path:
    """The checkpoint's folder, downloaded first if `spec.path` is a hub id. Blocking.

    Without `weights` only what a tokenizer needs is downloaded.
    Raises FileNotFoundError that names the model when it is neither.
    """
    folder = Path(spec.path).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or spec.path.count("/") != 1:
        raise FileNotFoundError(f"model {spec.name!r}: no folder {spec.path!r}")
    wanted = [*_FILES, *_WEIGHTS] if weights else _FILES
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(spec.path, allow_patterns=wanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise FileNotFoundError(
            f"model {spec.name!r}: {spec.path!r} is no folder, and the hub gave: {error}"
        ) from error


def chosen(settings: Settings, name: str) -> ModelSpec:
    """The served model called `name`, or the first one for an empty name.

    Raises ValueError when there is none.
    """
    for spec in settings.models:
        if name in ("", spec.name):
            return spec
    served = ", ".join(spec.name for spec in settings.models) or "none"
    raise ValueError(f"model {name!r} is not served here; PENSTOCK_MODELS has: {served}")

"""Where a served model's files lie: a folder as given, one that a GGUF file is unfolded to, or a
Hugging Face hub id made local."""

from hashlib import blake2b
from pathlib import Path

from services.common.checkpoints.gguf.header import UnsupportedGguf
from services.common.checkpoints.gguf.unfolded import WEIGHTS as GGUF
from services.common.checkpoints.gguf.unfolded import unfolded
from services.common.checkpoints.sampled import sampled
from services.common.config import ModelSpec, Settings

_FILES = ["*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.*"]
_TEMPLATES = "additional_chat_templates/*.jinja"
_MODULES = "[0-9]_*/config.json"  # of sentence-transformers
_WEIGHTS = ["*.safetensors"]
_HUB_TIMEOUT_S = 4.0


def locate(spec: ModelSpec, *, weights: bool = True) -> Path:
    """The checkpoint's folder, downloaded first if `spec.path` is a hub id. Blocking.

    Without `weights` only what a tokenizer needs is downloaded. Raises FileNotFoundError that names
    the model and says why, within seconds, whatever the hub does; likewise of a GGUF file that
    cannot be read.
    """
    try:
        return folder_of(spec.path, weights=weights)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"model {spec.name!r}: {error}") from error


def folder_of(path: str, *, weights: bool = True) -> Path:
    """As `locate`, for a checkpoint that has no name."""
    folder = Path(path).expanduser()
    if is_gguf(path):
        return _of_gguf(folder)
    if folder.is_dir():
        return folder
    if not is_hub_id(path):
        hub = "" if "/" in path else "; a model of the hub is written OWNER/NAME"
        raise FileNotFoundError(f"there is no folder {path}{hub}")
    return _from_hub(path, [*_FILES, *_WEIGHTS] if weights else _FILES)


def text_files(folder: Path) -> list[Path]:
    """What tokenizers read of a checkpoint: configuration, vocabulary, chat templates."""
    patterns = [*_FILES, _TEMPLATES, _MODULES]
    return sorted({path for pattern in patterns for path in folder.glob(pattern)})


def text_digest(folder: Path) -> str:
    """Tells apart what tokenizers read of checkpoints, all of each file. 16 hex digits. Raises
    OSError."""
    found = blake2b(digest_size=8)
    for path in text_files(folder):
        found.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def digest(folder: Path, quantization: str = "auto") -> str:
    """Tells checkpoints apart, in well under a second whatever their size: of what tokenizers read
    all, of the weights their names, sizes and pieces all over each file, headers included. Training
    changes every weight; it is not proof against who forges one. `quantization`: what weights are
    rounded to when they are loaded; "auto": they are not. 16 hex digits. Raises OSError.
    """
    found = blake2b(text_digest(folder).encode(), digest_size=8)
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob(GGUF)]):
        found.update(sampled(path))
    if quantization != "auto":
        found.update(quantization.encode())
    return found.hexdigest()


def is_hub_id(path: str) -> bool:
    """Whether it is written like one: "owner/name"."""
    written = path.count("/") == 1 and path[0] not in "/.~" and not path.endswith("/")
    return written and not is_gguf(path)


def is_gguf(path: str) -> bool:
    return path.lower().endswith(".gguf")


def _of_gguf(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        return unfolded(path)
    except (UnsupportedGguf, OSError) as error:
        raise FileNotFoundError(str(error)) from error


def _from_hub(path: str, wanted: list[str]) -> Path:
    """The hub is asked with a deadline first, which downloading has not; without an answer a copy
    that was downloaded before does."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    def failed(why: str) -> FileNotFoundError:
        return FileNotFoundError(f"there is no folder {path}, and {why}")

    try:
        revision = HfApi().model_info(path, timeout=_HUB_TIMEOUT_S).sha
        return Path(snapshot_download(path, revision=revision, allow_patterns=wanted))
    except GatedRepoError:
        raise failed("the hub's model of this name asks for HF_TOKEN and its terms") from None
    except RepositoryNotFoundError:
        raise failed("the hub has no model of this name, or a private one (HF_TOKEN)") from None
    except HFValidationError as error:
        raise failed(f"it is no hub id: {error}") from None
    except Exception as error:  # its client lets its HTTP library's errors through
        away = (str(error) or type(error).__name__).splitlines()[0]
    try:
        return Path(snapshot_download(path, local_files_only=True))
    except LocalEntryNotFoundError:
        raise failed(f"the hub gave no answer ({away})") from None


def chosen(settings: Settings, name: str) -> ModelSpec:
    """The served model called `name`, or the first one for an empty name.

    Raises ValueError when there is none.
    """
    for spec in settings.models:
        if name in ("", spec.name):
            return spec
    served = ", ".join(spec.name for spec in settings.models) or "none"
    raise ValueError(f"model {name!r} is not served here; PENSTOCK_MODELS has: {served}")

"""A checkpoint, opened: its files and the model's tensors in them, checked by headers alone."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from services.common.checkpoints.gguf.unfolded import WEIGHTS as GGUF
from services.common.checkpoints.sampled import sampled
from services.worker.engine.formats import gguf, safetensors
from services.worker.engine.formats.quantized import put_together
from services.worker.engine.formats.stored import FLOATS, Plain, Shape, Stored
from services.worker.engine.models.config import ModelConfig, UnsupportedModel
from services.worker.engine.weights.weights import shapes, unused


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An open one."""

    paths: list[Path]
    fingerprint: str
    """Of its files as they were before the first was opened."""
    tensors: dict[str, Stored]
    """All that the model needs, by name."""

    def check_unchanged(self) -> None:
        """To be asked once all is read: what was read may be of either, before and after a change.
        Raises UnsupportedModel."""
        if _fingerprint(self.paths) != self.fingerprint:
            raise UnsupportedModel(
                f"{self.paths[0].parent}: the checkpoint was changed while it was read"
            )


@contextmanager
def open_checkpoint(directory: str | Path, config: ModelConfig) -> Iterator[Checkpoint]:
    """Raises UnsupportedModel when a file is missing or broken, or when tensors are missing,
    unknown or of a wrong shape."""
    folder = Path(directory)
    single = folder / GGUF
    paths = [single] if single.exists() else safetensors.files_of(folder)
    if not single.exists():
        for path in paths:
            safetensors.check_whole(path)
    fingerprint = _fingerprint(paths)
    with ExitStack() as files:
        opened = [files.enter_context(_open(path)) for path in paths]
        if paths == [single]:
            found = gguf.tensors_of(opened[0], gguf.header_of(single), config)
        else:
            found = dict(chain.from_iterable(map(safetensors.tensors_of, opened)))
        found = {name: stored for name, stored in found.items() if not unused(name, config)}
        wanted = shapes(config)
        if config.scheme.method:
            found = put_together(folder, found, wanted, config.scheme)
        yield Checkpoint(paths, fingerprint, _checked(folder, found, wanted))


def _checked(
    folder: Path, found: dict[str, Stored], wanted: Mapping[str, Shape]
) -> dict[str, Stored]:
    """What the model needs, and no more. Raises UnsupportedModel."""
    for name, stored in found.items():
        place = f"{folder}: tensor {name}"
        if name not in wanted:
            raise UnsupportedModel(f"{place} has no place in the model")
        if stored.shape != wanted[name]:
            raise UnsupportedModel(
                f"{place} is {list(stored.shape)}, config.json makes it {list(wanted[name])}"
            )
        if isinstance(stored, Plain) and stored.dtype not in FLOATS:
            raise UnsupportedModel(f"{place} is {stored.dtype}, which is not supported")
    missing = sorted(wanted.keys() - found.keys())
    if missing:
        raise UnsupportedModel(f"{folder}: {len(missing)} tensors are missing, first {missing[0]}")
    return found


def check_weights(directory: str | Path, config: ModelConfig) -> Counter[str]:
    """How many matrices of few bits no format of the engine's holds, by kind: they are widened or
    rounded again. Raises UnsupportedModel as `open_checkpoint` does."""
    with open_checkpoint(directory, config) as found:
        tensors = found.tensors.values()
        return Counter(one.kind for one in tensors if one.is_quantized and not one.held)


def _fingerprint(paths: Iterable[Path]) -> str:
    """Another one when any of the files is: also of the times of their last change, though these
    alone do not do, since copies and images may have any. Raises UnsupportedModel."""
    found = sha256()
    for path in paths:
        try:
            found.update(f"{path.stat().st_mtime_ns} {sampled(path).hex()}\n".encode())
        except OSError as error:
            raise UnsupportedModel(f"{path}: {error}") from error
    return found.hexdigest()


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb", buffering=0)
    except OSError as error:
        raise UnsupportedModel(f"{path}: {error}") from error

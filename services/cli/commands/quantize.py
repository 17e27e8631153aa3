"""`penstock quantize`: a checkpoint written again with weights of fewer bits
(docs/quantization.md)."""

import argparse
import shutil
import tempfile
from pathlib import Path

from services.common.checkpoints.checkpoint import folder_of, text_files
from services.worker.engine.formats.safetensors import INDEX
from services.worker.engine.formats.writing import write_quantized
from services.worker.engine.models.config import UnsupportedModel


def main(arguments: argparse.Namespace) -> int:
    to: Path = arguments.out.expanduser()
    if to.exists():
        raise ValueError(f"OUT: {to} is there already")
    if not to.parent.is_dir():
        raise ValueError(f"OUT: there is no folder {to.parent}")
    try:
        folder = folder_of(arguments.model)
    except FileNotFoundError as error:
        raise ValueError(f"MODEL: {error}") from error
    try:
        making = Path(tempfile.mkdtemp(prefix=f".{to.name}-", dir=to.parent))
    except OSError as error:
        raise ValueError(
            f"OUT: nothing can be written into {to.parent}: {error.strerror}"
        ) from error
    try:
        changed = write_quantized(folder, making, arguments.format)
        for path in text_files(folder):
            copy = making / path.relative_to(folder)
            if not copy.exists() and path.name != INDEX:
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
        making.chmod(0o755)
        making.rename(to)
    except UnsupportedModel as error:
        raise ValueError(f"MODEL: {error}") from error
    except OSError as error:
        raise RuntimeError(f"{to} is not written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(making, ignore_errors=True)
    for words, count in sorted(changed.items()):
        print(f"{count} {words}")
    size = (to / "model.safetensors").stat().st_size
    print(f"{to}: {size / 2**20:,.0f} MiB of weights, matrices {arguments.format}")
    return 0

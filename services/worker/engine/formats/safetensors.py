"""Safetensors files of a Hugging Face checkpoint."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError, safe_open

from services.worker.engine.formats.stored import TYPES, Plain, Stored
from services.worker.engine.models.config import UnsupportedModel

INDEX = "model.safetensors.index.json"
_BODY = ("embed_tokens.", "layers.", "norm.")


def files_of(folder: Path) -> list[Path]:
    """Raises UnsupportedModel."""
    index = folder / INDEX
    if index.exists():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            raise UnsupportedModel(f"{index} cannot be read: {error!r}") from error
        for name in names:  # of a file beside it: an index that was downloaded names no other
            if not isinstance(name, str) or not name or {"/", "\0"} & set(name):
                raise UnsupportedModel(f"{index}: weight_map names {name!r}, which is no file here")
        return [folder / name for name in sorted(names)]
    single = folder / "model.safetensors"
    if not single.exists():
        raise UnsupportedModel(f"{folder}: neither model.safetensors nor its index.json is there")
    return [single]


def check_whole(path: Path) -> None:
    """Opening compares the file's length with its header. Raises UnsupportedModel."""
    try:
        with safe_open(path, framework="numpy"):
            pass
    except FileNotFoundError:
        raise UnsupportedModel(f"{path} is missing") from None
    except (OSError, SafetensorError) as error:
        raise UnsupportedModel(f"{path}: broken, or cut short: {error}") from error


def tensors_of(file: BinaryIO) -> Iterator[tuple[str, Stored]]:
    """By the names that those of a whole model have. Of a file that was checked: the header's size
    in 8 bytes, the header as JSON, the data. Raises UnsupportedModel."""
    start = 8 + int.from_bytes(file.read(8), "little")
    for name, about in json.loads(file.read(start - 8)).items():
        if name == "__metadata__":
            continue
        if about["dtype"] not in TYPES:
            raise UnsupportedModel(
                f"{file.name}: tensor {name[:200]} is {about['dtype']}, which is not supported"
            )
        begin, _ = about["data_offsets"]
        yield in_full(name), Plain(file, start + begin, tuple(about["shape"]), about["dtype"])


def in_full(name: str) -> str:
    """As in a checkpoint of the whole model: one of its body alone leaves the beginning out."""
    return f"model.{name}" if name.startswith(_BODY) else name

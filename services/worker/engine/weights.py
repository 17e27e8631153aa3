"""A checkpoint's safetensors, checked against config.json by their headers alone.

Takes milliseconds whatever the model's size and imports no torch, so that what starts an engine can
ask before it starts anything.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from services.worker.engine.model_config import ModelConfig, UnsupportedModel
from services.worker.engine.models.registry import build_model

Shape = tuple[int, ...]
_DTYPES = ("F64", "F32", "F16", "BF16")
_BODY = ("embed_tokens.", "layers.", "norm.")


def check_weights(directory: str | Path, config: ModelConfig) -> list[Path]:
    """The files that hold the model. Raises UnsupportedModel when one is missing or broken, or when
    tensors are missing, unknown or of a wrong shape.
    """
    folder = Path(directory)
    files = _files(folder)
    wanted = shapes(config)
    found = set()
    for path in files:
        for name, shape, dtype in _headers(path):
            if unused(name, config):
                continue
            if name not in wanted:
                raise UnsupportedModel(f"{path}: tensor {name} has no place in the model")
            if shape != wanted[name]:
                raise UnsupportedModel(
                    f"{path}: tensor {name} is {list(shape)}, "
                    f"config.json makes it {list(wanted[name])}"
                )
            if dtype not in _DTYPES:
                raise UnsupportedModel(f"{path}: tensor {name} is {dtype}, which is not supported")
            found.add(name)
    missing = sorted(wanted.keys() - found)
    if missing:
        raise UnsupportedModel(f"{folder}: {len(missing)} tensors are missing, first {missing[0]}")
    return files


def unused(name: str, config: ModelConfig) -> bool:
    """Whether the checkpoint's tensor follows from others, or from nothing that is computed: a tied
    head, one of a model that makes no tokens, or the frequencies that old checkpoints carry."""
    no_head = config.tie_word_embeddings or config.head != "tokens"
    return (no_head and name == "lm_head.weight") or name.endswith("rotary_emb.inv_freq")


def in_full(name: str) -> str:
    """As in a checkpoint of the whole model: one of its body alone leaves the beginning out."""
    return f"model.{name}" if name.startswith(_BODY) else name


def shapes(config: ModelConfig) -> dict[str, Shape]:
    """Of every tensor that the model is read from, by name."""
    wanted = _Wanted()
    build_model(config, wanted)
    return wanted.shapes


class _Wanted:
    """Gives a model nothing, and remembers what it asked for."""

    def __init__(self) -> None:
        self.shapes: dict[str, Shape] = {}

    def table(self, name: str, rows: int, width: int) -> None:
        self.shapes[f"{name}.weight"] = (rows, width)

    def vector(self, name: str, size: int, plus: float = 0.0) -> None:
        self.shapes[f"{name}.weight"] = (size,)

    def matrix(self, layers: Mapping[str, int], width: int, bias: bool = False) -> None:
        for name, size in layers.items():
            self.shapes[f"{name}.weight"] = (size, width)
            if bias:
                self.shapes[f"{name}.bias"] = (size,)


def _headers(path: Path) -> Iterator[tuple[str, Shape, str]]:
    """Name, shape and dtype of each tensor; opening compares the file's length with them."""
    try:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                tensor = file.get_slice(name)
                yield in_full(name), tuple(tensor.get_shape()), tensor.get_dtype()
    except FileNotFoundError:
        raise UnsupportedModel(f"{path} is missing") from None
    except (OSError, SafetensorError) as error:
        raise UnsupportedModel(f"{path}: broken, or cut short: {error}") from error


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
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

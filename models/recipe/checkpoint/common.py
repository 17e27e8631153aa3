"""What the scripts beside share: a state of the training as it is kept here, and its parts."""

import sys
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from models.recipe import export
from models.recipe.lessons import Source
from models.recipe.make import SHAPES
from models.recipe.model import Llama
from models.recipe.reader import Reader
from models.recipe.swaps import Swaps

HERE = Path(__file__).parent
tokenizer = Tokenizer.from_file(str(HERE / "tokenizer.json"))
torch.set_num_threads(1)


def unpacked(path: Path) -> dict[str, Tensor]:
    """Weights of a `.npz`: matrices of int8 with a scale a row, but for the last layer's, whose
    columns for codes are large, and vectors.
    """
    kept = np.load(path)
    found = {}
    for name in kept.files:
        if name.endswith("/q"):
            scale = kept[name[:-1] + "s"].astype(np.float32)[:, None]
            found[name[:-2]] = torch.from_numpy(kept[name].astype(np.float32) * scale)
        elif not name.endswith("/s"):
            found[name] = torch.from_numpy(kept[name].astype(np.float32))
    return found


def pack(state: dict[str, Tensor], path: Path) -> None:
    kept = {}
    for name, value in state.items():
        x = value.float().numpy()
        if x.ndim == 2 and "layers.6." not in name:
            scale = np.maximum(np.abs(x).max(1), 1e-8) / 127
            kept[f"{name}/q"] = np.round(x / scale[:, None]).astype(np.int8)
            kept[f"{name}/s"] = scale.astype(np.float32)
        else:
            kept[name] = x if x.ndim == 1 else x.astype(np.float16)
    np.savez_compressed(path, **kept)


def llama(path: Path, which: str = "demo") -> Llama:
    """From a state, or from a folder of weights as they ship."""
    if path.is_dir():
        return export.load(path)[0]
    model = Llama(SHAPES[which])
    packed = path.suffix == ".npz"
    state = unpacked(path) if packed else torch.load(path, weights_only=True)["model"]
    model.load_state_dict(state)
    return model


def reader() -> Reader:
    found = Reader(tokenizer)
    found.load_state_dict(unpacked(HERE / "reader.npz"), strict=False)  # but for words
    return found


def source(seed: str) -> Source:
    return Source(tokenizer, Swaps.of(tokenizer), seed, SHAPES["demo"].context)


def say(*words: object) -> None:
    print(time.strftime("%H:%M:%S"), *words, flush=True)


if __name__ == "__main__":  # common.py STATE.pt OUT.npz
    pack(torch.load(sys.argv[1], weights_only=True)["model"], Path(sys.argv[2]))

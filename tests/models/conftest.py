"""What the recipe's tests share."""

import pytest
from tokenizers import Tokenizer

from models.recipe import tokenizer as bpe


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The recipe's; it takes ten seconds."""
    return bpe.train()

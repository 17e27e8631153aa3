"""A checkpoint's tokenizer.json, which may be any file's content."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def read_tokenizer(path: Path) -> "Tokenizer":
    """Raises ValueError that names the file."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library's is no Exception
        raise ValueError(f"{path} cannot be read: {error}") from error

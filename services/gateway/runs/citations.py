"""From the marks in an answer ([1], [2], …) to OpenAI's annotations."""

import re
from collections.abc import Sequence
from typing import Any

from protos.common_pb2 import Passage

_MARK = re.compile(r"\[(\d{1,3})\]")


_HEADINGS = " › "  # retrieval titles a passage "document › heading › …"


def filename(passage: Passage) -> str:
    """Of the passage's document: its title without the headings above the passage."""
    return passage.title.split(_HEADINGS, 1)[0]


def annotations(text: str, passages: Sequence[Passage]) -> list[dict[str, Any]]:
    """One `file_citation` for each mark in `text` that names one of `passages`, from 1 on.

    `index` is the character of the mark's bracket. A passage that the client brought itself has no
    file: its `file_id` is null.
    """
    found = []
    for mark in _MARK.finditer(text):
        number = int(mark.group(1))
        if 1 <= number <= len(passages):
            passage = passages[number - 1]
            found.append(
                {
                    "type": "file_citation",
                    "index": mark.start(),
                    "file_id": passage.source_id or None,
                    "filename": filename(passage),
                }
            )
    return found

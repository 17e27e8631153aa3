"""JSON and JSON Lines: records as rows, anything else as the paths of its values, one a line."""

from collections.abc import Iterator
from typing import Any

import orjson

from protos.retrieval_pb2 import Section
from services.retrieval.documents.chunks import Limits, RefusedError
from services.retrieval.documents.draft import Draft
from services.retrieval.documents.loaders.decoding import decode
from services.retrieval.documents.loaders.rows import Rows


def load(content: bytes, limits: Limits) -> tuple[list[Section], str]:
    text = decode(content, limits.chars)
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        return _lines(text, error, limits), ""
    if isinstance(value, list) and all(isinstance(one, dict) for one in value):
        return _records(enumerate(value, 1), limits), ""
    draft = Draft(limits.chars)
    for path, told in _values(value):
        draft.flow(f"{path}: {told}\n" if path else f"{told}\n")
    return draft.sections(), ""


def _lines(text: str, whole: orjson.JSONDecodeError, limits: Limits) -> list[Section]:
    def records() -> Iterator[tuple[int, Any]]:
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                try:
                    yield number, orjson.loads(line)
                except orjson.JSONDecodeError as own:
                    # Of what is no JSON Lines either, what is wrong with it as one value.
                    error, before = (whole, 0) if number == 1 else (own, number - 1)
                    why = f"is not JSON: {error.msg} (line {error.lineno + before})"
                    raise RefusedError(why) from None

    return _records(records(), limits)


def _records(records: Iterator[tuple[int, Any]], limits: Limits) -> list[Section]:
    rows = Rows(limits.chars)
    for number, record in records:
        rows.add(number, _values(record))
    return rows.sections()


def _values(value: Any) -> Iterator[tuple[str, str]]:
    """The path and the text of each value, in order: ("orders[0].town", "Kiel")."""
    waiting = [("", value)]
    while waiting:
        path, one = waiting.pop()
        if isinstance(one, dict):
            inner = [(f"{path}.{name}" if path else name, v) for name, v in one.items()]
        elif isinstance(one, list):
            inner = [(f"{path}[{at}]", v) for at, v in enumerate(one)]
        else:
            if one is not None and one != "":
                yield path, one if isinstance(one, str) else orjson.dumps(one).decode()
            continue
        waiting.extend(reversed(inner))

"""What a client that was made by generator can call, read from its sources."""

import ast
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

_VERBS = {"_get": "GET", "_get_api_list": "GET", "_post": "POST", "_put": "PUT", "_patch": "PATCH",
          "_delete": "DELETE"}  # fmt: skip


class Call(NamedTuple):
    method: str
    path: str  # below the base address, with "x" for each id, without a query


def surface(package: ModuleType) -> list[Call]:
    """All calls of a client's resources."""
    assert package.__file__ is not None
    folder = Path(package.__file__).parent / "resources"
    found = {call for file in folder.rglob("*.py") for call in _calls(ast.parse(file.read_text()))}
    return sorted(found)


def _calls(tree: ast.AST) -> Iterator[Call]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        verb = _VERBS.get(node.func.attr)
        for more in node.keywords:  # lists that are asked for by POST
            if more.arg == "method" and isinstance(more.value, ast.Constant):
                verb = str(more.value.value).upper()
        if verb is not None and node.args and (path := _path(node.args[0])) is not None:
            yield Call(verb, path.partition("?")[0])


def _path(node: ast.expr) -> str | None:
    if isinstance(node, ast.Call) and node.args:  # of a template: its ids are quoted
        node = node.args[0]
        if not isinstance(node, ast.Constant):  # an address that the server told
            return None
        pieces = str(node.value).split("{")
        return pieces[0] + "".join("x" + piece.partition("}")[2] for piece in pieces[1:])
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "x" for part in node.values
        )
    return None

"""`python -m services.common.settings_doc`: docs/settings.md, from services/common/config/."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AliasChoices, BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from services.common.config import Section, Settings

DOCUMENT = Path(__file__).parents[2] / "docs" / "settings.md"
_HEAD = """# Settings

Environment variables, read when a service starts. Lists are JSON; `_s` is seconds. This page is
made by `make docs` from services/common/config/.
"""


def document() -> str:
    """The whole file."""
    plain: list[tuple[str, FieldInfo]] = []
    sections: list[tuple[str, FieldInfo]] = []
    for name, field in Settings.model_fields.items():
        (sections if _is_section(field.annotation) else plain).append((name, field))
    parts = [_HEAD, _table("General", ((_names(name, field), field) for name, field in plain))]
    for name, field in sections:
        prefix = f"PENSTOCK_{name.upper()}__"
        section: Any = field.annotation
        own = section.model_fields.items()
        parts.append(_table(name.capitalize(), (([prefix + n.upper()], f) for n, f in own)))
    own_fields: list[FieldInfo] = [field for _, field in plain]
    for _, field in sections:
        of_section: Any = field.annotation
        own_fields += of_section.model_fields.values()
    for kind in dict.fromkeys(_objects(own_fields, sections)):
        told = " ".join((kind.__doc__ or "").split())
        title = f"An object of {kind.__name__}"
        parts.append(_table(title, (([n], f) for n, f in kind.model_fields.items()), told))
    return "\n".join(parts)


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _names(name: str, field: FieldInfo) -> list[str]:
    alias = field.validation_alias
    if isinstance(alias, AliasChoices):
        return [str(choice) for choice in alias.choices]
    return [f"PENSTOCK_{name.upper()}"]


def _objects(fields: Any, sections: Any) -> Iterator[type[BaseModel]]:
    """What fields take or hold that is an object, but for the sections themselves."""
    known = [field.annotation for _, field in sections]
    for field in fields:
        for kind in (field.annotation, *get_args(field.annotation)):
            if _is_section(kind) and kind not in known:
                yield kind
                yield from _objects(kind.model_fields.values(), sections)


def _table(title: str, rows: Any, told: str = "") -> str:
    lines = [f"## {title}", ""] + ([told, ""] if told else [])
    lines += ["| name | takes | default | |", "| --- | --- | --- | --- |"]
    for names, field in rows:
        name = " or ".join(f"`{n}`" for n in names)
        takes, default = _takes(field), _default(field)
        lines.append(f"| {name} | {takes} | {default} | {field.description or ''} |")
    return "\n".join([*lines, ""])


def _takes(field: FieldInfo) -> str:
    bounds = []
    for constraint in field.metadata:
        for attribute, words in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
            if (bound := getattr(constraint, attribute, None)) is not None:
                bounds.append(f"{words} {bound}")
    return " ".join([_kind(field.annotation), ", ".join(bounds)]).strip()


def _kind(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        return _kind(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) in (Union, UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
        return " or ".join(map(_kind, kinds))
    if get_origin(annotation) is dict:
        return f"object of {_kind(get_args(annotation)[1])}"
    if get_origin(annotation) is list:
        return f"list of {_kind(get_args(annotation)[0])}"
    words = {str: "text", int: "whole number", float: "number", bool: "`true`, `false`"}
    words |= {Path: "path", SecretStr: "secret text"}
    return words.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "needed"
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if value in (None, "", [], {}) or isinstance(value, BaseModel):
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, list):
        return ", ".join(f"`{item}`" for item in value)
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


if __name__ == "__main__":
    DOCUMENT.write_text(document())
    print(DOCUMENT, file=sys.stderr)

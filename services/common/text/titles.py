"""Titles of passages: the document's name and the headings above it, on one line."""

import re
from collections.abc import Iterable

_BETWEEN = " › "
# In a name, which may hold what stands between: as it is, and as titles have it.
_OWN, _DOUBLED = " ›", " ››"
_CONTROL = r"\x00-\x1f\x7f-\x9f\u2028\u2029"
_CONTROLS = re.compile(f"[{_CONTROL}]")
_GAPS = re.compile(rf"[\s{_CONTROL}]+")


def titled(name: str, headings: Iterable[str]) -> str:
    """ "Document › heading › …"; `name_in` finds the document's name again."""
    return _BETWEEN.join(filter(None, (name.replace(_OWN, _DOUBLED), *headings)))


def name_in(title: str) -> str:
    return title.split(_BETWEEN, 1)[0].replace(_DOUBLED, _OWN)


def is_plain(name: str) -> bool:
    """It holds no control characters, nor anything else that ends a line."""
    return not _CONTROLS.search(name)


def one_line(title: str) -> str:
    """Whatever it holds: a passage begins with its title, and a line below that would be text."""
    return _GAPS.sub(" ", title).strip()

"""The sections that a document's Markdown headings open, by CommonMark's rules.

Only block structure is parsed, which takes time in proportion to the text whatever stands in it.
A heading within a list or a quotation belongs to that, and opens nothing.
"""

import re
from collections.abc import Iterator
from itertools import pairwise

from markdown_it import MarkdownIt
from mdit_py_plugins.front_matter import front_matter_plugin

# The headings above a chunk are stored, embedded and shown with it, so they have to be short.
MAX_HEADING_CHARS = 120
MAX_PATH_CHARS = 300

_LINE_END = re.compile(r"\r\n?|\n")  # as the parser counts lines


def sections(text: str) -> Iterator[tuple[list[str], int, int]]:
    """(headings from the outermost, start, end) in characters, tiling the text.

    A heading without a body of its own opens the section of the heading that follows. A long
    heading is cut; of a long path the innermost headings stay.
    """
    lines = [0, *(end.end() for end in _LINE_END.finditer(text)), len(text)]
    path: list[tuple[int, str]] = []
    start, body_from = 0, 0  # a section that has nothing after `body_from` goes on
    for level, heading, first, after in _headings(text):
        if text[body_from : lines[first]].strip():
            yield names(path), start, lines[first]
            start = lines[first]
        path = [(above, name) for above, name in path if above < level]
        path.append((level, heading))
        body_from = lines[after]
    yield names(path), start, len(text)


def _headings(text: str) -> Iterator[tuple[int, str, int, int]]:
    """(level, text, first line, the line after it)."""
    tokens = _parser().parse(text)
    for opening, content in pairwise(tokens):
        if opening.type == "heading_open" and opening.level == 0 and opening.map:
            first, after = opening.map
            yield int(opening.tag[1:]), short(content.content), first, after


def _parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark").use(front_matter_plugin)
    return parser.disable(["inline", "text_join", "reference"])


def short(heading: str) -> str:
    """On one line. The end of a long one is cut."""
    heading = " ".join(heading[: 4 * MAX_HEADING_CHARS].split())
    if len(heading) <= MAX_HEADING_CHARS:
        return heading
    return heading[: MAX_HEADING_CHARS - 1].rstrip() + "…"


def names(path: list[tuple[int, str]]) -> list[str]:
    names = [name for _, name in path if name]
    while sum(map(len, names)) > MAX_PATH_CHARS:
        del names[0]
    return names

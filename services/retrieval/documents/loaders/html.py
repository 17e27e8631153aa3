"""HTML: what of a page is its text, with headings, lists, tables, and the words of its links."""

import re
from collections.abc import Iterator

from selectolax.lexbor import LexborHTMLParser, LexborNode

from protos.retrieval_pb2 import Section
from services.retrieval.documents.chunks import Limits, RefusedError
from services.retrieval.documents.draft import Draft
from services.retrieval.documents.loaders.decoding import decode

_HEADINGS = {f"h{level}": level for level in range(1, 7)}
_DROPPED = {
    *("script", "style", "noscript", "template", "head", "nav", "dialog"),
    *("iframe", "object", "svg", "math", "canvas", "audio", "video"),
    *("form", "button", "select", "input", "textarea"),
}
_INLINE = {
    *("a", "abbr", "b", "bdi", "bdo", "big", "cite", "code", "data", "del", "dfn", "em", "font"),
    *("i", "ins", "kbd", "label", "mark", "q", "s", "samp", "small", "span", "strike", "strong"),
    *("sub", "sup", "time", "tt", "u", "var", "wbr"),
}
_DECLARED = re.compile(rb"<meta[^>]{0,200}?charset=[\"']?([\w-]{1,40})", re.I)
_DECLARED_WITHIN = 2048


def load(content: bytes, limits: Limits) -> tuple[list[Section], str]:
    declared = _DECLARED.search(content[:_DECLARED_WITHIN])
    text = decode(content, 4 * limits.chars, declared[1].decode() if declared else "")
    page = LexborHTMLParser(text)
    body = page.body
    if body is None:
        raise RefusedError("has no text")
    draft = Draft(limits.chars)
    title = page.css_first("head > title")
    if title is not None:
        draft.heading(0, title.text())
    mains = page.css("main, [role=main]")
    _Page(draft).walk(mains[0] if len(mains) == 1 else body)
    return draft.sections(), ""


class _Page:
    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._line: list[str] = []  # of the paragraph that is open
        self._is_item = False

    def walk(self, root: LexborNode) -> None:
        """With a stack of its own: pages nest as deep as they like."""
        waiting: list[tuple[LexborNode, bool]] = [(root, False)]
        while waiting:
            node, is_left = waiting.pop()
            if is_left:
                self._end()
            elif node.is_text_node:
                self._line.append(node.text_content or "")
            elif not _is_dropped(node) and self._opens(node):
                if node.tag not in _INLINE:
                    waiting.append((node, True))
                waiting.extend((child, False) for child in reversed(list(_children(node))))
        self._end()

    def _opens(self, node: LexborNode) -> bool:
        """Whether what is in it is to be gone through."""
        tag = node.tag
        if tag == "br":
            self._line.append("\n")
            return False
        if tag not in _INLINE:
            self._end()
        if tag in _HEADINGS:
            self._draft.heading(_HEADINGS[tag], _text(node))
            return False
        if tag == "pre":
            self._draft.paragraph(_text(node))
            return False
        if tag == "table" and (rows := _rows(node)):
            self._draft.table(rows)
            return False
        self._is_item = tag == "li" or (self._is_item and tag in _INLINE)
        return True

    def _end(self) -> None:
        """Of a paragraph, or of a list's item."""
        lines = (" ".join(line.split()) for line in "".join(self._line).split("\n"))
        text = "\n".join(filter(None, lines))
        self._line = []
        if self._is_item:
            self._draft.item(text)
        else:
            self._draft.paragraph(text)
        self._is_item = self._is_item and not text


def _rows(table: LexborNode) -> list[list[str]]:
    """Nothing of a table that is there for the layout: of one column, or with tables in it."""
    if table.css_first("table table, table h1, table h2, table h3") is not None:
        return []
    rows = [
        [_text(cell) for cell in _children(row) if cell.tag in ("td", "th")]
        for row in table.css("tr")
    ]
    rows = [row for row in rows if any(cell.strip() for cell in row)]
    return rows if max(map(len, rows), default=0) > 1 else []


def _text(node: LexborNode) -> str:
    parts: list[str] = []
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if one.is_text_node:
            parts.append(one.text_content or "")
        elif not _is_dropped(one):
            if one.tag == "br" or (one.tag not in _INLINE and parts):
                parts.append("\n")
            waiting.extend(reversed(list(_children(one))))
    return "".join(parts)


def _children(node: LexborNode) -> Iterator[LexborNode]:
    child = node.first_child
    while child is not None:
        yield child
        child = child.next


def _is_dropped(node: LexborNode) -> bool:
    if node.is_comment_node or node.tag in _DROPPED:
        return True
    attributes = node.attributes
    return "hidden" in attributes or attributes.get("aria-hidden") == "true"

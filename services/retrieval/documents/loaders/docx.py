"""Word documents: headings, paragraphs, lists and tables in their order, and pages as Word last
laid them out, where it noted that."""

import io
from collections.abc import Iterator

from docx import Document
from docx.table import Table, _Cell
from docx.text.paragraph import Paragraph

from protos.retrieval_pb2 import Section
from services.retrieval.documents.chunks import Limits
from services.retrieval.documents.draft import Draft
from services.retrieval.documents.loaders import archives

_BREAKS = ".//w:lastRenderedPageBreak"


def load(content: bytes, limits: Limits) -> tuple[list[Section], str]:
    archives.check(content, limits)
    document = Document(io.BytesIO(content))
    names = {style.style_id: style.name or "" for style in document.styles}
    pages = _Pages(Draft(limits.chars), bool(document.element.body.xpath(_BREAKS)))
    for block in document.iter_inner_content():
        if isinstance(block, Table):
            pages.draft.table(_rows(block))
            pages.turn(len(block._element.xpath(_BREAKS)))
            continue
        breaks = block.rendered_page_breaks
        before = sum(one.preceding_paragraph_fragment is None for one in breaks)
        pages.turn(before)
        _add(pages.draft, block, names.get(block.paragraph_format.element.style or "", ""))
        pages.turn(len(breaks) - before)
    return pages.draft.sections(), ""


class _Pages:
    def __init__(self, draft: Draft, noted: bool) -> None:
        self.draft = draft
        self._page = int(noted)
        if noted:
            draft.turn(1)

    def turn(self, pages: int) -> None:
        if pages:
            self._page += pages
            self.draft.turn(self._page)


def _add(draft: Draft, paragraph: Paragraph, style: str) -> None:
    kind, _, level = style.partition(" ")
    if style == "Title":
        draft.heading(0, paragraph.text)
    elif kind == "Heading" and level.isdecimal():
        draft.heading(int(level), paragraph.text)
    elif kind == "List" or paragraph.paragraph_format.element.xpath("./w:pPr/w:numPr"):
        draft.item(paragraph.text)
    else:
        draft.paragraph(paragraph.text)


def _rows(table: Table) -> Iterator[list[str]]:
    for row in table.rows:
        seen: list[_Cell] = []
        for cell in row.cells:  # one that spans several columns is told for each of them
            if not seen or cell._tc is not seen[-1]._tc:
                seen.append(cell)
        yield [_text(cell) for cell in seen]


def _text(cell: _Cell) -> str:
    """With the tables in it, as words."""
    inner = (
        block.text if isinstance(block, Paragraph) else "; ".join(map(" ".join, _rows(block)))
        for block in cell.iter_inner_content()
    )
    return "\n".join(inner)

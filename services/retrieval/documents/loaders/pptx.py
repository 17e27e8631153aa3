"""Presentations: a section for each slide, below its title: texts, tables, and the notes."""

import io
from collections.abc import Iterable, Iterator
from typing import Any

from pptx import Presentation
from pptx.shapes.base import BaseShape
from pptx.shapes.group import GroupShape

from protos.retrieval_pb2 import Section
from services.retrieval.documents.chunks import Limits, too_large
from services.retrieval.documents.draft import Draft
from services.retrieval.documents.loaders import archives

_MOST_NESTED = 32  # groups in groups


def load(content: bytes, limits: Limits) -> tuple[list[Section], str]:
    archives.check(content, limits)
    slides = Presentation(io.BytesIO(content)).slides
    if len(slides) > limits.pages:
        raise too_large(f"has {len(slides):,} slides, more than {limits.pages:,}, the limit")
    draft = Draft(limits.chars)
    for number, slide in enumerate(slides, 1):
        draft.close()
        draft.turn(number)
        title = slide.shapes.title
        if title is not None:
            draft.heading(1, title.text_frame.text)
        for shape in _shapes(slide.shapes):
            if title is None or shape.shape_id != title.shape_id:
                _add(draft, shape)
        if slide.has_notes_slide and (notes := slide.notes_slide.notes_text_frame) is not None:
            draft.paragraph(notes.text)
    return draft.sections(), ""


def _shapes(shapes: Iterable[BaseShape], depth: int = 0) -> Iterator[BaseShape]:
    for shape in shapes:
        if not isinstance(shape, GroupShape):
            yield shape
        elif depth < _MOST_NESTED:
            yield from _shapes(shape.shapes, depth + 1)


def _add(draft: Draft, shape: Any) -> None:
    if shape.has_text_frame:
        paragraphs = [p for p in shape.text_frame.paragraphs if p.text.strip()]
        for paragraph in paragraphs:
            (draft.item if len(paragraphs) > 1 else draft.paragraph)(_line(paragraph.text))
    elif shape.has_table:
        draft.table([cell.text for cell in row.cells] for row in shape.table.rows)


def _line(text: str) -> str:
    return text.replace("\v", "\n")

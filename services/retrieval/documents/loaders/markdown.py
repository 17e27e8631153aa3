"""Markdown, and text that may be it: its headings, by CommonMark's rules."""

from protos.retrieval_pb2 import Section
from services.retrieval.documents.chunks import Limits
from services.retrieval.documents.loaders.decoding import decode
from services.retrieval.documents.sections import sections


def load(content: bytes, limits: Limits) -> tuple[list[Section], str]:
    text = decode(content, limits.chars)
    found = sections(text)
    return [Section(headings=path, text=text[start:end]) for path, start, end in found], ""

"""Text without any marks: source code, logs, settings, and what else is text."""

from protos.retrieval_pb2 import Section
from services.retrieval.documents.chunks import Limits
from services.retrieval.documents.loaders.decoding import decode


def load(content: bytes, limits: Limits) -> tuple[list[Section], str]:
    return [Section(text=decode(content, limits.chars))], ""

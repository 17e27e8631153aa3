"""Calls of tools: how each kind of model writes them. A file for each way; the first that suits the
checkpoint's chat template is taken.

    reader.py   what reads an answer, character by character
    ways.py     what a way is: a reader, and the rules that make a model write so
"""

from collections.abc import Mapping

from services.tokenizer.tool_parsers.demo import Demo
from services.tokenizer.tool_parsers.hermes import Hermes
from services.tokenizer.tool_parsers.llama3 import Llama3
from services.tokenizer.tool_parsers.mistral import Mistral
from services.tokenizer.tool_parsers.reader import CallReader, Said
from services.tokenizer.tool_parsers.ways import Way, literal, without

__all__ = ["CallReader", "Said", "Way", "literal", "way_of", "without"]

_WAYS: tuple[type[Way], ...] = (Demo, Hermes, Mistral, Llama3)


def way_of(template: str, tokens: Mapping[str, int]) -> Way | None:
    """None: the template says nothing of calls that is known here. `tokens`: ids of the
    checkpoint's added tokens, by their texts."""
    return next((way(tokens, template) for way in _WAYS if way.suits(template)), None)

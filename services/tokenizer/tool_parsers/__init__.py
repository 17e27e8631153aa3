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
from services.tokenizer.tool_parsers.pythonic import Pythonic
from services.tokenizer.tool_parsers.reader import CallReader, Said
from services.tokenizer.tool_parsers.ways import Way, without

__all__ = ["CallReader", "Said", "Way", "way_of", "without"]

_WAYS: tuple[type[Way], ...] = (Demo, Hermes, Mistral, Pythonic, Llama3)


def way_of(template: str, tokens: Mapping[str, int], name: str = "") -> Way | None:
    """The way of this name, or if empty as the template says; None: it says nothing of calls that
    is known here. `tokens`: ids of the checkpoint's added tokens, by their texts. Raises
    ValueError."""
    fits = [way for way in _WAYS if (way.name == name if name else way.suits(template))]
    if name and not fits:
        raise ValueError(f"no tool parser is {name!r}: {', '.join(way.name for way in _WAYS)}")
    return fits[0](tokens, template) if fits else None

"""A constraint as a grammar of the llguidance library.

llguidance walks an Earley parser and a lazily built lexer beside the tokens: a mask takes some ten
microseconds, whatever the vocabulary (docs/decisions/0031-structured-output.md).
"""

import json
import re
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from services.common.text.lark import literal
from services.worker.engine.grammar.library import GrammarError, Missing, State, Vocabulary
from services.worker.engine.grammar.matcher import (
    Allowance,
    ConstraintError,
    Matcher,
    Unavailable,
)
from services.worker.engine.messages import Constraint

_WHITE_SPACE = r"( |\n[ \t]{0,16})?"
"""Between JSON's parts, as its writers put it: a model that has lost its way would write nothing
else for ever, and a small one up to any bound."""
_BOUNDS = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,
    "max_lexer_states": 20_000,
    "step_max_items": 10_000,
    "max_items_in_row": 5_000,
}
"""llguidance's own bounds on a grammar, a token's work and all tokens' states, which are every
request's own. Less than it has by itself, so that no request takes more than 60 MB (300 terminals
that share their beginnings took 600 MB, and 50 ms a step); but more of the last, for objects of
hundreds of keys. Of time they bound little: 10,000 items are a millisecond, or 2 s where they are
alike. What passes one fails its request alone."""
_CUT_OFF = re.compile(r"(?<!\\)(\\\\)*\\\Z")
_TOLD = 300  # characters of why


def is_panic(error: BaseException) -> bool:
    """Of Rust code: pyo3 makes no Exception of it."""
    return type(error).__name__ == "PanicException"


class Compiler:
    """Of one checkpoint's vocabulary."""

    def __init__(self, folder: str, vocab_size: int, eos_token_ids: Seq[int]) -> None:
        """Blocking, up to seconds. Raises ConstraintError where the checkpoint's tokenizer is not
        one that llguidance reads, Unavailable where there is no such library; OSError and
        MemoryError as they are: what passes is not said of the checkpoint for ever."""
        path = Path(folder) / "tokenizer.json"
        if not path.exists():
            raise ConstraintError("the checkpoint has no tokenizer.json, which constraints need")
        try:
            self._vocabulary = Vocabulary(path.read_text(), vocab_size, eos_token_ids)
        except Missing as error:
            raise Unavailable(str(error)) from error
        except (OSError, MemoryError):
            raise
        except BaseException as error:
            if not (isinstance(error, Exception) or is_panic(error)):
                raise
            why = f"the checkpoint's tokenizer cannot be constrained: {error}"
            raise ConstraintError(why[:_TOLD]) from error

    def matcher(self, grammar: str) -> Matcher:
        """At the output's beginning, of what `grammar_of` gives. Blocking; other threads run
        meanwhile. Raises ConstraintError."""
        try:
            return Matcher(State.of(self._vocabulary, grammar, _BOUNDS), Allowance())
        except GrammarError as error:
            raise ConstraintError(str(error)) from None


def grammar_of(constraint: Constraint) -> str:
    """In llguidance's own form. Blocking: bad input makes it slow. Raises ConstraintError."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    text = constraint.text
    try:
        match constraint.kind:
            case "json_object":
                return _json_grammar('{"type": "object"}')
            case "json_schema":
                return _json_grammar(text)
            case "regex":
                if _CUT_OFF.search(text):  # which llguidance leaves out
                    raise ValueError("the expression ends within an escape")
                return str(LLMatcher.grammar_from_regex(text))
            case "choice":
                rule = " | ".join(map(literal, json.loads(text)))
                return str(LLMatcher.grammar_from_lark("start: " + rule))
            case "grammar":
                return str(LLMatcher.grammar_from_lark(any_to_lark(text)))
    except Exception as error:  # of a grammar's parser many kinds
        raise ConstraintError(f"{type(error).__name__}: {error}"[:_TOLD]) from error


def _json_grammar(schema: str) -> str:
    from llguidance import LLMatcher

    options: Any = {"whitespace_pattern": _WHITE_SPACE}
    return str(LLMatcher.grammar_from_json_schema(schema, overrides=options))

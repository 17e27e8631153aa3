"""A constraint as a grammar of the llguidance library, and where an output stands in it.

llguidance walks an Earley parser and a lazily built lexer beside the tokens: a mask takes some ten
microseconds, whatever the vocabulary (docs/decisions/0031-structured-output.md).
"""

import json
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.worker.engine.messages import Constraint

Words = NDArray[np.int32]

_WHITE_SPACE = r"( |\n[ \t]{0,16})?"
"""Between JSON's parts, as its writers put it: a model that has lost its way would write nothing
else for ever, and a small one up to any bound."""
_LEXER_FUEL = 200_000
_STEP_FUEL = 50_000
_STATES = 20_000
_ITEMS = 10_000
_ROW_ITEMS = 5_000
"""llguidance's own bounds on a grammar, a token's work and all tokens' states, which are every
request's own. Less than it has by itself, so that no request takes more than 60 MB (300 terminals
that share their beginnings took 600 MB, and 50 ms a step); but more of the last, for objects of
hundreds of keys. Of time they bound little: 10,000 items are a millisecond, or 2 s where they are
alike. What passes one fails its request alone."""
TOKEN_S = 0.05
"""Processor time that a token's mask may take. An ordinary one takes 40 µs, the first of a large
schema 3 ms."""
_SAVED_S = 0.2
_EARNED_S = 0.0005
_TOLD = 300  # characters of why


class ConstraintError(Exception):
    """The request's constraint cannot be met, or not be made; told to the client."""


class Unavailable(Exception):
    """A grammar could not be made for a reason that has nothing to do with it."""


class Allowance:
    """Processor time that all outputs of one grammar and one tenant may take: so much for each
    token, and what was saved, so that what is ambiguous, and takes longer with each token, ends
    before others wait long."""

    def __init__(self) -> None:
        self.left_s = _SAVED_S

    def earn(self, tokens: int) -> None:
        self.left_s = min(_SAVED_S, self.left_s + tokens * _EARNED_S)

    def end(self) -> None:
        """Nobody may go on."""
        self.left_s = -1e9


class Matcher:
    """Where one output stands in its grammar."""

    def __init__(self, state: Any, allowance: Allowance) -> None:
        """`state`: an LLMatcher, that nobody else advances."""
        self._state = state
        self.allowance = allowance
        self._panic = ""

    def copy(self, allowance: Allowance | None = None) -> "Matcher":
        """`allowance`: another one than this has."""
        return Matcher(self._state.deep_copy(), allowance or self.allowance)

    @property
    def ended(self) -> bool:
        """It is whole, and nothing can follow."""
        return bool(self._state.is_stopped()) and not self._state.is_error()

    def advance(self, tokens: Seq[int]) -> None:
        """Behind these tokens, which must be allowed: else the next `fill` raises."""
        for token in tokens:
            if self._over:
                return
            self.allowance.earn(1)
            self._run(self._state.consume_token, token)

    def leading(self, tokens: Seq[int]) -> int:
        """How many of them may come next, one behind the other, before the output is whole."""
        ahead = self.copy()
        for count, token in enumerate(tokens):
            if (
                ahead._over
                or ahead.ended
                or not ahead._run(ahead._state.try_consume_tokens, [token])
            ):
                return count
        return len(tokens)

    def forced(self) -> list[int]:
        """What must come next, as far as that is one way to put it into tokens."""
        return [] if self._over else list(self._run(self._state.compute_ff_tokens) or ())

    def fill_along(self, words: Words, tokens: Seq[int]) -> None:
        """As `fill`, a row behind each of `tokens`, too, which are guesses: rows of which nothing
        can be told forbid everything. words: [1 + tokens, ceil(vocab / 32)]."""
        self.fill(words[0])
        ahead = self.copy()
        for row, token in enumerate(tokens, 1):
            try:
                ahead.advance([token])
                ahead.fill(words[row])
            except ConstraintError:
                words[row:] = 0
                return

    def fill(self, words: Words) -> None:
        """Sets the bits of the tokens that may come next, and clears the others: bit i % 32 of word
        i // 32. Raises ConstraintError where none may, or it takes too long to tell."""
        before_s = self.allowance.left_s
        if not (self._over or self._state.is_error()):
            self._run(self._state.unsafe_compute_mask_ptr, words.ctypes.data, words.nbytes)
        if self._panic:
            raise ConstraintError(self._panic)
        if self._state.is_error():
            raise ConstraintError(_in_words(self._state.get_error()))
        if self._over or before_s - self.allowance.left_s > TOKEN_S:
            raise TooSlow

    @property
    def _over(self) -> bool:
        return self.allowance.left_s < 0 or bool(self._panic)

    def _run(self, call: Callable[..., Any], *arguments: object) -> Any:
        """What the call gives, or None. This thread's time on the processor is spent."""
        began = thread_time()
        try:
            return call(*arguments)
        except BaseException as error:
            if not is_panic(error):
                raise
            self._panic = f"the grammar library failed: {error}"[:_TOLD]
            return None
        finally:
            self.allowance.left_s -= thread_time() - began


class TooSlow(ConstraintError):
    def __init__(self) -> None:
        super().__init__(
            "its grammar is too ambiguous or too large: it takes too long to tell which tokens may "
            "come next"
        )


def is_panic(error: BaseException) -> bool:
    """Of Rust code: pyo3 makes no Exception of it."""
    return type(error).__name__ == "PanicException"


class Compiler:
    """Of one checkpoint's vocabulary."""

    def __init__(self, folder: str, vocab_size: int, eos_token_ids: Seq[int]) -> None:
        """Blocking, up to seconds. Raises ConstraintError where the checkpoint's tokenizer is not
        one that llguidance reads."""
        from llguidance import LLParserLimits, LLTokenizer

        path = Path(folder) / "tokenizer.json"
        if not path.exists():
            raise ConstraintError("the checkpoint has no tokenizer.json, which constraints need")
        try:
            self._tokenizer = LLTokenizer(
                path.read_text(), n_vocab=vocab_size, eos_token=list(eos_token_ids) or None
            )
        except Exception as error:
            why = f"the checkpoint's tokenizer cannot be constrained: {error}"
            raise ConstraintError(why[:_TOLD]) from error
        self._limits = LLParserLimits(
            initial_lexer_fuel=_LEXER_FUEL,
            step_lexer_fuel=_STEP_FUEL,
            step_max_items=_ITEMS,
            max_lexer_states=_STATES,
            max_items_in_row=_ROW_ITEMS,
        )

    def matcher(self, grammar: str) -> Matcher:
        """At the output's beginning, of what `grammar_of` gives. Blocking; other threads run
        meanwhile. Raises ConstraintError."""
        from llguidance import LLMatcher

        state = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if state.is_error():
            raise ConstraintError(_in_words(state.get_error()))
        return Matcher(state, Allowance())


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
                return str(LLMatcher.grammar_from_regex(text))
            case "choice":
                texts = (json.dumps(one, ensure_ascii=False) for one in json.loads(text))
                return str(LLMatcher.grammar_from_lark("start: " + " | ".join(texts)))
            case "grammar":
                return str(LLMatcher.grammar_from_lark(any_to_lark(text)))
    except Exception as error:  # of a grammar's parser many kinds
        raise ConstraintError(f"{type(error).__name__}: {error}"[:_TOLD]) from error


def _json_grammar(schema: str) -> str:
    from llguidance import LLMatcher

    options: Any = {"whitespace_pattern": _WHITE_SPACE}
    return str(LLMatcher.grammar_from_json_schema(schema, overrides=options))


def _in_words(error: str) -> str:
    """Without the parser's state, which follows in lines of its own."""
    if error.startswith("NoExtension"):
        return "no text matches it, or none that begins like the output so far"
    return error.split("\n<state>", 1)[0].strip()[:_TOLD]

"""llguidance by its C interface, which is what its shared library has beside the Python one.

Two things the Python interface lacks: a call lets the interpreter go, whatever it does, and can be
broken off by another thread. Of the layouts below the library says that they only grow at their
ends (llguidance.h, 1.9).
"""

import ctypes as c
import importlib.util
import threading
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.worker.engine.config import MOST_GUESSES

Words = NDArray[np.int32]

_PIECE = 512
"""Bytes of a forced text that are put into tokens at once: a millisecond, in which the interpreter
is held."""
_SPECIAL = b"\xff"
"""Begins the bytes of tokens that no text has."""
_NO_TOKEN = 2**32 - 1
_TOLD = 300  # characters of why

_TOKENIZE = c.CFUNCTYPE(
    c.c_size_t, c.c_void_p, c.POINTER(c.c_char), c.c_size_t, c.POINTER(c.c_uint32), c.c_size_t
)


class GrammarError(Exception):
    """What the library says of a grammar, or of an output in it."""


class Missing(Exception):
    """There is no llguidance here, or another than is needed."""


class Cancelled(GrammarError):
    """The call was broken off."""


class _Vocabulary(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        ("vocab_size", c.c_uint32),
        ("tok_eos", c.c_uint32),
        ("token_lens", c.c_void_p),
        ("token_bytes", c.c_char_p),
        ("tokenizer_json", c.c_char_p),
        ("tokenize_assumes_string", c.c_bool),
        ("tokenize_fn", _TOKENIZE),
        ("use_approximate_greedy_tokenize_fn", c.c_bool),
        ("tokenize_user_data", c.c_void_p),
        ("slices", c.c_void_p),
        ("tok_eos_extra", c.c_void_p),
        ("tok_eos_extra_count", c.c_uint32),
    ]


class _Limits(c.Structure):
    _fields_ = [
        ("max_items_in_row", c.c_size_t),
        ("initial_lexer_fuel", c.c_uint64),
        ("step_lexer_fuel", c.c_uint64),
        ("step_max_items", c.c_size_t),
        ("max_lexer_states", c.c_size_t),
        ("max_grammar_size", c.c_size_t),
        ("precompute_large_lexemes", c.c_bool),
        ("verbose_errors", c.c_bool),
    ]


class _Init(c.Structure):
    _fields_ = [
        ("tokenizer", c.c_void_p),
        ("log_buffer_level", c.c_uint32),
        ("log_stderr_level", c.c_uint32),
        ("ff_tokens_ok", c.c_bool),
        ("backtrack_ok", c.c_bool),
        ("limits", _Limits),
        ("later", c.c_char * 256),  # of a newer library, which writes defaults of all it knows
    ]


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "llg_new_tokenizer_v2": (c.c_void_p, [c.POINTER(_Vocabulary), c.c_char_p, c.c_size_t]),
    "llg_free_tokenizer": (None, [c.c_void_p]),
    "llg_constraint_init_set_defaults": (None, [c.POINTER(_Init), c.c_void_p]),
    "llg_new_matcher": (c.c_void_p, [c.POINTER(_Init), c.c_char_p, c.c_char_p]),
    "llg_clone_matcher": (c.c_void_p, [c.c_void_p]),
    "llg_free_matcher": (None, [c.c_void_p]),
    "llg_matcher_get_error": (c.c_char_p, [c.c_void_p]),
    "llg_matcher_is_stopped": (c.c_bool, [c.c_void_p]),
    "llg_matcher_consume_token": (c.c_int32, [c.c_void_p, c.c_uint32]),
    "llg_matcher_compute_mask_into": (c.c_int32, [c.c_void_p, c.c_void_p, c.c_size_t]),
    "llg_matcher_compute_ff_tokens": (c.c_int32, [c.c_void_p, c.c_void_p, c.c_size_t]),
    "llg_matcher_get_cancellation_handle": (c.c_void_p, [c.c_void_p]),
    "llg_cancel": (None, [c.c_void_p]),
    "llg_free_cancellation_handle": (None, [c.c_void_p]),
}

_at_work = threading.local()
"""`state`: that this thread has called."""


def load() -> Any:
    """The shared library. Milliseconds, as what Python needs besides is not imported. Raises
    Missing."""
    spec = importlib.util.find_spec("llguidance")
    if spec is None or not spec.submodule_search_locations:
        raise Missing("llguidance is not installed")
    try:
        (path,) = Path(spec.submodule_search_locations[0]).glob("_lib*.so")
        library = c.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (ValueError, OSError, AttributeError) as error:
        raise Missing(f"this llguidance lacks the C interface: {error}") from error
    return library


class Vocabulary:
    """A checkpoint's tokens, as grammars see them."""

    def __init__(self, tokenizer_json: str, size: int, eos_token_ids: Seq[int]) -> None:
        """Blocking, up to seconds. Raises Missing, and what llguidance raises if it does not read
        it."""
        self.library = load()
        from llguidance import LLTokenizer

        self.num_words = -(-size // 32)
        eos = list(eos_token_ids)
        self._tokenizer = LLTokenizer(
            tokenizer_json, n_vocab=size, eos_token=eos or None, slices=[]
        )
        words = [self._bytes_of(token) for token in range(size)]
        lengths = np.array([*map(len, words)], np.uint32)
        others = np.array(eos[1:], np.uint32)
        self._callback = _TOKENIZE(self._tokenize)  # lives as long as this
        init = _Vocabulary(
            struct_size=c.sizeof(_Vocabulary),
            vocab_size=size,
            tok_eos=eos[0] if eos else _NO_TOKEN,
            token_lens=lengths.ctypes.data,
            token_bytes=b"".join(words),
            tokenize_assumes_string=True,
            tokenize_fn=self._callback,
            tok_eos_extra=others.ctypes.data if len(others) else None,
            tok_eos_extra_count=len(others),
        )
        why = c.create_string_buffer(_TOLD)
        self.handle = self.library.llg_new_tokenizer_v2(c.byref(init), why, len(why))
        if not self.handle:
            raise ValueError(why.value.decode(errors="replace"))

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.library.llg_free_tokenizer(self.handle)

    def _bytes_of(self, token: int) -> bytes:
        word: bytes = self._tokenizer.decode_bytes([token])
        return _SPECIAL + word if self._tokenizer.is_special_token(token) else word

    def _tokenize(self, _: object, text: Any, size: int, tokens: Any, room: int) -> int:
        """What the library calls for a text that is forced, to have it in tokens as the model knows
        them. Piece by piece: others get the interpreter in between."""
        whole = c.string_at(text, size).decode()
        found: list[int] = []
        for first in range(0, len(whole), _PIECE):
            if (state := getattr(_at_work, "state", None)) and state.cancelled:
                return 0
            found += self._in_tokens(whole[first : first + _PIECE])
        for index, token in enumerate(found[:room]):
            tokens[index] = token
        return len(found)

    def _in_tokens(self, text: str) -> list[int]:
        """As the model writes it; but text that reads like a special token is none, and is put
        together from the longest tokens."""
        found: list[int] = self._tokenizer.tokenize_bytes(text.encode())
        if any(map(self._tokenizer.is_special_token, found)):
            found = self._tokenizer.greedy_tokenize(text)
        return found


class State:
    """An LlgMatcher. Used by one thread at a time, but for `cancel`."""

    def __init__(self, vocabulary: Vocabulary, handle: int) -> None:
        self._vocabulary, self._library = vocabulary, vocabulary.library
        self._handle = handle
        self._cancel = self._library.llg_matcher_get_cancellation_handle(handle)
        self.cancelled = False

    @classmethod
    def of(cls, vocabulary: Vocabulary, grammar: str, bounds: Mapping[str, int]) -> "State":
        """At an output's beginning. `bounds`: fields of _Limits. Raises GrammarError."""
        init = _Init()
        vocabulary.library.llg_constraint_init_set_defaults(c.byref(init), vocabulary.handle)
        init.log_stderr_level = 0
        for name, value in bounds.items():
            setattr(init.limits, name, value)
        made = vocabulary.library.llg_new_matcher(c.byref(init), b"guidance", grammar.encode())
        state = cls(vocabulary, made)
        state._raise_if_wrong()
        return state

    def __del__(self) -> None:
        if getattr(self, "_cancel", None):
            self._library.llg_free_cancellation_handle(self._cancel)
            self._library.llg_free_matcher(self._handle)

    def copy(self) -> "State":
        return State(self._vocabulary, self._library.llg_clone_matcher(self._handle))

    def no_words(self) -> Words:
        """For `fill`: [ceil(vocab / 32)]"""
        return np.empty(self._vocabulary.num_words, np.int32)

    def cancel(self) -> None:
        """Breaks off what another thread calls here; nothing can be called any more."""
        self.cancelled = True
        self._library.llg_cancel(self._cancel)

    @property
    def stopped(self) -> bool:
        """It is whole, and nothing can follow; or something went wrong."""
        return bool(self._library.llg_matcher_is_stopped(self._handle))

    def consume(self, token: int) -> None:
        """Goes on behind it. Raises GrammarError if it is not allowed."""
        self._call(self._library.llg_matcher_consume_token, token)

    def fill(self, words: Words) -> None:
        """Sets the bits of the tokens that may come next, and clears the others: bit i % 32 of word
        i // 32. Raises GrammarError if none may."""
        self._call(self._library.llg_matcher_compute_mask_into, words.ctypes.data, words.nbytes)

    def forced(self) -> list[int]:
        """What must come next, as far as that is one way to put it into tokens; MOST_GUESSES at
        most. Raises GrammarError."""
        tokens = np.zeros(MOST_GUESSES, np.uint32)
        found = self._call(
            self._library.llg_matcher_compute_ff_tokens, tokens.ctypes.data, len(tokens)
        )
        return [int(token) for token in tokens[:found]]

    def _call(self, function: Any, *arguments: object) -> int:
        _at_work.state = self
        try:
            found: int = function(self._handle, *arguments)
        finally:
            _at_work.state = None
        if found < 0:
            self._raise_if_wrong()
            raise GrammarError("it cannot be followed any further")
        return found

    def _raise_if_wrong(self) -> None:
        why = self._library.llg_matcher_get_error(self._handle)
        if self.cancelled:
            raise Cancelled("broken off")
        if why is not None:
            raise GrammarError(_in_words(why.decode(errors="replace")))


def _in_words(error: str) -> str:
    """Without the parser's state, which follows in lines of its own."""
    if error.startswith("NoExtension"):
        return "no text matches it, or none that begins like the output so far"
    return error.split("\n<state>", 1)[0].strip()[:_TOLD]

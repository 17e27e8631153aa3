"""A text's tokens, as late interaction compares them: what the encoder made of each, made small.

The encoder's last states are projected to a few numbers each, by their main axes: as far as those
tell tokens apart they are kept. The axes come from the model alone, from what it makes of tokens in
no order: from no language and no subject, and the same wherever this model is. A passage's are kept
beside its vector, two neighbours as one (more, of a very long one), a byte a number.
"""

import base64
import hashlib

import numpy as np

from services.retrieval.encoder import Encoder

SIZE = 64  # numbers of a token, at most
MOST = 128  # vectors of a text, whatever its tokens: 11 KB of a passage's
VERSION = 1  # of how these come about: vectors of another are not to be compared

_TEXTS, _TOKENS, _AT_ONCE = 32, 64, 16
_HEADER = bytes([VERSION])


class Projection:
    """Of one model's states."""

    def __init__(self, encoder: Encoder) -> None:
        """Takes as long as embedding 2,048 tokens."""
        length = min(_TOKENS, encoder.longest)
        drawn = hashlib.shake_128(_HEADER).digest(4 * _TEXTS * length)
        ids = (np.frombuffer(drawn, "<u4") % encoder.vocabulary).reshape(_TEXTS, length)
        moments = np.zeros((encoder.dimension, encoder.dimension))
        for at in range(0, _TEXTS, _AT_ONCE):
            some = ids[at : at + _AT_ONCE].astype(np.int64)
            states = encoder.encode(some, np.ones(some.shape, bool))
            rows = states.reshape(-1, encoder.dimension).astype(np.float64)
            moments += rows.T @ rows
        axes = np.linalg.eigh(moments)[1][:, ::-1][:, :SIZE]
        # An axis has no direction of its own; one machine's must be that of another.
        farthest = np.take_along_axis(axes, np.abs(axes).argmax(0)[None], 0)
        self._axes = (axes * np.sign(farthest)).astype(np.float32)

    def of(self, states: np.ndarray) -> np.ndarray:
        """float32 [..., dimension] to [..., size], of unit length."""
        return unit(states @ self._axes)


def few(tokens: np.ndarray, together: int = 1) -> np.ndarray:
    """Float32 [tokens, size], at least one, to [at most MOST, size], of unit length: so many
    neighbours as one, or more."""
    together = max(together, -(-len(tokens) // MOST))
    return unit(np.add.reduceat(tokens, np.arange(0, len(tokens), together)))


def packed(tokens: np.ndarray) -> str:
    """Of a passage, float32 [tokens, size], at least one: some 40 bytes a token, as text."""
    pairs = few(tokens, together=2)
    scale = 127 / np.maximum(np.abs(pairs).max(1, keepdims=True), np.float32(1e-12))
    numbers = np.rint(pairs * scale).astype(np.int8)
    return base64.b64encode(_HEADER + numbers.tobytes()).decode()


def unpacked(stored: object, size: int) -> np.ndarray | None:
    """int8 [some half of its tokens, size]: directions alone, see `unit`. None where there are
    none, or not such ones."""
    if not isinstance(stored, str):
        return None
    try:
        content = base64.b64decode(stored, validate=True)
    except ValueError:
        return None
    if content[:1] != _HEADER or len(content) == 1 or (len(content) - 1) % size:
        return None
    return np.frombuffer(content, np.int8, offset=1).reshape(-1, size)


def unit(x: np.ndarray) -> np.ndarray:
    """float32 of the same shape, each of unit length, or zeros; quickest of many at once."""
    x = x.astype(np.float32, copy=False)
    length = np.linalg.norm(x, axis=-1, keepdims=True)
    unit: np.ndarray = x / np.maximum(length, np.float32(1e-12))
    return unit

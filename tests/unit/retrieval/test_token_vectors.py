"""What is kept of a text's tokens: small, the same on every machine, and as near as they were."""

from base64 import b64decode, b64encode
from pathlib import Path

import numpy as np
import pytest

from services.retrieval.encoder import Encoder
from services.retrieval.token_vectors import (
    MOST,
    SIZE,
    VERSION,
    Projection,
    few,
    packed,
    unit,
    unpacked,
)
from tests.support.minilm import FOLDER, model
from tests.unit.retrieval.test_encoder import SIZES, written


def tokens_of(text: str) -> np.ndarray:
    return model().read([model().reader.text(text).ids])[0].tokens


def test_a_text_is_read_as_it_is_encoded_whatever_stands_beside_it() -> None:
    texts = ["The tide turns at six.", "A longer text, of more tokens than the other has. " * 3]
    ids = [model().reader.text(text).ids for text in texts]
    both = model().read(ids)
    assert np.array_equal(np.stack([one.vector for one in both]), model().encode(ids))
    assert [one.tokens.shape for one in both] == [(len(its), SIZE) for its in ids]
    assert np.allclose(np.linalg.norm(both[0].tokens, axis=1), 1, atol=1e-5)
    (alone,) = model().read(ids[:1])
    assert np.allclose(alone.tokens, both[0].tokens, atol=1e-4)


def test_tokens_find_what_is_like_them_nearest() -> None:
    question = tokens_of("When does the harbour open?")

    def near(text: str) -> float:
        stored = unpacked(packed(tokens_of(text)), SIZE)
        assert stored is not None
        return float((question @ unit(stored).T).max(1).mean())

    answers = near("The port opens at six in the morning.")
    assert answers > near("The port was built of grey stone.") + 0.02
    assert answers > near("A recipe for lentil soup with carrots.") + 0.2


def test_the_projection_is_of_the_model_alone() -> None:
    states = np.random.default_rng(0).standard_normal((5, 384)).astype(np.float32)
    first, again = (Projection(Encoder(FOLDER)).of(states) for _ in range(2))
    assert np.array_equal(first, again)
    assert first.shape == (5, SIZE)


def test_an_axis_points_one_way_whatever_the_library_makes_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = np.random.default_rng(0).standard_normal((5, 384)).astype(np.float32)
    encoder = Encoder(FOLDER)
    wanted = Projection(encoder).of(states)
    eigh = np.linalg.eigh

    def turned(moments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        values, axes = eigh(moments)
        return values, -axes

    monkeypatch.setattr(np.linalg, "eigh", turned)
    assert np.array_equal(Projection(encoder).of(states), wanted)


def test_a_model_smaller_than_a_token_s_size_keeps_all_it_has(tmp_path: Path) -> None:
    encoder = Encoder(written(tmp_path))
    states = np.random.default_rng(0).standard_normal((4, SIZES["hidden_size"]))
    unit = (states / np.linalg.norm(states, axis=1, keepdims=True)).astype(np.float32)
    projected = Projection(encoder).of(unit)
    assert projected.shape == (4, SIZES["hidden_size"])
    assert np.allclose(projected @ projected.T, unit @ unit.T, atol=1e-4), "it is turned alone"


@pytest.mark.parametrize("count", [1, 2, 3, 78])
def test_two_neighbours_become_one_in_few_bytes(count: int) -> None:
    drawn = np.random.default_rng(count).standard_normal((count, SIZE)).astype(np.float32)
    tokens = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
    stored = packed(tokens)
    pairs = unpacked(stored, SIZE)
    assert pairs is not None
    assert len(pairs) == (count + 1) // 2
    for number, one in enumerate(unit(pairs)):
        mean = tokens[2 * number : 2 * number + 2].sum(0)
        assert one @ mean / np.linalg.norm(mean) > 0.999
    assert len(stored) <= 44 * (count + 3)


@pytest.mark.parametrize("count", [MOST, 2 * MOST, 2 * MOST + 1, 8_192])
def test_a_text_of_very_many_tokens_has_few_vectors(count: int) -> None:
    tokens = np.repeat(np.eye(SIZE, dtype=np.float32), 128, axis=0)[:count]
    assert len(few(tokens)) <= MOST
    assert np.array_equal(few(tokens[:MOST]), tokens[:MOST])
    stored = packed(tokens)
    assert len(stored) <= 4 * (MOST * SIZE + 3) // 3
    kept = unpacked(stored, SIZE)
    assert kept is not None
    assert (tokens[-1] @ unit(kept).T).max() > 0.7, "its end is kept"


def test_vectors_of_another_version_are_none() -> None:
    of_this = b64decode(packed(np.ones((1, SIZE), np.float32)))
    assert unpacked(b64encode(of_this).decode(), SIZE) is not None
    other = bytes([VERSION + 1]) + of_this[1:]
    assert unpacked(b64encode(other).decode(), SIZE) is None


@pytest.mark.parametrize("stored", [None, 3, b"AQ==", "", "AQ==", "é", "AAAA" * 16, "AQ" * 44])
def test_what_is_not_such_tokens_is_none(stored: object) -> None:
    assert unpacked(stored, SIZE) is None


def test_nothing_is_made_of_zeros() -> None:
    stored = unpacked(packed(np.zeros((2, SIZE), np.float32)), SIZE)
    assert stored is not None
    assert not unit(stored).any()

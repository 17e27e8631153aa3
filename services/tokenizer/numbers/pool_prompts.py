"""The prompts of a Pool: each input, query or pair tokenized, within the window."""

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from protos.common_pb2 import Pooling
from protos.tokenizer_pb2 import Pool
from services.common.errors import PenstockError, invalid
from services.common.packed_ids import Ids
from services.common.text.content import said
from services.tokenizer.checkpoints.models import ServedModel
from services.tokenizer.prompts.context import TOO_LONG
from services.tokenizer.prompts.encode import encoding_of
from services.tokenizer.templates.template import NotRenderableError

MAX_INPUTS = 2048
_PIECE_BYTES = 32 * 1024  # that a thread tokenizes before it is another tenant's turn
_LEAST_BYTES = 64  # that an input counts for

Place = tuple[Literal["inputs", "queries"], int]
"""Of one that gets a prompt: which list of the Pool, and where in it."""


def check_pool(pool: Pool) -> None:
    """Raises INVALID_ARGUMENT for what no model can be asked."""
    if not 0 < len(pool.inputs) <= MAX_INPUTS:
        raise invalid(f"1 to {MAX_INPUTS} inputs are taken", "inputs")
    pairs = pool.task == Pool.SCORE
    if len(pool.queries) not in ((1, len(pool.inputs)) if pairs else (0,)):
        raise invalid("one query, or one for each input, where they are scored", "queries")
    for name, given in (("inputs", pool.inputs), ("queries", pool.queries)):
        for index, one in enumerate(given):
            if not (one.text or one.token_ids.ids):
                raise invalid("must not be empty", f"{name}[{index}]")


def check_model(model: ServedModel, pool: Pool) -> None:
    """Raises INVALID_ARGUMENT for what this one does not do."""
    labels = len(model.kind.labels)
    why = ""
    if pool.task == Pool.CLASSIFY and not labels:
        why = "has no classes"
    if pool.task == Pool.EMBED and labels:
        why = "tells classes, and makes no embeddings"
    if pool.task == Pool.SCORE and labels > 1:
        why = f"has {labels} classes, and a score is made of a single one"
    if why:
        raise invalid(f"the model {model.name!r} {why}", "model", reason="unsupported_model")


def embeds_both(model: ServedModel, pool: Pool) -> bool:
    """A score is that of two embeddings; else the model reads the pair."""
    return pool.task == Pool.SCORE and not model.kind.score_of


def pooling_of(model: ServedModel, pool: Pool) -> Pooling:
    if pool.task == Pool.CLASSIFY:
        return Pooling(kind=Pooling.LOGITS, logits_of=range(len(model.kind.labels)))
    if pool.task == Pool.SCORE and model.kind.score_of:
        return Pooling(kind=Pooling.LOGITS, logits_of=model.kind.score_of)
    usual = Pooling.MEAN if model.kind.modules.pooling == "mean" else Pooling.LAST
    wanted = pool.pooling if pool.HasField("pooling") else usual
    return Pooling(kind=wanted, dimensions=pool.dimensions)


def pieces_of(pool: Pool, places: Sequence[Place]) -> Iterator[list[Place]]:
    """In pieces of work for a thread."""
    piece: list[Place] = []
    size = 0
    for place in places:
        one = _at(pool, place)
        piece.append(place)
        size += _LEAST_BYTES + len(one.text) + len(one.token_ids.ids)
        if size >= _PIECE_BYTES:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


def check_lengths(model: ServedModel, pool: Pool, most: int) -> None:
    """Whether all inputs may fit, as far as their bytes tell; `most`: tokens of all together.
    Raises INVALID_ARGUMENT that names the first that does not."""
    together = 0
    for name, given in (("inputs", pool.inputs), ("queries", pool.queries)):
        for index, one in enumerate(given):
            least = len(one.token_ids.ids) or model.encoder.least(one.text)
            _check_window(model, least, f"{name}[{index}]")
            together += least
    if together > most:
        raise too_many(most)


def too_many(most: int) -> PenstockError:
    what = f"at most {most} tokens are taken in all inputs together"
    return invalid(what, "inputs", reason="too_many_tokens")


def prompt_of(model: ServedModel, pool: Pool, place: Place) -> Ids:
    """Blocking. Raises INVALID_ARGUMENT that names the input."""
    name, index = place
    if pool.task == Pool.SCORE and model.kind.score_of:
        return _pair(model, pool, index)
    given, param = _at(pool, place), f"{name}[{index}]"
    if given.HasField("token_ids"):
        ids = np.array(given.token_ids.ids, np.uint32)
        for strange in ids[ids >= model.vocab_size][:1]:
            what = f"token id {strange} is outside the vocabulary of {model.vocab_size}"
            raise invalid(what, param)
    else:
        _check_window(model, model.encoder.least(given.text), param)
        ids = model.encoder.encode_text(given.text)[0]
    if not len(ids):
        raise invalid(f"{param}: no token is made of it", param)
    _check_window(model, len(ids), param)
    return ids


def _at(pool: Pool, place: Place) -> Pool.Input:
    name, index = place
    return (pool.inputs if name == "inputs" else pool.queries)[index]


def _pair(model: ServedModel, pool: Pool, index: int) -> Ids:
    """By the checkpoint's template for pairs, or else as its tokenizer puts two texts together."""
    ours = index % len(pool.queries)
    query, document, param = pool.queries[ours], pool.inputs[index], f"inputs[{index}]"
    for one, name in ((query, f"queries[{ours}]"), (document, param)):
        if one.HasField("token_ids"):
            raise invalid(f"the model {model.name!r} reads pairs of texts, no token ids", name)
        _check_window(model, model.encoder.least(one.text), name)
    if model.template is not None and model.template.takes_pairs:
        messages = [said("query", query.text), said("document", document.text)]
        try:
            ids = model.encoder.encode(model.template.render(messages)).ids
        except NotRenderableError as refused:
            raise invalid(refused.why, param) from None
    else:
        pair = (query.text, document.text)
        ids = np.array(encoding_of(model.tokenizer, pair, special_tokens=True).ids, np.uint32)
    _check_window(model, len(ids), param)
    return ids


def _check_window(model: ServedModel, count: int, param: str) -> None:
    if count > model.window:
        what = f"{param} has at least {count} tokens, the context window is {model.window}"
        raise invalid(what, param, reason=TOO_LONG)

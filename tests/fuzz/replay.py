"""Some of a round's requests once more, each for itself: alone in an engine that guesses nothing,
finds nothing in a cache and computes as many tokens a step as it may. What they got beside others
is what they get there."""

from collections.abc import Iterable

import numpy as np

from services.worker.engine import EngineConfig, FinishReason, Request, RequestOutput
from services.worker.engine.engine import Engine
from tests.fuzz.requests import DEMO, WINDOW, Asked

_WHOLE = (FinishReason.STOP, FinishReason.LENGTH)


def plain() -> Engine:
    return Engine(
        EngineConfig(
            model=str(DEMO),
            num_blocks=WINDOW // 16 + 1,
            max_model_len=WINDOW,
            max_running=1,
            max_batched_tokens=512,
            prefix_caching=False,
            threads=1,
            target_itl_ms=1e6,
        )
    )


def compare(engine: Engine, asked: Asked, tokens: list[int], last: RequestOutput) -> None:
    """`tokens`: that it got, up to its end or until it was cancelled. Raises AssertionError."""
    request = asked.alone("replayed")
    found, again = _alone(engine, request)
    if last.pooled is not None:
        assert again.pooled is not None, again.error
        pair = [np.frombuffer(one, "<f4") for one in (last.pooled, again.pooled)]
        np.testing.assert_allclose(*pair, atol=1e-5)  # sums of chunks are added up otherwise
        return
    assert found[: len(tokens)] == tokens, (request, last.finish_reason)
    if last.finish_reason in _WHOLE:
        assert (len(found), again.finish_reason) == (len(tokens), last.finish_reason), request


def _alone(engine: Engine, request: Request) -> tuple[list[int], RequestOutput]:
    engine.add(request)
    tokens: list[int] = []
    while True:
        outputs: Iterable[RequestOutput] = engine.step().outputs
        for output in outputs:
            tokens += output.new_token_ids
            if output.finish_reason is not None:
                return tokens, output

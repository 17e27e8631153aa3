"""What an answer has cost, and what it tells of its usage, at the router that gives it."""

from typing import Any

import pytest

from protos.common_pb2 import FINISH_LENGTH, Sampling
from protos.router_pb2 import GenerateRequest
from protos.worker_pb2 import TokenDelta
from services.router.answer import Answer


class Call:
    def __init__(self) -> None:
        self.deltas: list[TokenDelta] = []

    def send(self, payload: bytes) -> None:
        self.deltas.append(TokenDelta.FromString(payload))


@pytest.mark.parametrize(
    ("before", "at_first", "at_last"),
    [(0, 50, 53), (8, 0, 3)],  # what another router gave, and its prompt, was charged there
)
async def test_an_answer_is_charged_where_it_is_made(
    before: int, at_first: int, at_last: int
) -> None:
    request = GenerateRequest(
        prompt_token_ids=range(50), generated_prefix=before, sampling=Sampling(max_tokens=3)
    )
    call: Any = Call()
    answer = Answer(request, call)
    assert (answer.used, answer.tokens_left) == (at_first, 3)
    for token in (7, 8, 9):
        delta = TokenDelta(token_ids=[token], finish=FINISH_LENGTH if token == 9 else 0)
        answer.take(delta, delta.SerializeToString())
    assert (answer.used, answer.tokens_left, answer.finished) == (at_last, 0, True)
    usage = call.deltas[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (50 - before, before + 3)

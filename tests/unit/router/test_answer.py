"""What an answer has cost, and what it tells of its usage, at the router that gives it."""

from typing import Any

import pytest

from protos.common_pb2 import FINISH_LENGTH, Sampling
from protos.router_pb2 import GenerateRequest
from protos.worker_pb2 import TokenDelta
from services.common.packed_ids import pack
from services.router import metrics
from services.router.answer import Answer


class Call:
    def __init__(self) -> None:
        self.deltas: list[TokenDelta] = []

    def send(self, payload: bytes) -> None:
        self.deltas.append(TokenDelta.FromString(payload))


@pytest.mark.parametrize(
    ("before", "choice", "at_first", "at_last"),
    [
        (0, 0, 50, 53),
        (8, 0, 0, 3),  # what another router gave, and its prompt, was charged there
        (0, 2, 0, 3),  # the first choice is charged for the prompt
    ],
)
async def test_an_answer_is_charged_where_it_is_made(
    before: int, choice: int, at_first: int, at_last: int
) -> None:
    request = GenerateRequest(
        prompt_token_ids=pack(range(50)),
        generated_prefix=before,
        choice=choice,
        sampling=Sampling(max_tokens=3),
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


def observed(histogram: Any) -> tuple[float, float]:
    """How many, and their sum."""
    samples = {s.name.rpartition("_")[2]: s.value for m in histogram.collect() for s in m.samples}
    return samples["count"], samples["sum"]


@pytest.mark.parametrize("before", [0, 8])
async def test_times_to_tokens_are_of_what_a_client_waits_for(
    before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token, unless another router gave it; then the mean of each delta."""
    now = 100.0
    monkeypatch.setattr("services.router.answer.time.monotonic", lambda: now)
    request = GenerateRequest(
        prompt_token_ids=pack(range(50)), generated_prefix=before, sampling=Sampling(max_tokens=99)
    )
    call: Any = Call()
    answer = Answer(request, call)
    assert (answer.ttft_s, answer.first_token_s) == (0, 0)
    ttft, itl = observed(metrics.ttft), observed(metrics.itl)
    for now, tokens in ((101.0, []), (102.0, [1, 2]), (105.0, [3, 4, 5]), (105.5, [6])):  # noqa: B007
        delta = TokenDelta(token_ids=tokens)
        answer.take(delta, delta.SerializeToString())
    assert (answer.ttft_s, answer.first_token_s) == (2.0, 102.0)
    count, total = (after - then for after, then in zip(observed(metrics.ttft), ttft, strict=True))
    assert (count, total) == ((1, 2.0) if not before else (0, 0.0))
    count, total = (after - then for after, then in zip(observed(metrics.itl), itl, strict=True))
    assert (count, total) == (2, 1.5)  # a second for each of three tokens, and a half


async def test_only_the_first_and_the_last_delta_tell_the_usage_and_nothing_follows() -> None:
    request = GenerateRequest(prompt_token_ids=pack(range(50)), sampling=Sampling(max_tokens=3))
    call: Any = Call()
    answer = Answer(request, call)
    answer.cached_tokens = 16
    heard: list[int] = []
    answer.when(2, lambda: heard.append(len(answer.tokens)))
    for token in (7, 8, 9, 10):
        delta = TokenDelta(token_ids=[token], finish=FINISH_LENGTH if token == 9 else 0)
        delta.draft_tokens, delta.accepted_tokens = token, 1
        answer.take(delta, delta.SerializeToString())
    assert [list(delta.token_ids) for delta in call.deltas] == [[7], [8], [9]]
    assert [delta.HasField("usage") for delta in call.deltas] == [True, False, True]
    assert [delta.usage.completion_tokens for delta in call.deltas] == [1, 0, 3]
    assert [delta.draft_tokens for delta in call.deltas] == [7, 8, 9]
    assert (answer.draft_tokens, answer.accepted_tokens) == (7 + 8 + 9, 3)
    assert call.deltas[0].usage.cached_tokens == call.deltas[2].usage.cached_tokens == 16
    assert heard == [2], "once"
    assert answer.tokens == [7, 8, 9]

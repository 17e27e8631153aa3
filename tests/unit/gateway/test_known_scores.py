"""What a model said of passages, kept for a while."""

import pytest

from services.gateway.runs import known_scores
from services.gateway.runs.known_scores import KnownScores, key_of


class Clock:
    now = 5.0  # of a machine that began a moment ago: less than what scores are kept for

    def monotonic(self) -> float:
        return self.now


def test_what_was_never_said_is_not_known_on_a_machine_that_began_just_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known_scores, "time", clock := Clock())
    scores, said, unsaid = KnownScores(300.0), key_of("t", "said"), key_of("t", "unsaid")
    scores.keep([(said, 0.7)])
    assert scores.of([said, unsaid]) == {said: 0.7}
    clock.now += 299
    assert scores.of([said, unsaid]) == {said: 0.7}
    clock.now += 2
    assert scores.of([said, unsaid]) == {}


def test_none_is_kept_where_nothing_is_to_be() -> None:
    scores = KnownScores(0.0)
    scores.keep([(key_of("said"), 0.7)])
    assert scores.of([key_of("said")]) == {}


def test_keys_are_apart_by_where_their_texts_end() -> None:
    assert key_of("tenant", "model") != key_of("tenantm", "odel")

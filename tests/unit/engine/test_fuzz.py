"""The first seconds of `make fuzz`."""

import pytest

from tests.fuzz.rounds import play


@pytest.mark.parametrize("seed", range(4))
def test_every_request_ends_once_and_nothing_is_left(seed: int) -> None:
    play(seed, 60)

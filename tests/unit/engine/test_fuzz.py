"""A few seconds of `make fuzz`: rounds that always guess, or never, however busy the machine is."""

import pytest

from tests.fuzz.rounds import play


@pytest.mark.parametrize(
    ("seed", "guesses"),
    [(4, False), (45, True), (47, True), (9, True)],
    ids=["overlap", "look-up", "few blocks", "draft model"],
)
def test_every_request_ends_once_as_it_would_alone_and_nothing_is_left(
    seed: int, guesses: bool
) -> None:
    met = play(seed, 60, again=1.0)
    assert met["replayed"]
    assert bool(met["right guesses"]) == guesses

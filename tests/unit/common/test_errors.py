"""An error arrives at the other end as it was raised."""

import grpc
import pytest

from protos.common_pb2 import Status
from services.common.errors import PenstockError, invalid, unavailable


@pytest.mark.parametrize("code", grpc.StatusCode)
def test_an_error_survives_its_journey(code: grpc.StatusCode) -> None:
    error = PenstockError(
        code, "why", stage="router", param="p[1]", reason="full", retry_after_s=1.25
    )
    sent = Status.FromString(error.to_status().SerializeToString())
    assert vars(PenstockError.from_status(sent)) == vars(error)


def test_a_code_of_tomorrow_is_unknown() -> None:
    assert PenstockError.from_status(Status(code=99)).code is grpc.StatusCode.UNKNOWN


def test_what_is_away_may_be_tried_again_and_what_is_wrong_may_not() -> None:
    away = unavailable("away", stage="router")
    assert (away.code, away.stage) == (grpc.StatusCode.UNAVAILABLE, "router")
    assert away.retry_after_s > 0
    wrong = invalid("no", "field", reason="r", stage="s")
    assert (wrong.code, wrong.param) == (grpc.StatusCode.INVALID_ARGUMENT, "field")
    assert (wrong.reason, wrong.stage, wrong.retry_after_s) == ("r", "s", 0)

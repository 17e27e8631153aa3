"""The one error that crosses services: it names its stage, and the request field at fault.

It travels as `common_pb2.Status` at the end of a request on a link, as trailing metadata on unary
calls, and leaves the gateway in OpenAI's error shape.
"""

from typing import Self

import grpc

from protos import common_pb2

_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}


class PenstockError(Exception):
    """A request failed, and this is what its caller is told.

    `message` is for the user: it holds no prompt text, and nothing of the inside (addresses, ids of
    replicas, paths, names of settings, other exceptions' texts), which goes into the log; `param`
    is the path of the request field at fault ("messages[1].content"); `reason` is a stable word for
    programs ("queue_full"); `retry_after_s` advises when trying again makes sense.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        stage: str = "",
        param: str = "",
        reason: str = "",
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.stage = stage
        self.param = param
        self.reason = reason
        self.retry_after_s = retry_after_s

    def to_status(self) -> common_pb2.Status:
        return common_pb2.Status(
            code=self.code.value[0],
            message=self.message,
            stage=self.stage,
            param=self.param,
            reason=self.reason,
            retry_after_ms=round(self.retry_after_s * 1000),
        )

    @classmethod
    def from_status(cls, status: common_pb2.Status) -> Self:
        return cls(
            _BY_NUMBER.get(status.code, grpc.StatusCode.UNKNOWN),
            status.message,
            stage=status.stage,
            param=status.param,
            reason=status.reason,
            retry_after_s=status.retry_after_ms / 1000,
        )


def invalid(message: str, param: str, *, reason: str = "", stage: str = "") -> PenstockError:
    """The client's request is wrong in the field `param`."""
    return PenstockError(
        grpc.StatusCode.INVALID_ARGUMENT, message, param=param, reason=reason, stage=stage
    )


def unavailable(
    message: str, *, stage: str, reason: str = "", retry_after_s: float = 1.0
) -> PenstockError:
    """A part of the system is away for now; trying again may help."""
    return PenstockError(
        grpc.StatusCode.UNAVAILABLE,
        message,
        stage=stage,
        reason=reason,
        retry_after_s=retry_after_s,
    )

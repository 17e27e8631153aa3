"""Requests of other APIs as the chats that they are, and what a chat's fields are called there."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from services.common.config import GatewaySettings
from services.common.errors import PenstockError
from services.gateway.api.generation_schema import ChatCompletionRequest
from services.gateway.api.schema import validated

_MESSAGE = re.compile(r"messages\[(\d+)\](?:\.tool_calls\[(\d+)\](?:\.function)?)?")
_FUNCTION = re.compile(r"(tools\[\d+\])\.function")


class Said(NamedTuple):
    """A message of the chat."""

    message: dict[str, Any]
    whose: str  # the request's field that it is from
    calls: list[str]  # the same of each of its calls


class Names(NamedTuple):
    """What the chat's fields are called in an API's requests."""

    fields: Sequence[tuple[str, str]]  # beginnings of paths; the first that fits
    within: Sequence[tuple[str, str]]  # the same within messages, calls and functions
    lone: frozenset[str]  # what messages are from and has no fields


class Chat:
    """The chat that a request is."""

    request: ChatCompletionRequest

    def __init__(self, said: Sequence[Said], names: Names) -> None:
        self.messages = [one.message for one in said]
        self._said = said
        self._names = names

    def understand(self, fields: dict[str, Any], limits: GatewaySettings) -> None:
        """Raises INVALID_ARGUMENT in the request's own terms."""
        try:
            self.request = validated(ChatCompletionRequest, fields, limits)
        except PenstockError as error:
            self.rename(error)
            raise

    def rename(self, error: PenstockError) -> None:
        """What is at fault, as it is called in the request."""
        theirs = error.param
        ours = rename(self._of_message(theirs), self._names)
        if theirs and ours != theirs:
            error.message = error.message.replace(f"'{theirs}'", f"'{ours}'")
            error.param = ours

    def _of_message(self, param: str) -> str:
        found = _MESSAGE.match(param)
        if found is None or int(found[1]) >= len(self._said):
            return param
        said, field = self._said[int(found[1])], param[found.end() :]
        whose = said.whose if found[2] is None else said.calls[int(found[2])]
        return whose if whose in self._names.lone else whose + _renamed(field, self._names.within)


def rename(param: str, names: Names) -> str:
    if found := _FUNCTION.match(param):
        return found[1] + _renamed(param[found.end() :], names.within)
    return _renamed(param, names.fields)


def _renamed(path: str, table: Sequence[tuple[str, str]]) -> str:
    for theirs, ours in table:
        if path == theirs or path.startswith((theirs + ".", theirs + "[")):
            return ours + path.removeprefix(theirs)
    return path

"""What a batch's input file must be: a request on each line, as OpenAI has them."""

import re
from codecs import BOM_UTF8
from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson

from services.common.config import GatewaySettings
from services.gateway.api.schema import max_marks, read_json, too_many_values, wrong_json
from services.gateway.batches.record import Fault

_MOST_FAULTS = 100  # that are told
_CUSTOM_ID_CHARS = 512
_FIELDS = {"custom_id", "method", "url", "body"}
_LINE = re.compile(rb"\S[^\n]*")  # one at a time: blank ones are none, and may be millions
_REFUSED = ("stream", "background")  # nobody is there to follow


class Entry(NamedTuple):
    """One line, as a job has it."""

    line: int  # among all requests of the file, from 0 on
    at: int  # where it is in the file, bytes
    size: int
    custom_id: str
    tries: int = 0  # that failed by the platform's fault
    waits: int = 0  # that found no place

    def body(self) -> str:
        return orjson.dumps(list(self)).decode()

    @classmethod
    def of(cls, body: str) -> "Entry":
        return cls(*orjson.loads(body))


def read(
    content: bytes, endpoint: str, max_lines: int, limits: GatewaySettings
) -> tuple[list[Entry], Sequence[Fault]]:
    """The requests of a file in UTF-8, which are good if there is no fault. Takes a second for
    8 MB: not for the event loop."""
    entries: list[Entry] = []
    faults: list[Fault] = []
    known: set[str] = set()
    number, counted = 1, 0  # line ends before that
    for found in _LINE.finditer(content, len(BOM_UTF8) if content.startswith(BOM_UTF8) else 0):
        at, line = found.start(), found.group()
        number, counted = number + content.count(b"\n", counted, at), at
        custom_id, fault = _request(line, endpoint, known, limits)
        if fault is not None:
            fault.line = number
            faults.append(fault)
        known.add(custom_id)
        entries.append(Entry(len(entries), at, len(line), custom_id))
        if len(faults) == _MOST_FAULTS:
            break
        if len(entries) > max_lines:
            why = f"The file has more than {max_lines:,} requests."
            return [], [Fault(code="too_many_requests", message=why)]
    if not entries:
        faults.append(Fault(code="empty_file", message="The file has no request in it."))
    return entries, faults


def _request(
    line: bytes, endpoint: str, known: set[str], limits: GatewaySettings
) -> tuple[str, Fault | None]:
    """Its custom id, and what is wrong with it."""
    if too_many_values(line, limits):
        most = max_marks(limits)
        why = f"This line has more than {most} commas, colons and brackets, in lists or in text."
        return "", Fault(code="body_too_large", message=why)
    try:
        request = orjson.loads(line)  # as it is read when its turn comes
        read_json(line)
    except ValueError as error:
        if param := wrong_json(error).param:
            why = f"This line has '{param}' twice in one object."
            return "", Fault(code="invalid_json_line", message=why, param=param)
        return "", Fault(code="invalid_json_line", message="This line is not valid JSON.")
    if not isinstance(request, dict):
        return "", Fault(code="invalid_json_line", message="This line is not a JSON object.")
    id = request.get("custom_id")
    own = id if isinstance(id, str) else ""
    return own, _fault(request, own, endpoint, known)


def _fault(request: dict[str, Any], id: str, endpoint: str, known: set[str]) -> Fault | None:
    if unknown := next((name for name in request if name not in _FIELDS), None):
        shown = unknown[:64]
        return _wrong("unknown_parameter", shown, f"Unknown parameter: '{shown}'.")
    for name in sorted(_FIELDS):
        if name not in request:
            message = f"Missing required parameter: '{name}'."
            return _wrong("missing_required_parameter", name, message)
    if not 0 < len(id) <= _CUSTOM_ID_CHARS:
        message = f"Must be a text of 1 to {_CUSTOM_ID_CHARS} characters."
        return _wrong("invalid_custom_id", "custom_id", message)
    if id in known:
        message = f"The custom_id '{id[:100]}' was used by a line before."
        return _wrong("duplicate_custom_id", "custom_id", message)
    if request["method"] != "POST":
        return _wrong("invalid_method", "method", "Only 'POST' is supported.")
    if request["url"] != endpoint:
        message = f"The batch is for '{endpoint}', and so must each line be."
        return _wrong("mismatched_url", "url", message)
    body = request["body"]
    if not isinstance(body, dict):
        return _wrong("invalid_body", "body", "Must be a JSON object.")
    for name in _REFUSED:
        if body.get(name):
            message = f"Unsupported parameter: '{name}' has no meaning in a batch."
            return _wrong("unsupported_parameter", f"body.{name}", message)
    return None


def _wrong(code: str, param: str, message: str) -> Fault:
    return Fault(code=code, message=message, param=param)

import io
import json
import logging
import sys
from typing import Any

import pytest

from services.common.logs import JsonLines, configure_logging
from services.common.telemetry import Telemetry


def logged(*arguments: Any, **more: Any) -> dict[str, Any]:
    record = logging.LogRecord("x", logging.WARNING, __file__, 1, *arguments, None)
    record.created, record.msecs = 0.0, 7.0
    for name, value in more.items():
        setattr(record, name, value)
    told = JsonLines("gateway").format(record)
    assert "\n" not in told
    line: dict[str, Any] = json.loads(told)
    return line


def test_a_line_is_one_json_object() -> None:
    assert logged("hi %s", ("there",)) == {
        "time": "1970-01-01T00:00:00.007Z",
        "level": "warning",
        "logger": "x",
        "message": "hi there",
        "service": "gateway",
    }


def test_a_line_within_a_request_has_its_trace_and_span() -> None:
    with Telemetry("gateway", "g1").span("request") as span:
        line = logged("hi", ())
    context = span.get_span_context()
    assert line["trace_id"] == f"{context.trace_id:032x}"
    assert line["span_id"] == f"{context.span_id:016x}"


def test_an_exception_is_told_with_its_traceback() -> None:
    try:
        raise ValueError("of the inside")
    except ValueError:
        line = logged("hi", (), exc_info=sys.exc_info())
    assert "ValueError: of the inside" in line["exception"]
    assert line["message"] == "hi"
    assert "exc_info" not in line


def test_text_stays_readable_and_what_is_no_json_is_told_all_the_same() -> None:
    assert logged("größer \n %s", ({1, 2},))["message"] == "größer \n {1, 2}"
    assert "object object" in logged("hi", (), odd=object())["odd"]


def test_the_whole_process_logs_so(monkeypatch: pytest.MonkeyPatch) -> None:
    root, sink = logging.getLogger(), io.StringIO()
    before = root.handlers[:], root.level
    monkeypatch.setattr(sys, "stderr", sink)
    try:
        configure_logging("router", "warning")
        logging.getLogger("some.library").warning("odd: %d", 3)
        logging.getLogger("some.library").info("too much")
    finally:
        root.handlers[:], _ = before
        root.setLevel(before[1])
    (line,) = sink.getvalue().splitlines()
    assert json.loads(line)["message"] == "odd: 3"
    assert json.loads(line)["service"] == "router"

import errno
import io
import json
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from services.common.telemetry.logs import JsonLines, configure_logging
from services.common.telemetry.telemetry import Telemetry
from services.worker.engine.process.log_lines import JsonLines as EngineLines


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
    context = span
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


@pytest.fixture
def logs() -> Iterator[None]:
    """The process' own, put back afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    configure_logging("router", "warning")
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.usefixtures("logs")
def test_the_whole_process_logs_so(capfd: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("some.library").warning("odd: %d", 3)
    logging.getLogger("some.library").info("too much")
    (line,) = capfd.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "odd: 3"
    assert json.loads(line)["service"] == "router"


class BackIntoLogs(io.TextIOBase):
    """What Ray Serve puts in the place of sys.stderr, if it is told to log to files alone."""

    def __init__(self) -> None:
        self.lines = 0

    def write(self, text: str) -> int:
        self.lines += 1
        logging.getLogger("ray.serve").error(text)
        return len(text)


@pytest.mark.usefixtures("logs")
def test_a_full_disk_costs_lines_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    log, into = logging.getLogger("x"), BackIntoLogs()
    monkeypatch.setattr(sys, "stderr", into)
    kept, full = os.dup(2), os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, 2)
    log.warning("lost")
    os.dup2(kept, 2)
    os.close(kept), os.close(full)
    log.warning("there again")
    (line,) = capfd.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "there again"
    assert into.lines == 0, "a lost line is told nowhere: there it would be lost, too"


@pytest.mark.usefixtures("logs")
def test_a_line_that_was_cut_spoils_no_other(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write, room = os.write, [10]

    def on_a_disk(descriptor: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(descriptor, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(os, "write", on_a_disk)
    logging.warning("cut")
    logging.warning("lost")
    room[0] = 10_000
    logging.warning("whole")
    logging.warning("and one more")
    cut, *whole = capfd.readouterr().err.splitlines()
    assert len(cut) == 10
    assert [json.loads(line)["message"] for line in whole] == ["whole", "and one more"]


def test_the_engines_lines_are_of_the_same_form() -> None:
    try:
        raise ValueError("of the inside")
    except ValueError:
        told = sys.exc_info()
    record = logging.LogRecord("x", logging.WARNING, __file__, 1, "größer %s", ("there",), told)
    record.created, record.msecs = 0.0, 7.0
    engine = json.loads(EngineLines().format(record))
    assert engine == json.loads(JsonLines("worker").format(record))
    assert "of the inside" in engine["exception"]

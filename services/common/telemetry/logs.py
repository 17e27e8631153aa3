"""Logs: one JSON object a line on standard error, with the trace of the request that it is about.

No text of a prompt or an answer is ever part of one, whatever the level: `PENSTOCK_LOG_PROMPTS` is
for spans.
"""

import logging
import os
import time

from pythonjsonlogger.orjson import OrjsonFormatter

from services.common.telemetry.spans import current_span

_FIELDS = {
    "asctime": "time",
    "levelname": "level",
    "name": "logger",
    "exc_info": "exception",
    "stack_info": "stack",
}


class JsonLines(OrjsonFormatter):
    """time (UTC), level, logger, message, service; and, where there are any, exception, stack,
    trace_id, span_id, and what a call gave as `extra`."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self, service: str) -> None:
        super().__init__(
            "%(asctime)s%(levelname)s%(name)s%(message)s",
            rename_fields=_FIELDS,
            static_fields={"service": service},
        )

    def process_log_record(self, log_data: dict[str, object]) -> dict[str, object]:
        log_data["level"] = str(log_data["level"]).lower()
        if (span := current_span()) is not None:
            log_data["trace_id"] = f"{span.trace_id:032x}"
            log_data["span_id"] = f"{span.span_id:016x}"
        return log_data


class StandardError(logging.Handler):
    """Writes to the descriptor, whatever became of `sys.stderr`: Ray Serve may have a logger there,
    and a line about a line that failed would come back as one more.

    What cannot be written, as when the disk is full, is dropped: no request fails for a log.
    """

    def __init__(self) -> None:
        super().__init__()
        self._cut = False  # the last line has no end

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # wrong arguments of the call
            return self.handleError(record)
        left = f"{line}\n".encode(errors="backslashreplace")
        if self._cut:
            left = b"\n" + left
        try:
            while left:
                written = os.write(2, left)
                self._cut, left = True, left[written:]
        except OSError:
            return
        self._cut = False


def configure_logging(service: str, level: str) -> None:
    """For the whole process."""
    handler = StandardError()
    handler.setFormatter(JsonLines(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)

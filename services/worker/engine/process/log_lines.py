"""Logs of the engine's process: lines as its worker's are (services/common/telemetry/logs.py), made
by the standard library alone."""

import json
import logging
import time


class JsonLines(logging.Formatter):
    """time (UTC), level, logger, message, service; and an exception where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{when}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "service": "worker",
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)

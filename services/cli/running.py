"""The Penstock that runs on this machine, as the commands find it. Imports next to nothing."""

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.common.config import Settings


@dataclass(frozen=True)
class Running:
    """What a running Penstock wrote down for the other commands."""

    url: str
    grpc: str  # host:port of the public gRPC service
    redis_url: str
    namespace: str
    key: str
    pid: int


def state_file(settings: "Settings") -> Path:
    return settings.data_dir / "running.json"


def find_running(settings: "Settings") -> Running | None:
    """The Penstock that was started with this data directory, if it still runs."""
    running = last_running(settings)
    if running is not None:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(running.pid, 0)
            return running
    return None


def last_running(settings: "Settings") -> Running | None:
    """What a Penstock wrote down that runs, or ended without tidying up."""
    with suppress(FileNotFoundError, ValueError, TypeError):
        return Running(**json.loads(state_file(settings).read_text()))
    return None

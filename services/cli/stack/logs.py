"""Where the logs of all processes of a stack are: a folder per start in the data directory.

data_dir/logs/2026-11-22T04-17-46Z-4711/    when it was (UTC, so that names sort), by which process
"""

import os
import re
import shutil
from datetime import UTC, datetime
from pathlib import Path

from services.common.locks.secrets import private_folder

_KEPT = 5  # of a stack that was lost, of the three new starts that may follow, and of the next one
_NAME = re.compile(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\dZ-\d+")


def new_logs(data_dir: Path) -> Path:
    """A folder for this start; the oldest of other starts are removed."""
    folder = private_folder(data_dir / "logs")
    earlier = sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))
    for path in earlier[: 1 - _KEPT]:
        shutil.rmtree(path, ignore_errors=True)
    return private_folder(folder / f"{datetime.now(UTC):%Y-%m-%dT%H-%M-%SZ}-{os.getpid()}")

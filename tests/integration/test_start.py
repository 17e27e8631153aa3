"""`penstock up` that fails or is ended while it starts: a reason in words, and nothing stays."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from services.common.children import dying_with_parent


class Starting:
    """`penstock up` with a data directory of its own; `said` is its standard error so far."""

    def __init__(self, data_dir: Path, **settings: str) -> None:
        own = {"PENSTOCK_DATA_DIR": str(data_dir), **settings}
        self.process = subprocess.Popen(
            [*dying_with_parent(), sys.executable, "-m", "services.cli", "up", "--port", "0"],
            env={**os.environ, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.said = ""
        self._closed = False
        self._heard = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait_for(self, words: str, timeout_s: float = 300.0) -> None:
        """Or until it will say no more."""
        with self._heard:
            self._heard.wait_for(lambda: words in self.said or self._closed, timeout_s)
        assert words in self.said, self.said

    def ended(self, timeout_s: float = 300.0) -> int:
        """Its exit status, once it ended by itself."""
        status = self.process.wait(timeout_s)
        self._reader.join(10)
        return status

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._heard:
                self.said += line
                self._heard.notify_all()
        with self._heard:
            self._closed = True
            self._heard.notify_all()


def test_the_first_replicas_failure_reaches_the_terminal(tmp_path: Path) -> None:
    """What only the engine can tell: here, a workspace that no memory holds."""
    starting = Starting(tmp_path, PENSTOCK_WORKER__MAX_BATCHED_TOKENS=str(10**9))
    starting.wait_for("waiting for")
    family = starting.family()
    assert starting.ended() == 1
    told = starting.said
    assert re.search(r"penstock: (prefill|decode) worker of demo did not start: ", told), told
    assert "Unable to allocate" in told
    assert "Traceback" not in told
    (log,) = re.findall(r"its log: (\S+)", told)
    lines = Path(log).read_text().splitlines()
    told_there = [json.loads(line) for line in lines if line.startswith("{")]
    assert any("Unable to allocate" in str(line) for line in told_there), lines
    (logs,) = re.findall(r"logs of all processes: (\S+)", told)
    assert Path(logs).parent == tmp_path / "logs"
    assert Path(log).parent == Path(logs), "of the stack that was lost, in the data directory"
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("moment", ["ray: starting", "waiting for"])
def test_a_start_can_be_ended(number: signal.Signals, moment: str, tmp_path: Path) -> None:
    starting = Starting(tmp_path)
    starting.wait_for(moment)
    family = starting.family()
    starting.process.send_signal(number)
    assert starting.ended(60) == 128 + number, starting.said
    assert "Traceback" not in starting.said, starting.said
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
    assert not (tmp_path / "running.json").exists()

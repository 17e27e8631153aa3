"""`penstock up`: the graph on a real Ray, its controller killed, and a drain by Ctrl-C."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil

from tests.support.checkpoint import write_checkpoint
from tests.support.streams import Stream, complete
from tests.support.waiting import until

GREEDY = {
    "model": "tiny",
    "prompt": "the water at the end of the penstock",
    "max_tokens": 400,
    "ignore_eos": True,
    "temperature": 0,
}


def descendants(up: subprocess.Popen[bytes], name: str = "") -> list[psutil.Process]:
    found = []
    for process in psutil.Process(up.pid).children(recursive=True):
        try:
            if name in " ".join(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


async def test_up_survives_its_controller_and_drains_on_ctrl_c(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "tiny", window=1024)
    command = [
        sys.executable,
        "-m",
        "services.cli",
        "up",
        "--port",
        "0",
        "--model",
        str(tmp_path / "tiny"),
    ]
    log = tmp_path / "up.log"
    with log.open("wb") as sink:
        up = subprocess.Popen(
            command,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={
                **os.environ,
                "PENSTOCK_DATA_DIR": str(tmp_path / "data"),
                "PENSTOCK_INTERNAL_SECRET": "",  # its own, which its data directory keeps
            },
        )
    everything: list[psutil.Process] = []
    try:

        def is_up() -> bool:
            assert up.poll() is None, log.read_text()
            return "Penstock is up." in log.read_text()

        await until(is_up, 240, "penstock up")
        running = json.loads((tmp_path / "data" / "running.json").read_text())
        headers = {"Authorization": f"Bearer {running['key']}"}
        async with httpx.AsyncClient(base_url=running["url"], headers=headers, timeout=60) as api:
            expected = await complete(api, GREEDY)

            stream = Stream(api, GREEDY)
            await stream.reached(chunks=5)
            (controller,) = descendants(up, "ray::ServeController")
            controller.kill()
            assert await stream.finished() == expected, "it never noticed"
            assert await complete(api, GREEDY) == expected, "nor do new requests"

            await until(lambda: bool(descendants(up, "ray::ServeController")), 60, "a new one")
            stream = Stream(api, GREEDY)
            await stream.reached(chunks=5)
            everything = descendants(up)
            up.send_signal(signal.SIGINT)
            assert await stream.finished() == expected, "a drain lets it finish"
        assert await asyncio.to_thread(up.wait, 90) == 0, log.read_text()
        _, left = psutil.wait_procs(everything, timeout=10)
        assert not left, "nothing is left running"
    finally:
        for process in [*everything, *([psutil.Process(up.pid)] if up.poll() is None else [])]:
            if process.is_running():
                process.kill()
        up.wait()

"""The libraries of an image's build through this host's pip, whatever index that is set up for.

A build knows nothing of this host's settings. Here pip downloads what constraints.txt names, and a
server on the loopback offers it to the build as a package index.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

ROOT = Path(__file__).parents[2]
# Of Pythons older than this host's: wanted by their version, which pip does not ask for here.
_OF_OLDER_PYTHONS = ["async-timeout"]


@contextmanager
def package_index(folder: Path) -> Iterator[str]:
    """The address of an index with all that the build asks for; kept in `folder` for a next time.

    Raises CalledProcessError when pip cannot get it.
    """
    wheels, index = folder / "wheels", folder / "index"
    _download(wheels)
    for wheel in wheels.glob("*.whl"):
        name = re.sub(r"[-_.]+", "-", wheel.name.split("-")[0]).lower()
        link = index / name / wheel.name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.hardlink_to(wheel)
    serve = partial(_Quiet, directory=str(index))
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def _download(wheels: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["project"]["dependencies"], *project["build-system"]["requires"], "uv"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--only-binary", ":all:", "--dest", str(wheels)]
    command += ["--constraint", str(ROOT / "constraints.txt"), *wanted, *_OF_OLDER_PYTHONS]
    subprocess.run(command, check=True)


class _Quiet(SimpleHTTPRequestHandler):
    """A folder of links is a package index."""

    def log_message(self, *_: object) -> None:
        pass

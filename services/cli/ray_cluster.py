"""The local Ray under the graph: on the loopback, behind a token, its state on disk.

Ray's state service (GCS) keeps what it knows in the data directory, so that a killed one is started
again and nobody notices. Ray's own store for that, RocksDB, and not Redis: Ray would put the
password of Redis on the command lines of its processes, and GCS would end whenever Redis does.
"""

import logging
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

from services.cli.lean_ray import leave_out_what_serves_nobody
from services.common.secrets import kept_secret, private_folder


class RayLost(Exception):
    """What cannot be replaced has ended: all of Ray has to be started anew."""


class RayCluster:
    """This process is its driver: `start` once, `tend` often, `stop`."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._ray: Any = None  # the library, once it is wholly imported
        self._node: Any = None

    def start(self) -> None:
        """Returns when Ray and Serve's controller run."""
        self._prepare()
        import ray
        from ray import serve

        self._ray = ray
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        leave_out_what_serves_nobody()
        on_sigterm = signal.getsignal(signal.SIGTERM)
        ray.init(
            address="local",
            include_dashboard=False,
            configure_logging=False,
            log_to_driver=False,
            namespace="penstock",
            _temp_dir=_private_temp_dir(),
        )
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own prints a stack trace and aborts
        self._node = ray._private.worker._global_node
        serve.start(proxy_location="Disabled")

    @property
    def logs(self) -> Path | None:
        """Folder of the logs of Ray's processes and the replicas; None before the start."""
        return None if self._node is None else Path(self._node.get_logs_dir_path())

    def _prepare(self) -> None:
        """Ray reads these when it is imported, and hands them on to all its processes."""
        kept_secret(self._data_dir, "ray-token")
        state = self._data_dir / "ray"
        shutil.rmtree(state, ignore_errors=True)  # of a Ray that is no more
        os.environ.pop("RAY_AUTH_TOKEN", None)  # it would be used in place of the file
        os.environ.update(
            RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN_PATH=str(self._data_dir / "ray-token"),
            RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # 127.0.0.1 only
            RAY_USAGE_STATS_ENABLED="0",  # no phoning home
            RAY_SERVE_LOG_TO_STDERR="0",
            RAY_worker_niceness="0",  # else 15: the services would wait for whatever else runs here
            RAY_gcs_storage="rocksdb",
            RAY_gcs_storage_path=str(private_folder(state)),
        )

    def tend(self) -> list[str]:
        """Starts what ended and can be started again; says what. Raises RayLost."""
        dead = {name for name, _ in self._node.dead_processes()}
        if "raylet" in dead:
            raise RayLost("Ray's node manager (raylet) ended, and with it all services")
        if "gcs_server" not in dead:
            return []
        self._node.kill_gcs_server(check_alive=False)  # forgets the dead one
        self._node.start_gcs_server()  # on the same port
        return ["Ray's state service (gcs) ended; started again"]

    def stop(self) -> None:
        """Ends Ray's processes, the replicas with them."""
        if self._ray is not None:
            self._ray.shutdown()


def _private_temp_dir() -> str:
    """Where Ray puts its sockets and logs. It opens every folder that it makes there to all users
    (0777), who could put their own sockets and links in place of its: so they lie in one of ours.

    Not in the data directory: a socket's path has at most 107 bytes, and Ray's part takes 64.
    """
    return str(Path(tempfile.mkdtemp(prefix="penstock-")) / "ray")  # 0700

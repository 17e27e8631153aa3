"""The local Ray under the graph: on the loopback, behind a token, its state on disk.

Ray's state service (GCS) keeps what it knows in the data directory, so that a killed one is started
again and nobody notices. Ray's own store for that, RocksDB, and not Redis: Ray would put the
password of Redis on the command lines of its processes, and GCS would end whenever Redis does.
"""

import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Any

from services.cli.ground.lean_ray import leave_out_what_serves_nobody
from services.cli.plain import without_colours
from services.cli.stack.logs import new_logs
from services.common.locks.secrets import kept_secret, private_folder


class RayLost(Exception):
    """What cannot be replaced has ended: all of Ray has to be started anew."""


_SESSION = "session"  # as Ray calls one run of itself, and the folder of it


class RayCluster:
    """This process is its driver: `start` once, `tend` often, `stop`.

    What is to outlive it, logs too, is in `data_dir`; its sockets are below `sockets`.
    """

    def __init__(self, data_dir: Path, sockets: Path) -> None:
        self._data_dir = data_dir
        self._sockets = sockets
        self.logs: Path | None = None  # of all its processes and the replicas; made by the start
        self._ray: Any = None  # the library, once it is wholly imported
        self._node: Any = None

    def start(self) -> None:
        """Returns when Ray and Serve's controller run."""
        self._prepare()
        import ray

        from services.app import start_serve

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
            _temp_dir=str(self._sockets / "ray"),
        )
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own prints a stack trace and aborts
        self._node = ray._private.worker._global_node
        start_serve()

    def _prepare(self) -> None:
        """Lays out its folders: Ray opens each of its own to all users (0777), who could put their
        sockets and links in place of its, so they lie in closed ones. And sets what Ray reads when
        it is imported, and hands on to all its processes."""
        kept_secret(self._data_dir, "ray-token")
        self.logs = new_logs(self._data_dir)
        session = self._sockets / "ray" / _SESSION
        session.mkdir(parents=True)
        (session / "logs").symlink_to(self.logs)
        state = self._data_dir / "ray"
        _remove_old(state)
        # Which session this state is of. Ray would take a name for it that we cannot know before.
        (private_folder(state) / "session_name").write_text(_SESSION)
        without_colours()
        os.environ.pop("RAY_AUTH_TOKEN", None)  # it would be used in place of the file
        os.environ.update(
            RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN_PATH=str(self._data_dir / "ray-token"),
            RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # 127.0.0.1 only
            RAY_USAGE_STATS_ENABLED="0",  # no phoning home
            RAY_worker_niceness="0",  # else 15: the services would wait for whatever else runs here
            # The next three take CPU whatever is done, which engines on the same cores lack. With a
            # loop of its own for our code, the default, each message of gRPC wakes Serve's as well.
            RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD="0",
            RAY_SERVE_METRICS_EXPORT_INTERVAL_MS="0",  # else 100: nobody reads them here
            RAY_SERVE_CONTROL_LOOP_INTERVAL_S="0.25",  # else 0.1: most of what controller, GCS take
            RAY_gcs_storage="rocksdb",
            RAY_gcs_storage_path=str(state),
        )

    def resources(self) -> dict[str, float]:
        """What all its nodes have together, by Ray's names ("CPU", "GPU", ...)."""
        return dict(self._ray.cluster_resources())

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


def _remove_old(state: Path) -> None:
    """Of a Ray that is no more; where it stayed, that one would be gone on with."""
    if not state.exists():
        return
    try:
        shutil.rmtree(state)
    except OSError as error:
        raise RuntimeError(
            f"{state}, an earlier Ray's state, cannot be removed: {error}"
        ) from error

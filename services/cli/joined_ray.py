"""A Ray cluster that exists, with this host among its nodes: `penstock up --address` uses it."""

import asyncio
import logging
import os
import signal
import socket
from typing import Any

from services.common.config import Settings
from services.common.transport import refuses_strangers

_TIMEOUT_S = 5.0
_CHECK_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"  # a method of Ray's state service


class JoinedRay:
    """This process becomes a driver: `start` once, `tend` often, `stop`, which ends nothing of
    Ray but a Serve that is left without applications."""

    logs = None  # they are where Ray keeps them, on each of its nodes

    def __init__(self, address: str, settings: Settings) -> None:
        """`address`: HOST:PORT of the cluster's state service (GCS), or "auto"."""
        self._address = address
        self._settings = settings
        self._ray: Any = None

    def start(self) -> None:
        """Returns when Serve's controller runs. Raises RuntimeError when there is no cluster, this
        host is none of its nodes, or it lets in anybody."""
        self._take_token()
        if self._address != "auto":
            _check_reached(self._address)
        import ray
        from ray import serve

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        on_sigterm = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(
                address=self._address,
                configure_logging=False,
                log_to_driver=False,
                namespace="penstock",
            )
        except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
            raise RuntimeError(
                f"--address {self._address}: {error}\nIs this host a node of that cluster "
                "(`ray start --address`), and PENSTOCK_RAY_TOKEN its token?"
            ) from error
        finally:
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own prints a stack trace and aborts
        self._ray = ray
        address = ray.get_runtime_context().gcs_address
        if not asyncio.run(refuses_strangers(address, _CHECK_ALIVE)):
            raise RuntimeError(
                f"the Ray cluster at {address} asks nobody for a token, so whoever reaches it runs "
                "code there: start its nodes with RAY_AUTH_MODE=token"
            )
        serve.start(proxy_location="Disabled")

    def _take_token(self) -> None:
        """Sets what Ray reads when it is imported; without a setting, Ray looks where it does."""
        os.environ.update(RAY_AUTH_MODE="token", RAY_USAGE_STATS_ENABLED="0")
        token, file = self._settings.ray_token.get_secret_value(), self._settings.ray_token_file
        if file is not None:
            if not file.is_file():
                raise RuntimeError(f"setting PENSTOCK_RAY_TOKEN_FILE: there is no file {file}")
            os.environ.pop("RAY_AUTH_TOKEN", None)  # it would be used in place of the file
            os.environ["RAY_AUTH_TOKEN_PATH"] = str(file.resolve())
        elif token:
            os.environ["RAY_AUTH_TOKEN"] = token

    def resources(self) -> dict[str, float]:
        """What all its nodes have together, by Ray's names ("CPU", "GPU", ...)."""
        return dict(self._ray.cluster_resources())

    def nodes(self) -> list[str]:
        """The addresses of those that live."""
        return [n["NodeManagerAddress"] for n in self._ray.nodes() if n["Alive"]]

    def applications(self) -> list[str]:
        """Those of its Serve, whosever they are."""
        from ray import serve

        return list(serve.status().applications)

    def tend(self) -> list[str]:
        """Nothing of it is this process's to start again."""
        return []

    def stop(self) -> None:
        """Leaves the cluster."""
        if self._ray is None:
            return
        if not self.applications():
            from ray import serve

            serve.shutdown()
        self._ray.shutdown()


def _check_reached(address: str) -> None:
    """Ray itself would try for a minute."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise RuntimeError(f"--address {address}: it is HOST:PORT, or auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _TIMEOUT_S).close()
    except OSError as error:
        raise RuntimeError(
            f"--address {address}: no Ray cluster there: {error.strerror or error}"
        ) from error

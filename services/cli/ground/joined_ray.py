"""A Ray cluster that exists, with this host among its nodes: `penstock up --address` uses it."""

import logging
import os
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc

from services.cli.interruptible import run
from services.cli.plain import without_colours
from services.common.config import Settings
from services.common.transport import refuses_strangers

_TIMEOUT_S = 5.0
_CHECK_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"  # a method of Ray's state service


class JoinedRay:
    """This process becomes a driver: `start` once, `stop`, which ends nothing of Ray but a Serve
    that is left without applications."""

    def __init__(self, address: str, settings: Settings) -> None:
        """`address`: HOST:PORT of the cluster's state service (GCS), or "auto"."""
        self._address = address
        self._settings = settings
        self._ray: Any = None

    def start(self) -> None:
        """Returns when Serve's controller runs. Raises RuntimeError when there is no cluster, this
        host is none of its nodes, or it lets in anybody."""
        self._take_token()
        address = _found() if self._address == "auto" else self._address
        _check_reached(address)
        _check_locked(address)  # before the token goes there
        without_colours()
        import ray

        from services.app import start_serve

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        on_sigterm = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(
                address=address,
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
        start_serve()

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

    def runs(self, application: str) -> bool:
        """Whether Serve does; True while it cannot be asked."""
        try:
            return application in self._applications()
        except self._ray.exceptions.ActorDiedError:  # it is restarted, unless it was shut down
            return False
        except self._ray.exceptions.RayError:
            return True

    def _applications(self) -> list[str]:
        """Those of its Serve, whosever they are."""
        from ray import serve

        return list(serve.status().applications)

    def stop(self) -> None:
        """Leaves the cluster."""
        if self._ray is None:
            return
        with suppress(self._ray.exceptions.RayError):  # Serve is gone, or cannot be asked
            if not self._applications():
                from ray import serve

                serve.shutdown()
        self._ray.shutdown()


def uses_tls() -> bool:
    """Whether Ray's own connections are encrypted."""
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


def _found() -> str:
    """Of the cluster that this host is a node of, as Ray finds it. Raises RuntimeError."""
    from ray._private import services

    try:
        return str(services.canonicalize_bootstrap_address("auto"))
    except (ConnectionError, ValueError) as error:
        raise RuntimeError(f"--address auto: {error}") from error


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


def _check_locked(address: str) -> None:
    try:
        locked = run(refuses_strangers(address, _CHECK_ALIVE, _credentials()))
    except RuntimeError as error:
        raise RuntimeError(f"{error}\nIs RAY_USE_TLS set here as it is there?") from error
    if not locked:
        raise RuntimeError(
            f"the Ray cluster at {address} asks nobody for a token, so whoever reaches it runs "
            "code there: start its nodes with RAY_AUTH_MODE=token"
        )


def _credentials() -> grpc.ChannelCredentials | None:
    """Those that Ray is told to use by its own variables, if any. Raises RuntimeError."""
    if not uses_tls():
        return None
    names = ("RAY_TLS_CA_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_SERVER_CERT")
    try:
        pems = [Path(os.environ[name]).read_bytes() for name in names]
    except KeyError as missing:
        raise RuntimeError(f"RAY_USE_TLS is set and needs {missing.args[0]}") from None
    except OSError as error:
        raise RuntimeError(f"RAY_USE_TLS is set: {error}") from error
    return grpc.ssl_channel_credentials(*pems)

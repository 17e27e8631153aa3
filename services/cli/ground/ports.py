"""The ports that the settings name, and why one could not be listened on. For `up`, which says so
before anything starts, and for `doctor`."""

import errno
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from services.common.config import Settings
from services.common.discovery import SERVICES

DOORS = ("PENSTOCK_GATEWAY__PORT", "PENSTOCK_GATEWAY__GRPC_PORT")


@dataclass(frozen=True)
class Port:
    setting: str
    what: str  # it is for
    host_setting: str
    host: str
    port: int


def wanted_ports(settings: Settings) -> Iterator[Port]:
    """All but those that are left to the system."""
    own, host = settings.gateway, "PENSTOCK_GATEWAY__HOST"
    grpc_port = own.grpc_port if own.grpc_port is not None else own.port + bool(own.port)
    wanted = [
        Port(DOORS[0], "the public REST API", host, own.host, own.port),
        Port(DOORS[1], "the public gRPC API", host, own.host, grpc_port),
    ]
    for service in SERVICES:
        for kind in ("internal_port", "metrics_port", "health_port"):
            setting = f"PENSTOCK_{service.upper()}__{kind.upper()}"
            port = getattr(settings.of_service(service), kind) or 0
            what = f"the {service}'s {kind.replace('_', ' ')}"
            wanted.append(Port(setting, what, "PENSTOCK_BIND_HOST", settings.bind_host, port))
    yield from (one for one in wanted if one.port)


def why_not(error: OSError, port: Port) -> str:
    """In words, what kept it from being bound."""
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return f"setting {port.host_setting}: {port.host} is no address of this host"
    if error.errno == errno.EACCES:
        return f"setting {port.setting}: port {port.port} is not this user's to take"
    return f"setting {port.setting}: port {port.port} on {port.host} is in use"


def bind_error(port: Port) -> OSError | None:
    """What whoever wants to listen there alone would meet."""
    with socket.socket(socket.AF_INET6 if ":" in port.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((port.host, port.port))
        except OSError as error:
            return error
    return None


def check_ports(settings: Settings) -> None:
    """Raises RuntimeError that names the setting of the first that cannot be listened on. The
    gateways' are left to who holds them (services/cli/ground/doors.py)."""
    for port in wanted_ports(settings):
        if port.setting not in DOORS and (error := bind_error(port)) is not None:
            raise RuntimeError(why_not(error, port)) from error

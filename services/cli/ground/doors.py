"""The gateways' ports on this host: chosen and held before there is a gateway."""

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from services.cli.ground.ports import DOORS, Port, why_not
from services.common.config import Settings


@contextmanager
def held_ports(settings: Settings) -> Iterator[Settings]:
    """The settings with the gateways' ports, which are this user's until the end: sockets that do
    not listen hold them, and each gateway listens beside them (SO_REUSEPORT).

    So all gateways share one door, port 0 becomes one port, and a gateway that is started anew
    finds its own. Raises RuntimeError where somebody listens already.
    """
    own = settings.gateway
    with ExitStack() as held:
        beside = own.port + 1 if own.port else 0
        wanted = (own.port, beside if own.grpc_port is None else own.grpc_port)
        port, grpc_port = (
            held.enter_context(_held(Port(name, "", "PENSTOCK_GATEWAY__HOST", own.host, number)))
            for name, number in zip(DOORS, wanted, strict=True)
        )
        update = {"port": port, "grpc_port": grpc_port}
        yield settings.model_copy(update={"gateway": own.model_copy(update=update)})


@contextmanager
def _held(wanted: Port) -> Iterator[int]:
    host, port = wanted.host, wanted.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as alone, socket.socket(family) as holder:
        alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            alone.bind((host, port))  # fails beside one that listens, even if that would share
        except OSError as error:
            hint = "; try --port 0" * (error.errno == errno.EADDRINUSE)
            raise RuntimeError(why_not(error, wanted) + hint) from error
        port = int(alone.getsockname()[1])
        alone.close()
        # Not SO_REUSEADDR: of two that only start, the second is to see the first.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            holder.bind((host, port))
        except OSError:  # the last connections of one that listened here and did not share
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind((host, port))
            # From now on nobody else's socket beside it may begin to listen.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        yield port

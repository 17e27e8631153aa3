"""The gateways' ports are chosen and held before there is a gateway."""

import socket
from collections.abc import Iterator

import pytest

from services.cli.ground.doors import held_ports
from services.common.config import GatewaySettings, Settings
from tests.support.laptop import free_port


def listener(port: int, shared: bool) -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        made.bind(("127.0.0.1", port))
        made.listen()
    except OSError:
        made.close()
        raise
    return made


def settings(port: int, grpc_port: int | None = 0) -> Settings:
    return Settings(gateway=GatewaySettings(port=port, grpc_port=grpc_port))


@pytest.fixture
def taken(request: pytest.FixtureRequest) -> Iterator[int]:
    """A port on which somebody listens, who shares it or not."""
    with listener(0, shared=request.param) as somebody:
        yield somebody.getsockname()[1]


def test_gateways_listen_beside_one_another_on_the_ports_that_are_held() -> None:
    with held_ports(settings(0)) as held:
        port, grpc_port = held.gateway.port, held.gateway.grpc_port
        assert port
        assert grpc_port
        assert port != grpc_port
        with listener(port, shared=True) as one, listener(port, shared=True):
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                pass
            one.close()
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                pass
        with pytest.raises(OSError, match="in use"):
            listener(port, shared=False)
    with listener(port, shared=False):
        pass


@pytest.mark.parametrize("taken", [False, True], indirect=True)
def test_a_port_on_which_somebody_listens_is_refused(taken: int) -> None:
    """Even by one who would share it: another Penstock of this user."""
    told = rf"PORT: port {taken} on 127.0.0.1 is in use; try --port 0"
    with pytest.raises(RuntimeError, match=told), held_ports(settings(taken)):
        pass
    with pytest.raises(RuntimeError, match=told), held_ports(settings(0, taken)):
        pass
    with held_ports(settings(0)):
        pass


def test_of_two_that_only_start_the_second_sees_the_first() -> None:
    with held_ports(settings(0)) as first, pytest.raises(RuntimeError, match="in use"):
        held_ports(settings(first.gateway.port)).__enter__()


def test_the_grpc_port_is_beside_the_other() -> None:
    port = free_port()
    with held_ports(settings(port, None)) as held:
        assert (held.gateway.port, held.gateway.grpc_port) == (port, port + 1)


def test_a_port_is_free_once_nobody_listens_there_whatever_is_left_of_connections() -> None:
    for shared in (False, True):
        with listener(0, shared) as before:
            port = before.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
                before.accept()[0].close()  # first: what is left of it stays a minute
                assert client.recv(1) == b""
        with held_ports(settings(port)):
            pass


def test_a_socket_that_was_bound_before_cannot_take_the_door_later() -> None:
    """It does not listen, so the door is free; were it to listen while no gateway does, clients
    would send it their keys."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        gateway = GatewaySettings(port=port, grpc_port=0)
        with held_ports(Settings(gateway=gateway)):
            with pytest.raises(OSError, match="in use"):
                other.listen()
            with socket.socket() as ours:
                ours.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                ours.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                ours.bind(("127.0.0.1", port))
                ours.listen()


def test_a_host_of_elsewhere_is_told_as_such() -> None:
    away = Settings(gateway=GatewaySettings(host="192.0.2.1", port=0))
    with pytest.raises(RuntimeError) as told, held_ports(away):
        pass
    assert str(told.value) == "setting PENSTOCK_GATEWAY__HOST: 192.0.2.1 is no address of this host"


@pytest.mark.parametrize("ports", [{"port": 8000, "grpc_port": 8000}, {"port": 65535}])
def test_rest_and_grpc_need_a_port_each(ports: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="grpc_port"):
        GatewaySettings(**ports)  # type: ignore[arg-type]
    GatewaySettings(port=0, grpc_port=0)

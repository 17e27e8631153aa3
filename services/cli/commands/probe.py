"""`penstock probe`: whether a service of this container takes requests; exit code 0 if so.

For an engine's health checks. The gateway is asked at its door (`/readyz`), the others at their
health port, which knows no TLS. Where they listen is where they are reached: to connect to 0.0.0.0
or :: is to connect to this host.
"""

import argparse
import sys

import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.cli.interruptible import run
from services.common.config import Settings
from services.common.transport import dial_door, host_port

_TIMEOUT_S = 5.0


def main(arguments: argparse.Namespace) -> int:
    settings = Settings()
    if arguments.service == "gateway":
        told = _door(settings)
    else:
        told = run(_health(settings, arguments.service))
    print(f"{arguments.service}: {told}", file=sys.stdout if told == "ready" else sys.stderr)
    return 0 if told == "ready" else 1


def _door(settings: Settings) -> str:
    """`ready`, or what the gateway says instead. Raises httpx.HTTPError."""
    own = settings.gateway
    if own.port == 0:
        raise ValueError("PENSTOCK_GATEWAY__PORT is 0: where it listens is not known")
    url = f"{'https' if own.tls_cert else 'http'}://{host_port(own.host, own.port)}/readyz"
    # Whatever its certificate is: it need not be for this address, and nothing secret is sent.
    answer = httpx.get(url, timeout=_TIMEOUT_S, verify=False, trust_env=False)
    return "ready" if answer.status_code == 200 else f"HTTP {answer.status_code} {answer.text}"


async def _health(settings: Settings, service: str) -> str:
    """`ready`, or the state that gRPC's health service tells. Raises grpc.RpcError."""
    port = settings.of_service(service).health_port
    if not port:
        raise ValueError(f"PENSTOCK_{service.upper()}__HEALTH_PORT is not set: nothing to ask")
    async with dial_door(host_port(settings.bind_host, port)) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        answer = await check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
        status = answer.status
    serving = status == health_pb2.HealthCheckResponse.SERVING
    return "ready" if serving else str(health_pb2.HealthCheckResponse.ServingStatus.Name(status))

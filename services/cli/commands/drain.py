"""`penstock drain`: replicas take no more requests, and end those that they run.

By default those of this host, before it is taken out of service; it ends nothing by itself.
Standard output has a line for each replica; the exit code is 0 when all of them drain (with
`--wait`: are drained), also when none is here, but others are elsewhere.

Of the certificates it takes the command line's own, which may drain any replica. Where that is not,
as in the pods of services, it takes each replica's own identity, which may drain those of its host.
"""

import argparse
import asyncio
import sys

import grpc

from protos import host_pb2, host_pb2_grpc
from services.cli.interruptible import run
from services.cli.registry import looked, settings_here
from services.common.config import Settings
from services.common.discovery import Replica, machine_id
from services.common.grpc_options import KEEPALIVE
from services.common.locks.certificates import CertificateError
from services.common.locks.secrets import redacted
from services.common.transport import Transport

_TIMEOUT_S = 10.0  # for an answer
_MARGIN_S = 15.0  # beyond what a replica says that its drain takes
# Each service after those that call it: what these still run has its way to the end.
_WAVES = (("gateway",), ("tokenizer", "retrieval"), ("router",), ("worker",))


def main(arguments: argparse.Namespace) -> int:
    return run(_main(arguments))


async def _main(arguments: argparse.Namespace) -> int:
    settings = settings_here()
    registry = await looked(settings)
    serving, draining = registry.serving, registry.draining
    every = {replica.id: replica for replica in (*serving, *draining)}  # one may be just in between
    chosen = _chosen(list(every.values()), arguments)
    if not chosen:
        print(_none_here(list(every.values()), settings))
        return 0
    waves = [[r for r in chosen if r.service in wave] for wave in _WAVES]
    if not arguments.wait:
        waves = [chosen]
    done = True
    for wave in waves:
        drains = (_drained(replica, settings, arguments.wait) for replica in wave)
        done = all(await asyncio.gather(*drains)) and done
    return 0 if done else 1


def _none_here(elsewhere: list[Replica], settings: Settings) -> str:
    """Raises RuntimeError when there is none anywhere: the settings point to nothing."""
    if not elsewhere:
        raise RuntimeError(
            f"nothing is registered as {settings.namespace!r} in Redis at "
            f"{redacted(settings.redis_dsn)}: nothing is drained"
        )
    hosts = ", ".join(sorted({_host(replica) for replica in elsewhere}))
    return f"no replica of Penstock is registered on this host; they are at {hosts} (--node HOST)"


def _chosen(replicas: list[Replica], arguments: argparse.Namespace) -> list[Replica]:
    """Raises RuntimeError when there is none of what was named."""
    if arguments.replica:
        found = [replica for replica in replicas if replica.id == arguments.replica]
        named = f"no replica {arguments.replica}"
    elif arguments.node:
        found = [r for r in replicas if _host(r) == arguments.node.strip("[]")]
        named = f"no replica at {arguments.node}"
    else:
        return [r for r in replicas if r.host_id.startswith(f"{machine_id()}/")]
    if not found:
        raise RuntimeError(f"{named} is registered; `penstock status` lists them")
    return found


def _host(replica: Replica) -> str:
    return replica.address.rpartition(":")[0].strip("[]")


def _transport(settings: Settings, service: str) -> Transport:
    """Raises CertificateError, which names the file, when there is no certificate to do it with."""
    folder = settings.tls_dir
    whole = folder is None or (folder / "cli").exists() or not (folder / service).exists()
    return Transport.of(settings, "cli" if whole else service)


async def _drained(replica: Replica, settings: Settings, wait: bool) -> bool:
    """Whether it drains, or with `wait` is drained; says so, or why not."""
    who = f"{replica.id} at {replica.address}"
    try:
        transport = _transport(settings, replica.service)
    except CertificateError as error:
        print(f"penstock: {who} is not drained: {error}", file=sys.stderr)
        return False
    async with transport.dial(replica.address, replica.service, KEEPALIVE) as channel:
        drain = host_pb2_grpc.HostStub(channel).Drain
        try:
            told = await drain(host_pb2.DrainRequest(), timeout=_TIMEOUT_S)
            if wait and not told.drained:
                print(f"{who}: drains, for {told.at_most_s:g} s at most", flush=True)
                patience_s = told.at_most_s + _MARGIN_S
                told = await drain(host_pb2.DrainRequest(wait=True), timeout=patience_s)
        except grpc.aio.AioRpcError as error:
            why = f"{error.code().name}: {error.details()}"
            print(f"penstock: {who} does not answer: {why}", file=sys.stderr)
            return False
    print(f"{who}: {'is drained' if told.drained else 'drains'}", flush=True)
    return True

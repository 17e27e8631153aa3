"""The registered replicas: complete, well, of one version, with one checkpoint for each model."""

import asyncio
import time
from email.utils import parsedate_to_datetime
from itertools import groupby
from operator import itemgetter

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.cli.doctor.findings import Finding, failed, ok, warning
from services.cli.doctor.installation import Installation
from services.cli.doctor.redis import clock
from services.common.discovery import Replica
from services.common.versions import version

_ANSWER_S = 3.0
_CLOCK_S = 2.0  # HTTP tells whole seconds
_NEEDED = ("gateway", "tokenizer", "router", "worker")
_WELL = health_pb2.HealthCheckResponse.SERVING


async def check(it: Installation) -> list[Finding]:
    if it.redis is None:
        return [ok("services", "none run with this data directory; `penstock up` starts them")]
    if not it.registry_read:
        return [failed("services", "the registry in Redis cannot be read", "see redis")]
    if not it.replicas:
        told = f"nothing is registered as {it.settings.namespace!r}"
        return [failed("services", told, "start Penstock, or correct PENSTOCK_NAMESPACE")]
    each = await asyncio.gather(*(_well(it, replica) for replica in it.replicas))
    clocks = await asyncio.gather(*(_metrics(replica) for replica in it.replicas))
    return [*_complete(it), *each, *_versions(it.replicas), *_digests(it), *_merged(clocks)]


async def _well(it: Installation, replica: Replica) -> Finding:
    """Asks by Watch: unlike Check it wants the secret, as all other calls do."""
    about = replica.id
    if it.transport is None:
        told = f"{replica.address} is not asked: no internal secret, or no certificate, is here"
        return failed(about, told, "set PENSTOCK_INTERNAL_SECRET (and PENSTOCK_TLS_DIR) as there")
    try:
        async with it.transport.dial(replica.address, replica.service) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(), timeout=_ANSWER_S
            )
            answer = await watch.read()
            watch.cancel()
    except grpc.aio.AioRpcError as error:
        return _no_answer(about, replica.address, error)
    if answer is grpc.aio.EOF or answer.status != _WELL:
        told = f"{replica.address} is draining, or its own check failed"
        return failed(about, told, "see its log; it is replaced by whoever supervises it")
    return ok(about, f"{replica.address} serves{_facts(replica)}")


def _no_answer(about: str, address: str, error: grpc.aio.AioRpcError) -> Finding:
    code, said = error.code(), error.details()
    if code == grpc.StatusCode.UNAUTHENTICATED:
        told = f"{address} does not take our internal secret"
        return failed(about, told, "set the same PENSTOCK_INTERNAL_SECRET everywhere")
    if code == grpc.StatusCode.PERMISSION_DENIED:
        told = f"{address} does not let this certificate's name call it"
        return failed(about, told, "give the folder `cli` of PENSTOCK_TLS_DIR its own certificate")
    return failed(
        about,
        f"{address} does not answer: {code.name}: {said}",
        "it died a moment ago, the network lies between, or one end has TLS that the other "
        "does not trust (PENSTOCK_TLS_DIR)",
    )


def _facts(replica: Replica) -> str:
    facts = replica.facts
    told = [facts[name] for name in ("role", "model", "device") if name in facts]
    told += [f"kernels: {facts['kernels']}"] if "kernels" in facts else []
    return f" ({', '.join(told)})" if told else ""


def _complete(it: Installation) -> list[Finding]:
    found = [
        failed("services", f"no {service} is registered", f"start one; see the {service}'s log")
        for service in _NEEDED
        if not it.of_service(service)
    ]
    if not it.of_service("retrieval"):
        told = "no retrieval is registered: answers have no passages, files are not indexed"
        found.append(warning("services", told, "start one; see its log"))
    workers = it.of_service("worker")
    served = {name for t in it.of_service("tokenizer") for name in _models(t)}
    for model in sorted(served):
        roles = {w.facts.get("role") for w in workers if w.facts.get("model") == model}
        if workers and not roles & {"decode", "both"}:
            told = f"no worker that decodes {model} is registered: its requests fail"
            found.append(failed("services", told, "see the workers' logs"))
    return found


def _models(tokenizer: Replica) -> list[str]:
    return [name for name in tokenizer.facts.get("models", "").split(",") if name]


def _versions(replicas: list[Replica]) -> list[Finding]:
    told = sorted({replica.version or "unknown" for replica in replicas} | {version()})
    if len(told) == 1:
        return [ok("versions", f"all are Penstock {told[0]}")]
    text = f"Penstock {', '.join(told)} side by side; this command is {version()}"
    return [warning("versions", text, "well during an upgrade; else finish it")]


def _digests(it: Installation) -> list[Finding]:
    told = sorted(
        (w.facts.get("model", ""), w.facts.get("digest", "")) for w in it.of_service("worker")
    )
    found = []
    for model, pairs in groupby(told, key=itemgetter(0)):
        digests = sorted({digest for _, digest in pairs})
        about = f"model {model}"
        if len(digests) == 1:
            found.append(ok(about, f"one checkpoint on all its workers, {digests[0]}"))
        else:
            text = f"its workers loaded different checkpoints: {', '.join(digests)}"
            found.append(failed(about, text, "give all workers of a model the same files"))
    return found


async def _metrics(replica: Replica) -> Finding:
    """Of a replica's metrics: whether they can be scraped, and its host's clock by their date."""
    about = f"clock of {replica.id}"
    if not replica.metrics_url:
        return warning(about, "it serves no metrics", "see its log")
    try:
        async with httpx.AsyncClient(timeout=_ANSWER_S, trust_env=False) as http:
            answer = await http.get(replica.metrics_url)
        answer.raise_for_status()
        told = parsedate_to_datetime(answer.headers["date"]).timestamp()
    except (httpx.HTTPError, KeyError, ValueError) as error:
        text = f"no metrics from {replica.metrics_url}: {error or type(error).__name__}"
        return warning(about, text, "open the way to its metrics port, or restart it")
    return clock(about, told - int(time.time()), _CLOCK_S)


def _merged(clocks: list[Finding]) -> list[Finding]:
    """Those that are wrong; if none is, one line for all."""
    wrong = [finding for finding in clocks if finding.state != "ok"]
    return wrong or [ok("clocks", f"all replicas' agree with ours within {_CLOCK_S:g} s")]

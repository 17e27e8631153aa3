"""The registered replicas: complete, well, of one version, with one checkpoint for each model."""

import asyncio
import time
from collections import Counter, defaultdict
from email.utils import parsedate_to_datetime
from itertools import groupby
from operator import itemgetter

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.cli.commands.doctor.findings import Finding, failed, ok, warning
from services.cli.commands.doctor.installation import Installation
from services.cli.commands.doctor.redis import clock
from services.cli.stack.replicas import of_worker, workers_of
from services.cli.stack.wanted_models import WantedModels
from services.common.config import ModelSpec
from services.common.discovery import Replica
from services.common.redis import RedisAway, RedisError
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
    return [
        *_complete(it),
        *await _models(it),
        *each,
        *_versions(it.replicas),
        *_digests(it),
        *_merged(clocks),
    ]


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
    for name in ("kernels", "dtype", "quantization", "threads", "weights"):
        told += [f"{name}: {facts[name]}"] if name in facts else []
    if "kv_format" in facts:  # behind the checkpoint that it is of
        told.append(f"KV: {facts['kv_format'].partition(' ')[2]}")
    if huge := int(facts.get("huge_bytes", 0)):
        told.append(f"{huge / 2**20:.0f} MiB in huge pages")
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
    return found


async def _models(it: Installation) -> list[Finding]:
    """Whether each model has the workers that it was given, and one that decodes."""
    wanted, here = await _wanted(it), defaultdict[str, list[Replica]](list)
    for worker in it.of_service("worker"):
        here[worker.facts.get("model", "")].append(worker)
    found = []
    for model in sorted({*here, *wanted}):
        have = Counter(of_worker(worker) for worker in here[model])
        pools = workers_of(wanted[model]) if model in wanted else {}
        told = [f"{have[who]} of {n} {who}" for (_, who), n in pools.items() if have[who] < n]
        advice = _way_back([r for r in it.draining if r.facts.get("model") == model])
        if not any(worker.facts.get("role") in ("decode", "both") for worker in here[model]):
            text = f"no worker that decodes {model} is registered"
            found.append(failed(f"workers of {model}", text, advice))
        elif told:
            text = f"{', '.join(told)} registered"
            found.append(warning(f"workers of {model}", text, advice))
    return found


def _way_back(drained: list[Replica]) -> str:
    if not drained:
        return "see the workers' logs"
    names = ", ".join(f"{one.id} (pid {one.pid})" for one in drained)
    return f"drained, and so until they end: {names}; end them, and Serve starts others"


async def _wanted(it: Installation) -> dict[str, ModelSpec]:
    """Those that `penstock up` keeps; empty where another keeps them."""
    assert it.redis is not None
    try:
        return await WantedModels(it.redis, it.settings.namespace).all()
    except (*RedisAway, RedisError):  # which the check of Redis tells
        return {}


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

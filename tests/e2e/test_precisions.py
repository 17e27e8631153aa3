"""One checkpoint in two precisions under two names, side by side in one Penstock: each answers as
its own weights do, and nothing of one is taken for the other's: prefixes, hand-over, prices."""

import json
import re
from collections.abc import AsyncIterator
from contextlib import closing
from decimal import Decimal
from typing import Any

import httpx
import pytest
import pytest_asyncio

from services.cli.commands.doctor import examine
from services.common.config import ModelSpec, Settings
from services.gateway.metering.ledger import Ledger
from services.worker.engine import EngineConfig, Request, Sampling
from services.worker.engine.engine import Engine
from tests.support.cluster import ROOT, Cluster, Process
from tests.support.findings import about

pytestmark = pytest.mark.asyncio(loop_scope="module")

DEMO = str(ROOT / "models" / "demo")
INT8: Any = {"quantization": "int8"}
MODELS = [
    ModelSpec(name="demo", path=DEMO, prefill={}, decode={}),  # type: ignore[arg-type]
    ModelSpec(name="demo@int8", path=DEMO, worker=INT8, decode={}),  # type: ignore[arg-type]
]
PRICES = {"demo": {"output": 2}, "demo@int8": {"output": 1}}
"""Per million tokens."""
PROMPT = list(range(100, 400))
_COMPUTED = re.compile(r"^penstock_worker_prefill_tokens_total\{.*\} (\S+)$", re.MULTILINE)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def penstock(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Of the stored one a worker for prompts and one that decodes; of the rounded one a worker."""
    own = {
        "PENSTOCK_ROUTER__SPLIT": "always",
        "PENSTOCK_METERING__PRICES": json.dumps(PRICES),
    }
    async with Cluster(tmp_path_factory.mktemp("penstock"), MODELS, environment=own) as cluster:
        settings = Settings(models=MODELS).of_worker(MODELS[1], "both").worker
        rounded = cluster.spawn(
            "worker",
            WORKER__ROLE=settings.role,
            WORKER__MODEL=settings.model,
            WORKER__QUANTIZATION=settings.quantization,
        )
        await cluster.start(workers=[settings.role, "prefill", "decode"])
        await cluster.up(rounded)
        yield cluster


async def ask(penstock: Cluster, model: str, **fields: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 1}
    async with penstock.api() as http:
        answer = await http.post("/v1/completions", json=body | {"ignore_eos": True} | fields)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    assert told["model"] == model
    return told


async def cached(penstock: Cluster, model: str, prompt: list[int]) -> int:
    usage = (await ask(penstock, model, prompt=prompt, max_tokens=2))["usage"]
    found: int = usage["prompt_tokens_details"]["cached_tokens"]
    return found


def alone(quantization: str) -> list[float]:
    """What an engine thinks of each of its tokens."""
    config = EngineConfig(DEMO, dtype="float32", quantization=quantization, threads=1)
    sampling = Sampling(12, temperature=0, ignore_eos=True, logprobs=1)
    told: list[float] = []
    with closing(Engine(config)) as engine:
        engine.add(Request("it", PROMPT, sampling))
        while engine.has_work:
            for output in engine.step().outputs:
                told += [one.logprob for one in output.logprobs or ()]
    return told


async def computed(worker: Process) -> float:
    assert worker.replica is not None
    async with httpx.AsyncClient() as http:
        (told,) = _COMPUTED.findall((await http.get(worker.replica.metrics_url)).text)
    return float(told)


async def test_each_is_listed_and_answers_as_its_own_weights_do(penstock: Cluster) -> None:
    async with penstock.api() as http:
        listed = (await http.get("/v1/models")).json()["data"]
        one = (await http.get("/v1/models/demo@int8")).json()
    assert {each["id"]: each.get("parent") for each in listed} == dict.fromkeys(PRICES)
    assert one["id"] == "demo@int8"
    stored, rounded = alone("auto"), alone("int8")
    assert rounded != pytest.approx(stored, abs=1e-3), "one can be told from the other"
    for _ in range(2):  # of the second the prompt comes from the cache
        for model, expected in (("demo", stored), ("demo@int8", rounded)):
            told = (await ask(penstock, model))["choices"][0]["logprobs"]
            assert told["token_logprobs"] == pytest.approx(expected, abs=1e-4), model


async def test_prefixes_and_hand_over_are_each_ones_own(penstock: Cluster) -> None:
    """A prompt that one has computed is new to the other, whose worker computes it alone, though
    prompts go to the other's prefill worker wherever they may."""
    prompt, worker = [*range(400, 700)], penstock.worker
    full = (len(prompt) - 1) // 16 * 16
    for model, other in (("demo", "demo@int8"), ("demo@int8", "demo")):
        prompt = prompt[::-1]
        computes = {"demo": worker("prefill"), "demo@int8": worker("both")}
        before = {name: await computed(one) for name, one in computes.items()}
        assert await cached(penstock, model, prompt) == 0
        assert await computed(computes[model]) - before[model] == len(prompt)
        assert await computed(computes[other]) == before[other]
        assert await cached(penstock, model, prompt) == full
        assert await cached(penstock, other, prompt) == 0
        assert await cached(penstock, other, prompt) == full
    assert await computed(worker("decode")) == 0


async def test_they_are_told_apart_by_digest(penstock: Cluster) -> None:
    facts = [p.replica.facts for p in penstock.of("worker") if p.replica]
    digests = {name: {f["digest"] for f in facts if f["model"] == name} for name in PRICES}
    assert all(len(found) == 1 for found in digests.values())
    assert digests["demo"] != digests["demo@int8"]
    for fact in facts:
        assert fact["kv_format"].startswith(fact["digest"])
    assert {f["model"]: f["quantization"] for f in facts} == {"demo": "auto", "demo@int8": "int8"}
    settings = Settings(
        redis_url=penstock.redis.url,
        namespace=penstock.namespace,
        data_dir=penstock.folder / "data",
        models=MODELS,
    )
    findings = await examine(settings)
    for name, (digest,) in digests.items():
        told = [(one.state, one.told) for one in findings if one.about == f"model {name}"]
        assert told == [
            ("ok", f"{DEMO} can be read, {digest}"),
            ("ok", f"one checkpoint on all its workers, {digest}"),
        ]
    rounded = penstock.worker("both").replica
    assert rounded is not None
    found = about(findings, rounded.id)
    assert found.state == "ok"
    assert "demo@int8" in found.told
    assert "quantization: int8" in found.told


async def test_each_has_its_price_and_its_lines_in_the_ledger(penstock: Cluster) -> None:
    ledger = Ledger(penstock.client, penstock.namespace)
    before = [one.entry async for one in ledger.entries()]
    for model in PRICES:
        await ask(penstock, model, max_tokens=5)
    entries = [one async for one in ledger.entries() if one.entry not in before]
    assert {one.model: (one.status, one.output) for one in entries} == dict.fromkeys(
        PRICES, ("ok", 5)
    )
    costs = {one.model: one.cost for one in entries}
    assert costs == {"demo": Decimal(5 * 2) / 10**6, "demo@int8": Decimal(5) / 10**6}

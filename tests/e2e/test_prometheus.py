"""A real Prometheus looks at the running platform: it finds all replicas, what they tell is what
docs/metrics.md says, and every rule and dashboard can be computed from it."""

import asyncio
import json
import re
import subprocess
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio
import yaml

from deploy.observability.grafana.pages import PAGES
from services.metrics_doc import all_families
from tests.observability.test_dashboards import queries
from tests.support.cluster import Cluster
from tests.support.prometheus import Prometheus, tool
from tests.support.promql import OBSERVABILITY, RULES, rules
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")
SECRET_WORDS = "xylophone Qeynos"  # of a prompt
WITHOUT_A_GPU = re.compile(r"penstock_gpu_\w+")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def prometheus(
    penstock: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Prometheus]:
    """With the configuration that is shipped, in a hurry; the platform has answered something."""
    gateway = penstock.of("gateway")[0].replica
    assert gateway is not None
    config = yaml.safe_load((OBSERVABILITY / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(RULES / "*.yaml")]
    (discovery,) = config["scrape_configs"][0]["http_sd_configs"]
    discovery["url"] = gateway.metrics_url.replace("/metrics", "/targets")
    discovery["refresh_interval"] = "1s"
    async with penstock.api() as http:
        # The second answer is long: what comes in one arrival has no tokens per second.
        for prompt, length in ((SECRET_WORDS, 12), (f"{SECRET_WORDS} " * 30, 400)):
            body = {"model": "tiny", "prompt": prompt, "max_tokens": length, "ignore_eos": True}
            async with http.stream(
                "POST", "/v1/completions", json={**body, "stream": True}
            ) as answer:
                assert answer.status_code == 200
                await answer.aread()
    folder = tmp_path_factory.mktemp("prometheus")
    async with Prometheus(folder, yaml.safe_dump(config)) as server:
        yield server


async def test_all_replicas_are_found_and_scraped(
    penstock: Cluster, prometheus: Prometheus
) -> None:
    expected = {
        p.replica.metrics_url for p in penstock.processes if p.replica and p.popen.poll() is None
    }

    async def scraped() -> bool:
        active = (await prometheus.ask("targets"))["activeTargets"]
        found = {target["scrapeUrl"]: target["health"] for target in active}
        return {url for url, health in found.items() if health == "up"} >= expected

    await until(scraped, 30, "all targets are up")

    async def counted() -> bool:  # a scrape of a busy process may have failed since
        found = await prometheus.query("count by (service) (up == 1)")
        return {s["metric"]["service"] for s in found} == {p.service for p in penstock.processes}

    await until(counted, 30, "a series of each service")


async def test_every_rule_is_evaluated_without_an_error(prometheus: Prometheus) -> None:
    async def evaluated() -> bool:
        groups = (await prometheus.ask("rules"))["groups"]
        told = [rule for group in groups for rule in group["rules"]]
        wrong = {rule["name"]: rule["lastError"] for rule in told if rule.get("lastError")}
        assert not wrong
        return len(told) == len(rules()) and all(
            rule["health"] == "ok"
            for group in groups
            for rule in group["rules"]
            if group["name"] != "penstock-levels-long"  # every two minutes
        )

    await until(evaluated, 60, "all rules are evaluated")

    async def recorded() -> bool:  # a rule may have looked before the first scrape
        return bool(await prometheus.query("penstock:kv_use:ratio"))

    await until(recorded, 20, "the share of KV in use is recorded")
    firing = await prometheus.query('ALERTS{alertstate="firing", severity="critical"}')
    assert firing == [], "nothing is wrong with it"


async def test_every_query_of_the_dashboards_is_answered(prometheus: Prometheus) -> None:
    for page in PAGES:
        for query in queries(page):
            await prometheus.ask("query", query=query)


async def test_what_is_told_is_what_the_page_of_metrics_says(
    penstock: Cluster, prometheus: Prometheus
) -> None:
    told: dict[str, str] = {}
    text = ""
    async with httpx.AsyncClient() as http:
        for process in penstock.processes:
            if process.replica and process.popen.poll() is None:
                page = (await http.get(process.replica.metrics_url)).text
                text += page
                told.update(re.findall(r"^# TYPE (penstock_\w+) (\w+)$", page, re.M))
    # The client tells beside a counter or a histogram when it was made.
    told = {name: kind for name, kind in told.items() if not name.endswith("_created")}
    documented = {f.name: f.kind for f in all_families().values()}
    without = {name for name in documented if WITHOUT_A_GPU.fullmatch(name)}
    assert told == {name: kind for name, kind in documented.items() if name not in without}
    # Their labels too, wherever there is a series.
    for name, labels in re.findall(r"^(penstock_\w+)\{(.*)\} ", text, re.M):
        base = re.sub(r"_(bucket|sum|count|created)$", "", name)
        family = (
            all_families().get(name) or all_families().get(base) or all_families()[f"{base}_total"]
        )
        assert set(re.findall(r'(\w+)="', labels)) - {"le"} == set(family.labels), name
    assert (await prometheus.query("sum(penstock_worker_steps_total)"))[0]["value"][1] != "0"


@pytest.mark.parametrize(
    "query",
    [
        'penstock_gateway_generations_total{model="tiny",outcome="ok"} >= 2',
        'penstock_gateway_time_to_first_token_seconds_count{model="tiny"} >= 2',
        'penstock_gateway_output_tokens_per_second_count{model="tiny"} >= 1',
        'penstock_gateway_tenant_tokens_total{tenant="test",kind="completion"} >= 24',
        'sum(penstock_stage_seconds_count{service="router",stage="admit"}) >= 2',
        'sum(penstock_stage_seconds_count{service="worker",stage="prefill"}) >= 2',
        'sum(penstock_worker_prefill_seconds_count{role="prefill"}) >= 1',
        'sum(penstock_worker_decode_token_seconds_count{role="decode"}) >= 1',
        "sum(penstock_worker_kv_sent_bytes_total) > 0",
        'penstock_router_ready_workers{model="tiny",role="decode"} == 1',
        "min(penstock_redis_reachable) == 1",
        "min(penstock_worker_engine_resident_memory_bytes) > 1e6",
        "max(penstock_worker_pending_requests) == 0",
    ],
)
async def test_what_was_asked_is_seen(prometheus: Prometheus, query: str) -> None:
    async def seen() -> bool:
        return bool(await prometheus.query(query))

    await until(seen, 20, query)


async def test_promtool_likes_what_is_told(penstock: Cluster) -> None:
    """Its linter: help texts, units, suffixes."""
    for service in ("gateway", "retrieval", "tokenizer", "router", "worker"):
        replica = penstock.of(service)[0].replica
        assert replica is not None
        text = (await asyncio.to_thread(httpx.get, replica.metrics_url)).text
        own = [line for line in text.splitlines() if "penstock_" in line]
        done = subprocess.run(
            [tool("promtool"), "check", "metrics"],
            input="\n".join(own) + "\n",
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr


async def test_no_log_has_a_word_of_a_prompt_and_every_line_is_json(
    penstock: Cluster, prometheus: Prometheus
) -> None:
    requests = 0
    for process in penstock.processes:
        text = process.log.read_text(errors="replace")
        for word in SECRET_WORDS.split():
            assert word not in text, process.service
        for line in text.splitlines():
            if line.startswith("{"):
                told = json.loads(line)
                assert {"time", "level", "logger", "message", "service"} <= set(told)
                requests += process.service == "gateway" and "trace_id" in told
    assert requests >= 2, "a request's line has its trace"

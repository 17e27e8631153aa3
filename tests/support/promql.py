"""What a query asks for, by a real parser of PromQL; and whether anybody tells it."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import promql_parser
import yaml

from services.metrics_doc import all_families

OBSERVABILITY = Path(__file__).parents[2] / "deploy" / "observability"
RULES = OBSERVABILITY / "prometheus" / "rules"
OF_TARGETS = {"instance", "job", "service", "replica", "pod", "namespace"}
"""Labels that scraping adds."""
OTHERS = {
    "ALERTS",  # Prometheus' own, as `up`
    "up",
    "process_cpu_seconds_total",  # of Prometheus' client, in every replica
    "process_resident_memory_bytes",
    "redis_commands_processed_total",  # Redis' exporter
    "redis_connected_clients",
    "redis_memory_max_bytes",
    "redis_memory_used_bytes",
    "redis_rdb_changes_since_last_save",
    "collections_total",  # Qdrant
    "grpc_responses_total",
    "rest_responses_total",
    "ray_cluster_active_nodes",  # Ray
    "ray_object_store_memory",
    "ray_serve_deployment_replica_healthy",
}
"""What others tell."""


def parsed(query: str) -> Any:
    """Raises ValueError for what is no PromQL."""
    return promql_parser.parse(query)


def selectors(node: Any) -> Iterator[tuple[str, set[str]]]:
    """The metrics in a parsed query, each with the labels that it is matched by."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node.name or "", {matcher.name for matcher in node.matchers.matchers}
    for below in ("lhs", "rhs", "expr", "param", "vector_selector"):
        if (found := getattr(node, below, None)) is not None:
            yield from selectors(found)
    for argument in getattr(node, "args", None) or ():
        yield from selectors(argument)


def rules() -> list[dict[str, Any]]:
    """All of them, recording and alerting, as they stand in the files."""
    files = [yaml.safe_load(file.read_text()) for file in sorted(RULES.glob("*.yaml"))]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


def alerts() -> dict[str, dict[str, Any]]:
    """By name."""
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


@cache
def _labels() -> dict[str, set[str] | None]:
    """Every name that may stand in a query, with the labels to match it by; None: any."""
    known: dict[str, set[str] | None] = {}
    for family in all_families().values():
        own = {*family.labels, *OF_TARGETS}
        known.update({name: {*own, "le"} if "_bucket" in name else own for name in family.series})
    known.update({rule["record"]: None for rule in rules() if "record" in rule})
    return known


def unknown(query: str) -> list[str]:
    """What in the query nobody tells: metrics, and labels that a metric does not have."""
    wrong = []
    for name, matched in selectors(parsed(query)):
        if name in OTHERS:
            continue
        if name not in _labels():
            wrong.append(name)
        elif (own := _labels()[name]) is not None:
            wrong += [f"{name}{{{label}}}" for label in matched - own]
    return wrong

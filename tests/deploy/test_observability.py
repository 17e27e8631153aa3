"""Rules and dashboards of the chart are those of deploy/observability, which is their one place."""

import json
import re
import tarfile
from pathlib import Path

import helm_python
import yaml

from services.common.discovery import SERVICES
from tests.deploy.environment import settings_of, variables
from tests.deploy.manifests import CHART, Release

OBSERVABILITY = CHART.parents[1] / "observability"
RULES = sorted((OBSERVABILITY / "prometheus/rules").rglob("*.yaml"))
DASHBOARDS = sorted((OBSERVABILITY / "grafana").rglob("*.json"))


def test_the_rules_are_all_there_and_the_same(everything: Release) -> None:
    groups = [group for file in RULES for group in yaml.safe_load(file.read_text())["groups"]]
    assert groups
    assert everything.one("PrometheusRule")["spec"]["groups"] == groups


def test_the_dashboards_are_all_there_and_the_same(everything: Release) -> None:
    held = {}
    for thing in everything.of("ConfigMap"):
        if "grafana_dashboard" in thing["metadata"]["labels"]:
            held |= thing["data"]
    assert held == {file.name: file.read_text() for file in DASHBOARDS}
    assert held
    for text in held.values():
        assert len(text) < 2**20, "a ConfigMap holds no more"
        json.loads(text)


def test_a_package_holds_them_as_files(tmp_path: Path) -> None:
    """Who installs a package has no deploy/observability that a link could lead to."""
    with tarfile.open(helm_python.package(CHART, destination=tmp_path)) as package:
        regular = {member.name for member in package if member.isfile()}
    for file in (*RULES, *DASHBOARDS):
        inside = file.relative_to(OBSERVABILITY)
        assert f"penstock/files/observability/{inside}" in regular
    assert not {name for name in regular if "/prometheus/tests/" in name}


def test_what_replicas_log_is_the_pods_own_output(everything: Release) -> None:
    """`kubectl logs` has it; Ray would keep it in files that end with the pod."""
    pods = [pod for pod in everything.pods if pod.owner.startswith("Ray")]
    assert {pod.component for pod in pods} >= {"head", "services", "prefill", "decode"}
    for pod in pods:
        assert variables(pod.spec["containers"][0])["RAY_LOG_TO_STDERR"] == "1"


def test_every_service_is_scraped_and_called_as_the_rules_call_it(everything: Release) -> None:
    settings = settings_of(everything)
    labels = {}
    for endpoint in everything.one("PodMonitor")["spec"]["podMetricsEndpoints"]:
        put = {r["targetLabel"]: r.get("replacement") for r in endpoint["relabelings"]}
        labels[endpoint["portNumber"]] = (put["job"], put.get("service"))
    for service in SERVICES:
        port = settings.of_service(service).metrics_port
        assert labels[port] == ("penstock", service)
    text = "".join(file.read_text() for file in RULES)
    assert set(re.findall(r'job="([^"]+)"', text)) <= {job for job, _ in labels.values()}
    assert set(re.findall(r'\bservice="([^"]+)"', text)) <= set(SERVICES)

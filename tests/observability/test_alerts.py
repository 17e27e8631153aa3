"""Rules, their tests and their runbooks."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.common.config import Section, Settings
from tests.support.prometheus import ROOT, promtool
from tests.support.promql import OBSERVABILITY, RULES, alerts, rules, unknown

TESTS = OBSERVABILITY / "prometheus" / "tests"
RUNBOOKS = ROOT / "docs" / "runbooks"
ALERTS = alerts()


def runbook(alert: str) -> Path:
    url = ALERTS[alert]["annotations"]["runbook_url"]
    return RUNBOOKS / url.rpartition("/")[2]


def test_the_rules_are_rules() -> None:
    promtool("check", "rules", *map(str, sorted(RULES.glob("*.yaml"))))


def test_the_shipped_configuration_is_one() -> None:
    promtool("check", "config", str(OBSERVABILITY / "prometheus" / "prometheus.yml"))


@pytest.mark.parametrize("file", sorted(TESTS.glob("*.yaml")), ids=lambda file: file.stem)
def test_alerts_fire_when_they_should_and_only_then(file: Path) -> None:
    promtool("test", "rules", str(file))


def test_every_alert_is_tested_firing_and_not() -> None:
    checks: list[dict[str, Any]] = []
    for file in TESTS.glob("*.yaml"):
        for test in yaml.safe_load(file.read_text())["tests"]:
            checks += test["alert_rule_test"]
    fired = {check["alertname"] for check in checks if check["exp_alerts"]}
    quiet = {check["alertname"] for check in checks if not check["exp_alerts"]}
    assert (set(ALERTS) - fired, set(ALERTS) - quiet) == (set(), set())


def test_a_metric_in_a_rule_is_one_that_is_told() -> None:
    wrong = {rule.get("alert") or rule["record"]: unknown(rule["expr"]) for rule in rules()}
    assert {name: what for name, what in wrong.items() if what} == {}


@pytest.mark.parametrize("name", sorted(ALERTS))
def test_an_alert_says_what_it_is_and_links_to_its_runbook(name: str) -> None:
    alert = ALERTS[name]
    assert alert["labels"]["severity"] in ("critical", "warning")
    assert alert["annotations"]["summary"]
    assert alert["annotations"]["description"]
    text = runbook(name).read_text()
    assert text.startswith(f"# {name}\n")
    condition = " ".join(alert["expr"].split())
    lasting = f" for {alert['for']}" if "for" in alert else ""
    assert f"\n{alert['labels']['severity']}; fires on `{condition}`{lasting}.\n" in text
    sections = re.findall(r"^## (.+)$", text, re.M)
    assert sections == ["Meaning", "First look", "What to do"]
    assert "kubectl" in text
    assert f"[{name}]({runbook(name).name})" in (RUNBOOKS / "README.md").read_text()


def test_there_is_no_runbook_without_its_alert() -> None:
    assert {file for file in RUNBOOKS.glob("*.md") if file.name != "README.md"} == {
        runbook(name) for name in ALERTS
    }


def settings() -> set[str]:
    names = set()
    for name, field in Settings.model_fields.items():
        names.add(f"PENSTOCK_{name.upper()}")
        kind: Any = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            names |= {f"PENSTOCK_{name.upper()}__{own.upper()}" for own in kind.model_fields}
    return names


@pytest.mark.parametrize("file", sorted(RUNBOOKS.glob("*.md")), ids=lambda file: file.stem)
def test_a_runbook_names_only_what_there_is(file: Path) -> None:
    text = file.read_text()
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (file.parent / link).exists(), link
    for document in re.findall(r"docs/[\w/.-]+\.(?:md|yaml)", text):
        assert document == "docs/operations.md" or (ROOT / document).exists(), document
    assert set(re.findall(r"PENSTOCK_[A-Z_]+[A-Z]", text)) <= settings()
    for quoted in re.findall(r"`([^`\n]+)`", text):
        if quoted.startswith(("sum", "rate", "increase", "histogram_quantile", "penstock_")):
            assert unknown(quoted) == [], quoted

"""The dashboards: made from the code, and of queries that mean something."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.observability.grafana.make_dashboards import FOLDER, document, file_of
from deploy.observability.grafana.pages import PAGES
from services.metrics_doc import all_families
from tests.support.prometheus import promtool
from tests.support.promql import parsed, rules, selectors, unknown

VALUES = {"__rate_interval": "5m", "model": ".*", "service": ".*"}


def queries(page: Any) -> Iterator[str]:
    """As Grafana sends them: every variable has a value."""
    values = VALUES | {name: value for name, _, value in page.texts}
    for panel in json.loads(file_of(page).read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield re.sub(r"\$(\w+)", lambda name: values[name.group(1)], target["expr"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.uid)
def test_a_dashboard_is_current_and_whole(page: Any) -> None:
    text = file_of(page).read_text()
    assert text == document(page), "run `make docs`"
    made = json.loads(text)
    assert made["uid"] == f"penstock-{page.uid}"
    panels = [panel for panel in made["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["title"]
        assert panel["targets"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        position = panel["gridPos"]
        assert position["x"] + position["w"] <= 24
        assert position["w"] >= (4 if panel["type"] == "stat" else 6), "nothing can be read in it"
    corners = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(corners)) == len(panels)


def test_there_is_no_other_file() -> None:
    assert set(FOLDER.iterdir()) == {file_of(page) for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.uid)
def test_a_metric_on_a_dashboard_is_one_that_is_told(page: Any) -> None:
    wrong = {query: unknown(query) for query in queries(page)}
    assert {query: what for query, what in wrong.items() if what} == {}
    for name, values in page.variables:
        metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", values).groups()  # type: ignore[union-attr]
        assert name == label
        assert unknown(f'{metric}{{{label}="x"}}') == []


def test_prometheus_itself_reads_every_query(tmp_path: Path) -> None:
    asked = [query for page in PAGES for query in queries(page)]
    as_rules = [{"record": f"query:{n}", "expr": query} for n, query in enumerate(asked)]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": as_rules}]}))
    assert f"{len(asked)} rules found" in promtool("check", "rules", str(file)).stdout


def test_every_metric_is_looked_at_somewhere() -> None:
    """By a dashboard or a rule: one that nobody looks at costs and tells nothing."""
    asked = [query for page in PAGES for query in queries(page)]
    asked += [rule["expr"] for rule in rules()]
    seen = {name for query in asked for name, _ in selectors(parsed(query))}
    unseen = {f.name for f in all_families().values() if not f.series & seen}
    assert unseen == {
        "penstock_retrieval_embed_batch_seconds",  # for who measures the embedding model
        "penstock_tokenizer_completion_tokens_total",  # by model; the gateway's are by model too
        "penstock_tokenizer_prompt_tokens_total",
        "penstock_tokenizer_running_requests",  # looked at by the chaos tests
    }

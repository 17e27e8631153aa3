"""What Penstock's dashboards are made of, on Grafana's own types."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import common, stat, timeseries
from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    DatasourceVariable,
    QueryVariable,
    Row,
    TextBoxVariable,
)
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh

_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_HEIGHT = 8
_WIDTH = 24
_GRAPHS, _FIGURES = 4, 6  # in a line: in less room nothing can be read


@dataclass(frozen=True)
class Panel:
    """A graph, or with `now` one figure for each series. `queries`: PromQL and the legend's text;
    `unit` in Grafana's words: s, bytes, percentunit, reqps, short."""

    title: str
    unit: str
    told: str
    queries: Sequence[tuple[str, str]]
    now: bool = False


@dataclass(frozen=True)
class Page:
    """One dashboard: rows of panels, in lines that they share evenly. `variables`: each a name and
    the query of its values; `texts`: each a name, a label and what stands in it at first."""

    uid: str
    title: str
    told: str
    rows: Sequence[tuple[str, Sequence[Panel]]]
    variables: Sequence[tuple[str, str]] = ()
    texts: Sequence[tuple[str, str, str]] = ()


def dashboard(page: Page) -> Dashboard:
    made = (
        Dashboard(f"Penstock: {page.title}")
        .uid(f"penstock-{page.uid}")
        .description(page.told)
        .tags(["penstock"])
        .time("now-1h", "now")
        .refresh("30s")
        .editable()
        .with_variable(DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
    )
    for name, query in page.variables:
        made.with_variable(
            QueryVariable(name)
            .datasource(_SOURCE)
            .query(query)
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .include_all(True)
            .all_value(".*")
            .multi(True)
        )
    for name, label, value in page.texts:
        made.with_variable(TextBoxVariable(name).label(label).default_value(value))
    ids = itertools.count(1)
    for title, panels in page.rows:
        made.with_row(Row(title).id(next(ids)))
        width = _width(panels)
        for panel in panels:
            made.with_panel(_panel(panel, width).id(next(ids)))
    return made


def _width(panels: Sequence[Panel]) -> int:
    """Of each, in as few lines as hold them."""
    most = _FIGURES if all(panel.now for panel in panels) else _GRAPHS
    lines = math.ceil(len(panels) / most)
    return _WIDTH // math.ceil(len(panels) / lines)


def _panel(panel: Panel, width: int) -> stat.Panel | timeseries.Panel:
    drawn = stat.Panel() if panel.now else _graph()
    drawn.title(panel.title).description(panel.told).unit(panel.unit).datasource(_SOURCE)
    drawn.span(width).height(_HEIGHT // 2 if panel.now else _HEIGHT)
    for number, (query, legend) in enumerate(panel.queries):
        asked = Dataquery().expr(query).legend_format(legend).ref_id(chr(ord("A") + number))
        drawn.with_target(asked.instant() if panel.now else asked.range())
    return drawn


def _graph() -> timeseries.Panel:
    legend = common.VizLegendOptions().show_legend(True)
    legend.display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
    return timeseries.Panel().legend(legend).fill_opacity(8).min(0)

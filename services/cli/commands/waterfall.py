"""A request's record as text: the waterfall of its stages, and why each decision fell as it did."""

from typing import Any

from rich.console import Console
from rich.table import Table

_BAR = 40  # columns


def print_record(console: Console, record: dict[str, Any]) -> None:
    """`record` as `GET /v1/requests/{id}` gives it."""
    console.print(_waterfall(record["spans"]))
    console.print(_why(record["decisions"]))


def _waterfall(spans: list[dict[str, Any]]) -> Table:
    table = Table("service", "stage", "start ms", "took ms", "", title="Waterfall", pad_edge=False)
    total = max((span["start_ms"] + span["duration_ms"] for span in spans), default=0) or 1
    for span, depth in _in_tree_order(spans):
        start = round(span["start_ms"] / total * _BAR)
        width = max(1, round(span["duration_ms"] / total * _BAR))
        bar = " " * min(start, _BAR - 1) + "━" * min(width, _BAR - min(start, _BAR - 1))
        table.add_row(
            span["service"],
            "  " * depth + _label(span),
            f"{span['start_ms']:.1f}",
            f"{span['duration_ms']:.1f}",
            bar,
        )
    return table


def _label(span: dict[str, Any]) -> str:
    mode = span["attributes"].get("mode")
    return f"{span['name']} ({mode})" if mode else str(span["name"])


def _in_tree_order(spans: list[dict[str, Any]]) -> list[tuple[dict[str, Any], int]]:
    """Children below their parents by start; a span whose parent is unknown is a root."""
    known = {span["id"] for span in spans}
    children: dict[str, list[dict[str, Any]]] = {}
    for span in sorted(spans, key=lambda span: span["start_ms"]):
        parent = span["parent"] if span["parent"] in known else ""
        children.setdefault(parent, []).append(span)
    ordered: list[tuple[dict[str, Any], int]] = []

    def visit(parent: str, depth: int) -> None:
        for span in children.get(parent, []):
            ordered.append((span, depth))
            visit(span["id"], depth + 1)

    visit("", 0)
    return ordered


def _why(decisions: list[dict[str, Any]]) -> Table:
    table = Table("stage", "decision", "choice", "because", title="Why", pad_edge=False)
    for decision in decisions:
        reasons = ", ".join(f"{key} {value}" for key, value in decision["reasons"].items())
        table.add_row(decision["stage"], decision["subject"], decision["choice"], reasons)
    return table

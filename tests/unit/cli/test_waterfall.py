import io
import re

import pytest
from rich.console import Console

from services.cli.commands.waterfall import print_record


def span(name: str, parent: str, start: float, duration: float) -> dict[str, object]:
    return {
        "service": "gateway",
        "name": name,
        "id": name,
        "parent": parent or None,
        "start_ms": start,
        "duration_ms": duration,
        "attributes": {},
    }


def test_stages_stand_below_their_parents_in_the_order_in_which_they_began() -> None:
    record = {
        "spans": [
            span("late", "root", 50, 10),
            span("early", "root", 1, 5),
            span("root", "", 0, 100),
            span("inner", "early", 2, 1),
            span("orphan", "of another process", 3, 1),
        ],
        "decisions": [
            {"stage": "router", "subject": "split", "choice": "no", "reasons": {"tokens": "12"}}
        ],
    }
    out = io.StringIO()
    print_record(Console(file=out, width=120), record)
    text = out.getvalue()
    names = ["root", "early", "inner", "late", "orphan"]
    assert sorted(names, key=text.index) == names
    assert "split" in text
    assert "tokens 12" in text


def test_an_empty_record_prints_its_tables_without_a_row() -> None:
    out = io.StringIO()
    print_record(Console(file=out, width=120), {"spans": [], "decisions": []})
    assert re.findall(r"\w+", out.getvalue()) == [
        *("Waterfall", "service", "stage", "start", "ms", "took", "ms"),
        *("Why", "stage", "decision", "choice", "because"),
    ]


@pytest.mark.parametrize("duration", [0, 0.0004, 1e9])
def test_a_bar_is_as_long_as_its_share_and_never_outside(duration: float) -> None:
    record = {"spans": [span("one", "", 0, duration), span("two", "", duration, 0)]}
    out = io.StringIO()
    print_record(Console(file=out, width=160), {**record, "decisions": []})
    lines = out.getvalue().splitlines()
    bars = {name: next(line for line in lines if name in line) for name in ("one", "two")}
    assert bars["one"].count("━") == (40 if duration else 1)
    assert bars["two"].count("━") == 1
    if duration:
        assert bars["two"].index("━") == bars["one"].rindex("━"), "at the right end"


def test_a_stage_stands_where_it_began_and_says_in_which_mode() -> None:
    spans = [span("root", "", 0, 100), span("half", "root", 50, 25), span("tail", "half", 98, 2)]
    spans[1]["attributes"] = {"mode": "split"}
    why = {"stage": "router", "subject": "place", "choice": "w", "reasons": {"a": "1", "b": "2"}}
    out = io.StringIO()
    print_record(Console(file=out, width=160), {"spans": spans, "decisions": [why]})
    lines = {
        name: li
        for li in out.getvalue().splitlines()
        for name in ("root", "half", "tail", "place")
        if name in li
    }
    begin = lines["root"].index("━")
    assert lines["half"].index("━") - begin == 20
    assert lines["half"].count("━") == 10
    assert lines["tail"].index("━") - begin == 39
    assert "half (split)" in lines["half"]
    assert "(" not in lines["root"]
    assert [lines[name].index(name) - lines["root"].index("root") for name in ("half", "tail")] == [
        2,
        4,
    ]
    assert "50.0" in lines["half"].split("━")[0]
    assert "25.0" in lines["half"].split("━")[0]
    assert "a 1, b 2" in lines["place"]

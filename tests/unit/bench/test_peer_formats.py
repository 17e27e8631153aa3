"""Beside llama.cpp on the same files: who runs when, what is counted, what the page says."""

from pathlib import Path
from typing import Any

import pytest

from bench.peers import formats
from bench.peers.comparison import LLAMA_CPP, OURS
from bench.peers.formats import Figure

ABOUT = {"date": "some day", "command": "a command", "model": "M4", "threads": 1}


class Fake:
    """Answers in a second, of which it takes half a processor's."""

    def __init__(self, name: str, told: list[tuple[str, str]]) -> None:
        self.name, self._told, self._cpu_s, self._runs = name, told, 7.0, False

    def thaw(self) -> None:
        self._runs = True

    def freeze(self) -> None:
        self._runs = False

    def cpu_s(self) -> float:
        return self._cpu_s

    def run(self, path: Path) -> dict[str, Any]:
        assert self._runs
        self._told.append((self.name, path.stem))
        self._cpu_s += 0.5
        return {"wall_s": 1.0}


def test_each_has_its_turn_alone_and_is_asked_the_same(tmp_path: Path) -> None:
    (tmp_path / "workloads").mkdir()
    told: list[tuple[str, str]] = []
    running: Any = {name: Fake(name, told) for name in (OURS, LLAMA_CPP)}
    found = list(formats._measured(running, "q8_0", "many", 2, tmp_path))
    names = [OURS, LLAMA_CPP] * 2
    assert told == [(name, f"many-{turn // 2}") for turn, name in enumerate(names)]
    assert [figure.contestant for figure in found] == names
    assert {(one.tok_per_s, one.tok_per_cpu_s) for one in found} == {(32 * 32, 2 * 32 * 32)}


@pytest.mark.parametrize(
    ("workload", "requests", "counted"),
    [("decode", 1, 64), ("prefill", 1, 512), ("many", 32, 1024)],
)
def test_what_is_asked_and_counted(
    tmp_path: Path, workload: str, requests: int, counted: int
) -> None:
    """Of a prefill the prompt's tokens, else those that are generated."""
    (tmp_path / "workloads").mkdir()
    running: Any = {OURS: Fake(OURS, [])}
    (found,) = formats._measured(running, "q4_0", workload, 1, tmp_path)
    assert found.tok_per_s == counted
    assert len(formats.asked(workload)) == requests


def test_the_page_sets_medians_beside_what_is_asked() -> None:
    figures = [
        Figure(name, "q8_0", workload, turn, rate + turn, rate / 2, 1.5)
        for workload in formats.ASKED
        for name, rate in ((OURS, 300.0), (LLAMA_CPP, 100.0))
        for turn in (0, 60, 1)
    ]
    told = formats.page(ABOUT, figures)
    assert "| q8_0 | decode | penstock | 301.0 | 150.0 |" in told
    assert "| q8_0 | many | asked 2.0 x | 2.98 x | 3.00 x |" in told
    assert "others used meanwhile: 1.50 to 1.50" in told

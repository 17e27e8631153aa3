"""From repetitions to figures, and from figures to whether each target is met."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

OURS = "penstock"
LLAMA_CPP = "llama.cpp"


@dataclass(frozen=True)
class Repetition:
    """One run of a workload by one contestant. Times in seconds."""

    contestant: str
    model: str
    workload: str
    wall_s: float
    output_tok_per_s: float
    ttft_s: float
    """The median of its requests."""
    itl_s: float
    """The median time between two tokens of a request."""
    itl_p99_s: float
    foreign_cores: float

    @classmethod
    def of(
        cls, contestant: str, model: str, workload: str, answer: dict[str, Any], foreign: float
    ) -> "Repetition":
        """`answer` as bench/peers/drivers/line.py gives it."""
        gaps = sorted(gap for request in answer["requests"] for gap in request["itl_s"])
        tokens = sum(1 + len(request["itl_s"]) for request in answer["requests"])
        return cls(
            contestant,
            model,
            workload,
            wall_s=answer["wall_s"],
            output_tok_per_s=tokens / answer["wall_s"],
            ttft_s=median(request["ttft_s"] for request in answer["requests"]),
            itl_s=median(gaps),
            itl_p99_s=gaps[len(gaps) * 99 // 100],
            foreign_cores=foreign,
        )


@dataclass(frozen=True)
class Floor:
    """What the machine allows at best for one model; see floors.py."""

    w1_tok_per_s: float
    w2_ttft_s: float
    w2_itl_s: float
    w3_wall_s: float
    most_rss: float
    """Bytes: weights times 1.25, keys and values of all tokens of the run, 300 MB."""


@dataclass
class Comparison:
    """All that was measured. A contestant that failed lacks figures, and `failed` says why."""

    repetitions: list[Repetition] = field(default_factory=list)
    start_s: dict[tuple[str, str], float] = field(default_factory=dict)
    """By contestant and model."""
    peak_rss: dict[tuple[str, str], int] = field(default_factory=dict)
    failed: dict[tuple[str, str], str] = field(default_factory=dict)
    floors: dict[str, Floor] = field(default_factory=dict)
    """By model; none where the machine's bandwidth could not be measured."""

    def median(self, contestant: str, model: str, workload: str, figure: str) -> float | None:
        """Of a field of Repetition, over all repetitions; None where there is none."""
        values = [
            getattr(r, figure)
            for r in self.repetitions
            if (r.contestant, r.model, r.workload) == (contestant, model, workload)
        ]
        return median(values) if values else None

    def peers(self, model: str) -> list[str]:
        """Those that have any figure of the model, in the order of their first."""
        told = (r.contestant for r in self.repetitions if r.model == model)
        return [name for name in dict.fromkeys(told) if name != OURS]

    def as_json(self) -> dict[str, Any]:
        def named(by_pair: dict[tuple[str, str], Any]) -> dict[str, Any]:
            return {f"{model}/{contestant}": v for (contestant, model), v in by_pair.items()}

        return {
            "repetitions": [asdict(repetition) for repetition in self.repetitions],
            "start_s": named(self.start_s),
            "peak_rss": named(self.peak_rss),
            "failed": named(self.failed),
            "floors": {model: asdict(floor) for model, floor in self.floors.items()},
            "targets": [asdict(target) | {"met": target.met} for target in targets(self)],
        }


def turns(contestants: Sequence[str], repetitions: int) -> Iterable[tuple[int, str]]:
    """Who runs when: A B C A B C, so that what changes about the machine meets all alike."""
    for repetition in range(repetitions):
        for contestant in contestants:
            yield repetition, contestant


@dataclass(frozen=True)
class Target:
    """Something to reach. `came` is None where it was not measured."""

    words: str
    bound: float
    came: float | None
    at_least: bool
    unit: str = "x"
    against: str = ""
    """The peer that the bound is a share of."""

    @property
    def met(self) -> bool | None:
        if self.came is None:
            return None
        return self.came >= self.bound if self.at_least else self.came <= self.bound


def targets(comparison: Comparison) -> list[Target]:
    """What is to be reached, for the models that were run."""
    models = {repetition.model for repetition in comparison.repetitions}
    asked = [*_small(comparison)] if "S" in models else []
    return [*asked, *_medium(comparison)] if "M" in models else asked


def _small(comparison: Comparison) -> Iterable[Target]:
    against = _Against(comparison, "S")
    yield against.best_peer("w1, output tokens/s", "w1", "output_tok_per_s", max, 1.3)
    yield against.best_peer("w1, p99 between tokens", "w1", "itl_p99_s", min, 0.6)
    yield against.best_peer("w2, first token", "w2", "ttft_s", min, 1.0)
    yield against.peer("w2, between tokens", "w2", "itl_s", LLAMA_CPP, 0.9)
    yield against.best_peer("w3, whole", "w3", "wall_s", min, 0.7)
    yield against.floor("w1, time", "w1", "output_tok_per_s", "w1_tok_per_s", 1.5)
    yield against.floor("w3, time", "w3", "wall_s", "w3_wall_s", 1.5)
    yield against.memory()
    start = comparison.start_s.get((OURS, "S"))
    yield Target("S: start, warm disk", 5.0, start, at_least=False, unit="s")


def _medium(comparison: Comparison) -> Iterable[Target]:
    against = _Against(comparison, "M")
    yield against.best_peer("w1, output tokens/s", "w1", "output_tok_per_s", max, 1.1)
    yield against.bandwidth()
    yield against.memory()


@dataclass(frozen=True)
class _Against:
    """Penstock's medians of one model as ratios."""

    comparison: Comparison
    model: str

    def best_peer(
        self,
        words: str,
        workload: str,
        figure: str,
        best: Callable[..., tuple[float, str]],
        bound: float,
    ) -> Target:
        """`best`: max where more is better, min where less is."""
        found = [
            (value, peer)
            for peer in self.comparison.peers(self.model)
            if (value := self.comparison.median(peer, self.model, workload, figure)) is not None
        ]
        value, peer = best(found) if found else (None, "")
        ratio = _ratio(self._ours(workload, figure), value)
        return Target(f"{self.model}: {words}", bound, ratio, best is max, against=peer)

    def peer(self, words: str, workload: str, figure: str, peer: str, bound: float) -> Target:
        value = self.comparison.median(peer, self.model, workload, figure)
        ratio = _ratio(self._ours(workload, figure), value)
        return Target(f"{self.model}: {words}", bound, ratio, at_least=False, against=peer)

    def floor(self, words: str, workload: str, figure: str, name: str, bound: float) -> Target:
        """How many times the floor's time; a rate is turned over."""
        floor, ours = self._floor(name), self._ours(workload, figure)
        ratio = _ratio(floor, ours) if figure.endswith("_per_s") else _ratio(ours, floor)
        return Target(f"{self.model}: {words}", bound, ratio, at_least=False, against="the floor")

    def bandwidth(self) -> Target:
        """A decode step's bytes over its time, as a share of what a plain read shows."""
        share = _ratio(self._floor("w2_itl_s"), self._ours("w2", "itl_s"))
        words = f"{self.model}: w2, share of a plain read's bandwidth"
        return Target(words, 0.9, share, at_least=True, against="a plain read")

    def memory(self) -> Target:
        used = self.comparison.peak_rss.get((OURS, self.model))
        words = f"{self.model}: peak RSS"
        came = used / 1e6 if used is not None else None
        bound = self._floor("most_rss")
        if bound is None:
            came = None
        return Target(words, (bound or 0.0) / 1e6, came, at_least=False, unit="MB")

    def _ours(self, workload: str, figure: str) -> float | None:
        return self.comparison.median(OURS, self.model, workload, figure)

    def _floor(self, name: str) -> float | None:
        floor = self.comparison.floors.get(self.model)
        return getattr(floor, name) if floor is not None else None


def _ratio(value: float | None, reference: float | None) -> float | None:
    return None if value is None or reference is None else value / reference

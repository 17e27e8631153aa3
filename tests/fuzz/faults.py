"""What goes wrong on purpose, now and then, but never in all of three steps in a row: that would be
an engine which is broken."""

from collections.abc import Callable
from random import Random
from typing import Any

from services.worker.engine.engine import Engine
from services.worker.engine.grammar.matcher import ConstraintError, Matcher, Unavailable
from services.worker.engine.kv import payload as kv_payload
from services.worker.engine.plan import NOT_FINITE

_APART = 6  # steps that go well behind one that does not


class Faults:
    """Of one engine."""

    def __init__(self, rng: Random, engine: Engine, often: float) -> None:
        self._rng, self._often = rng, often
        self._well = 0
        self.seen: set[str] = set()
        self.launched: list[Any] = []
        """Tickets of the steps that have not come back."""
        for wrap in KINDS:
            wrap(self, engine)

    def step(self) -> None:
        self._well -= 1

    def due(self, kind: str) -> bool:
        if self._well > 0 or self._rng.random() >= self._often:
            return False
        self._well = _APART
        self.seen.add(kind)
        return True

    def one_of(self, places: list[int]) -> int:
        return self._rng.choice(places)


def _launches(faults: Faults, engine: Engine) -> None:
    """No memory for what a step needs, at once or when it is to sample."""
    runner, real, sample = engine._runner, engine._runner.launch, engine._runner.sample

    def launch(plan: Any) -> Any:
        if faults.due("launch"):
            raise MemoryError
        faults.launched.append(real(plan))
        return faults.launched[-1]

    def then(ticket: Any, allowed: Any) -> None:
        if faults.due("sample"):
            raise MemoryError
        sample(ticket, allowed)

    runner.launch, runner.sample = launch, then  # type: ignore[method-assign]


def _results(faults: Faults, engine: Engine) -> None:
    """The device's trouble, and logits that are not finite."""
    runner, real = engine._runner, engine._runner.collect

    def collect(ticket: Any) -> Any:
        if ticket is faults.launched[0]:  # else it stays, which is told at the end
            del faults.launched[0]
        collected = real(ticket)
        if faults.due("collect"):
            raise RuntimeError("device trouble")
        made = [place for place, result in enumerate(collected.results) if result.tokens]
        if len(made) > 1 and faults.due("not finite"):
            collected.results[faults.one_of(made)] = NOT_FINITE
        return collected

    runner.collect = collect  # type: ignore[method-assign]


def _grammars(faults: Faults, engine: Engine) -> None:
    """One that fails on the way, one that takes too long, one that could not be tried."""
    grammars, real = engine.aside._grammars, engine.aside._grammars.find

    def find(*wanted: Any) -> Matcher | None:
        matcher = real(*wanted)
        if matcher is not None and faults.due("panic"):
            matcher.fail(ConstraintError("index out of bounds"))
        elif matcher is not None and faults.due("slow"):
            matcher.allowance.end()
        elif matcher is not None and faults.due("untried"):
            raise Unavailable("no process to try it in")
        return matcher

    grammars.find = find  # type: ignore[method-assign]


KINDS: list[Callable[[Faults, Engine], None]] = [_launches, _results, _grammars]


def no_room(faults: Faults) -> Callable[..., Any]:
    """For `kv_payload.share`: shared memory is full."""
    real = kv_payload.share

    def share(data: Any) -> Any:
        if faults.due("share"):
            raise OSError("no space left")
        return real(data)

    return share

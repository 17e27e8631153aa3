"""What a grammar takes is bounded, and no thread but those for it wait for the library."""

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from time import monotonic, thread_time
from typing import Any

import pytest

from services.worker.engine import Constraint, FinishReason, Request, Sampling
from services.worker.engine.engine import Engine
from services.worker.engine.grammar import filler, grammars, library, matcher
from services.worker.engine.grammar.compiler import Compiler, grammar_of
from services.worker.engine.grammar.filler import Filler, Job
from services.worker.engine.grammar.library import GrammarError, State
from services.worker.engine.grammar.matcher import (
    Allowance,
    Late,
    Matcher,
    Tenant,
    TooSlow,
    Unavailable,
)
from services.worker.engine.plan import Collected, StepPlan
from services.worker.engine.runners.runner import Ticket
from tests.support.checkpoint import write_checkpoint
from tests.unit.engine.driving import drive, make_engine
from tests.unit.engine.guessing import guessing_engine

VOCAB, EOS = 320, 2
PROMPT = list(range(10, 40))
LINES = Constraint("regex", "([a-d]{9} ){7}")
NAMED = Constraint("regex", "(the name that is long|another one): [0-9]{3}!")

ALIKE = "\ns: " + " | ".join(f"a{i}" for i in range(800)) + "\n"
ALIKE += "\n".join(f'a{i}: "x" s? | "xx" s' for i in range(800))
SLOW = {
    "ambiguous": Constraint("grammar", 'start: a\na: a a a | a a | "x" | "y"'),
    "at once": Constraint("grammar", "start: s" + ALIKE),
    "late": Constraint("grammar", "start: /[a-z]{400}/ s" + ALIKE),
    "behind what is forced": Constraint(
        "grammar", f'start: /[a-z]{{400}}/ "{"abcdefghij" * 12}" s' + ALIKE
    ),
}
LONG = {name: {"max_tokens": 900} for name in SLOW}
LONG["ambiguous"] = {"max_tokens": 1000, "min_tokens": 1000}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("constrained"), window=2048)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return make_engine(folder, overlap=True)


def ask(name: str, constraint: Constraint, seed: int = 0, **more: Any) -> Request:
    sampling = Sampling(
        **{"max_tokens": 200, "temperature": 2.0, **more}, seed=seed, constraint=constraint
    )
    return Request(name, PROMPT, sampling)


# In an engine.


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, bool]]:
    """The library's functions that engines made from now on have called, and whether on the test's
    own thread, which is the engine's."""
    found: set[tuple[str, bool]] = set()
    real, own = library.load, threading.get_ident()

    class Told:
        def __init__(self) -> None:
            self._library = real()

        def __getattr__(self, name: str) -> Any:
            found.add((name, threading.get_ident() == own))
            return getattr(self._library, name)

    monkeypatch.setattr(library, "load", Told)
    return found


@pytest.mark.parametrize("way", ["overlapped", "guessing"])
def test_a_slow_grammar_costs_its_own_requests(
    folder: Path, way: str, called: set[tuple[str, bool]]
) -> None:
    """All of them end together, and whoever is beside them is answered as ever. The engine's thread
    calls nothing of the library: what it does there cannot hold it up."""
    more: dict[str, Any] = {"overlap": way == "overlapped"}
    if way == "guessing":
        more = {"speculation": "ngram"}
    engine = make_engine(folder, max_model_len=1024, **more)
    called.clear()  # the vocabulary was read, before there was anybody to hold up
    beside = [replace(ask(str(i), LINES, i), salt=b"other") for i in range(2)]
    wanted = drive(engine, beside)
    slow = [ask(f"{name} {i}", SLOW[name], i, **LONG[name]) for name in SLOW for i in range(2)]
    run = drive(engine, [*slow, *beside])
    for request in slow:
        error = run.last[request.request_id].error
        assert error is not None
        assert (error.code, error.param) == ("invalid_request", "constraint")
        assert "too long to tell" in error.message
    for request in beside:
        assert run.tokens[request.request_id] == wanted.tokens[request.request_id]
    here = {function for function, own in called if own}
    assert here <= {"llg_cancel", "llg_free_matcher", "llg_free_cancellation_handle"}
    elsewhere = {function for function, own in called if not own}
    assert {"llg_matcher_consume_token", "llg_matcher_compute_ff_tokens"} <= elsewhere


@pytest.mark.parametrize("way", ["overlapped", "failing", "guessing"])
def test_who_is_late_loses_a_step_and_nothing_else(
    folder: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Or some steps: tokens and ends are as ever, of those that go on after a split or elsewhere,
    too, and where a step fails that was launched behind a token that did not come."""
    asked = [
        ask(str(i), [LINES, NAMED, Constraint("choice", '["a", "on"]')][i % 3], i) for i in range(6)
    ]
    free = [Request(f"free {i}", PROMPT, Sampling(20, 1.0, seed=i)) for i in range(2)]
    want = drive(engine, [*asked, *free])
    rng, real = random.Random(1), Filler.run
    late = 0

    def run_(self: Filler, jobs: list[Job]) -> list[Exception | None]:
        nonlocal late
        if threading.current_thread() is not threading.main_thread():
            return real(self, jobs)
        turns = [rng.random() < 0.5 for _ in jobs]
        late += turns.count(False)
        done = iter(real(self, [job for job, turn in zip(jobs, turns, strict=True) if turn]))
        return [next(done) if turn else Late() for turn in turns]

    monkeypatch.setattr(Filler, "run", run_)
    if way == "guessing":
        engine = guessing_engine(folder, monkeypatch, want.tokens)
    elif way == "failing":
        fail_some_steps(engine, monkeypatch)
    found = drive(engine, [*asked, *free])
    assert late > 20
    assert found.tokens == want.tokens
    assert {name: last.finish_reason for name, last in found.last.items()} == {
        name: last.finish_reason for name, last in want.last.items()
    }
    assert engine.pool.num_free == engine.pool.num_blocks
    first = want.tokens["2"]  # ends with a token that is taken in late
    for name in ("2", "5"):
        first = want.tokens[name]
        rest = Request(name, PROMPT + first, asked[2].sampling, generated_prefix=len(first))
        last = drive(engine, [rest]).last[name]
        assert (last.finish_reason, last.usage.completion_tokens) == (  # type: ignore[union-attr]
            FinishReason.STOP,
            len(first),
        )


def fail_some_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of several, which are computed again, singly."""
    runner, calls = engine._runner, itertools.count()
    several: list[Ticket] = []
    launch, collect = runner.launch, runner.collect

    def note(plan: StepPlan) -> Ticket:
        ticket = launch(plan)
        if len(plan.lengths) > 1:
            several.append(ticket)
        return ticket

    def fail(ticket: Ticket) -> Collected:
        collected = collect(ticket)
        if any(ticket is one for one in several) and next(calls) % 5 == 3:
            raise MemoryError
        return collected

    monkeypatch.setattr(runner, "launch", note)
    monkeypatch.setattr(runner, "collect", fail)


def test_whose_grammar_was_too_slow_may_try_it_again_later(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One output that took long is no verdict on all that come; asking puts it off no further."""
    form = Constraint("regex", "[a-d]{9}!")
    asked = replace(ask("a", form), salt=b"later")
    drive(engine, [asked])
    engine.aside._grammars._made[form].allowances[b"later"].end()
    began = monotonic()
    for later_s in (0, 20, grammars._REFUSED_S + 1):
        monkeypatch.setattr(matcher, "monotonic", lambda later_s=later_s: began + later_s)
        last = drive(engine, [asked]).last["a"]
        again = later_s > grammars._REFUSED_S
        assert last.finish_reason is (FinishReason.STOP if again else FinishReason.ERROR)


@pytest.mark.parametrize("call", ["consume", "fill"])
@pytest.mark.parametrize("error", [GrammarError("too many states"), MemoryError("no more")])
def test_a_grammar_that_breaks_on_the_way_fails_its_request_alone(
    engine: Engine, call: str, error: Exception
) -> None:
    class Breaks:
        def __init__(self, state: State) -> None:
            self._state, self._calls = state, iter(range(9))

        def __getattr__(self, name: str) -> Any:
            breaks = name == call and next(self._calls) == 4
            return self._break if breaks else getattr(self._state, name)

        def _break(self, *_: object) -> None:
            raise error

    requests = [ask(str(i), LINES, i) for i in range(3)]
    wanted = drive(engine, requests)
    for request in requests:
        engine.add(request)
    while "1" not in engine.scheduler.sequences:
        engine.step()
    broken = engine.scheduler.sequences["1"].matcher
    assert broken is not None
    broken._state = Breaks(broken._copied())  # type: ignore[assignment]
    run = drive(engine, [])
    told = run.last["1"].error
    assert told is not None
    of_the_client = isinstance(error, GrammarError)
    assert told.code == ("invalid_request" if of_the_client else "internal")
    assert told.message == (
        "too many states" if of_the_client else "The grammar failed: MemoryError"
    )
    for name in ("0", "2"):
        assert run.last[name].finish_reason is wanted.last[name].finish_reason


@pytest.mark.parametrize("where", ["made", "mask", "mask of a thread that is there"])
def test_an_engine_without_threads_goes_on(
    folder: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Requests that need one fail; there may be one for the next."""
    free = Request("free", PROMPT, Sampling(9))
    if where == "made":
        engine = make_engine(folder)
    else:
        drive(engine, [ask("a", LINES)])  # its grammar is there
    if where == "mask":
        engine._steps._filler.close()

    def fails(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", fails)
        full.setattr(filler, "clock_gettime", fails)
        run = drive(engine, [ask("a", LINES), free])
    error = run.last["a"].error
    assert error is not None
    assert error.code == "internal"
    assert run.last["free"].finish_reason is FinishReason.LENGTH
    assert drive(engine, [ask("a", LINES)]).last["a"].finish_reason is FinishReason.STOP


def test_a_long_answer_is_taken_in_aside(
    folder: Path, monkeypatch: pytest.MonkeyPatch, called: set[tuple[str, bool]]
) -> None:
    """By a thread of its own, which takes turns; others are answered meanwhile, and who cancels is
    waited for by nobody."""
    engine = make_engine(folder, max_model_len=2048)
    form = Constraint("regex", "[a-z]{1500}!")
    (token,) = drive(engine, [ask("x", Constraint("regex", "q"))]).tokens["x"]
    before = [token] * 1000
    held = threading.Event()
    real = Matcher.take

    def take(self: Matcher, most: int) -> None:
        if threading.current_thread().name == "masks" and self.num_given > 900:
            held.wait(60)
        real(self, most)

    monkeypatch.setattr(Matcher, "take", take)
    long = ask("long", form, max_tokens=3)
    drive(engine, [ask("known", form, max_tokens=1)])
    for name in ("long", "gone"):
        engine.add(Request(name, PROMPT + before, long.sampling, generated_prefix=1000))
    run = drive_until(engine, Request("free", PROMPT, Sampling(5)), "free")
    assert "long" not in run
    engine.cancel("gone")
    held.set()
    last = drive(engine, []).last["long"]
    assert last.finish_reason is FinishReason.LENGTH
    assert ("llg_matcher_consume_token", True) not in called


def test_what_breaks_aside_ends_its_request_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: object) -> None:
        raise MemoryError("no more")

    first = drive(engine, [ask("a", LINES)]).tokens["a"][:3]
    monkeypatch.setattr(State, "consume", breaks)
    rest = Request("a", PROMPT + first, ask("a", LINES).sampling, generated_prefix=len(first))
    run = drive(engine, [rest, Request("free", PROMPT, Sampling(9))])
    error = run.last["a"].error
    assert error is not None
    assert (error.code, error.message) == ("internal", "The grammar failed: MemoryError")
    assert run.last["free"].finish_reason is FinishReason.LENGTH


def drive_until(engine: Any, request: Request, name: str) -> set[str]:
    """Steps until the request with this name has ended; gives who has."""
    engine.add(request)
    ended: set[str] = set()
    while name not in ended:
        ended |= {o.request_id for o in engine.step().outputs if o.finish_reason is not None}
    return ended


# By itself.


class Busy(State):
    """Works until it is broken off, or until it may end."""

    def __init__(self, heeds: bool) -> None:
        self.cancelled, self._heeds = False, heeds
        self.may_end = threading.Event()
        self.took_s = 0.0

    def __del__(self) -> None:
        pass

    def copy(self) -> "Busy":
        return self

    def cancel(self) -> None:
        self.cancelled = True

    def forced(self) -> list[int]:
        began = thread_time()
        while not (self.may_end.is_set() or (self._heeds and self.cancelled)):
            self.took_s = thread_time() - began
        if self.cancelled:
            raise library.Cancelled
        return []


@pytest.fixture(scope="module")
def compiler(folder: Path) -> Compiler:
    return Compiler(str(folder), VOCAB, [EOS])


@pytest.fixture
def fillers() -> Iterator[Callable[[], Filler]]:
    made: list[Filler] = []

    def make() -> Filler:
        made.append(Filler())
        return made[-1]

    yield make
    for one in made:
        one.close()


def job(of: Matcher) -> Job:
    return Job(of, of.go_on)


def test_what_takes_long_is_broken_off(compiler: Compiler, fillers: Callable[[], Filler]) -> None:
    """And nobody goes on with the same allowance; its thread does."""
    run = fillers().run
    good = compiler.matcher(grammar_of(LINES))
    run([job(good.copy())])
    before = threading.active_count()
    allowance = Allowance()
    busy = Busy(heeds=True)
    slow, same = (Matcher(busy, allowance) for _ in range(2))
    errors = run([job(one) for one in (slow, same, good)])
    assert isinstance(errors[0], TooSlow)
    assert isinstance(errors[1], TooSlow)
    assert errors[2] is None
    assert good.words is not None
    assert busy.took_s < 2 * matcher.TOKEN_S
    assert threading.active_count() == before
    assert isinstance(run([job(slow)])[0], TooSlow), "it cannot go on"


def test_what_does_not_end_is_left_to_itself_but_not_many(
    compiler: Compiler, fillers: Callable[[], Filler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filler, "_LEFT", 2)
    run = fillers().run
    good = compiler.matcher(grammar_of(LINES))
    busy = [Busy(heeds=False) for _ in range(2)]
    for one in busy:
        errors = run([job(Matcher(one, Allowance())), job(good.copy(Allowance()))])
        assert isinstance(errors[0], TooSlow)
        assert errors[1] is None or isinstance(errors[1], Late)
    (error,) = run([job(good.copy(Allowance()))])
    assert isinstance(error, Unavailable)
    for one in busy:
        one.may_end.set()
    end = monotonic() + 60
    while isinstance(run([job(good.copy(Allowance()))])[0], Unavailable):
        assert monotonic() < end


def test_who_comes_behind_a_slow_one_is_not_taken_for_it(
    compiler: Compiler, fillers: Callable[[], Filler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is looked at the thread just as the slow one is done and the next has not begun."""
    monkeypatch.setattr(filler, "TOKEN_S", 0.01)
    done, told, looked = (threading.Event() for _ in range(3))

    class Lock:
        def __init__(self) -> None:
            self._lock = threading.Lock()

        def __enter__(self) -> None:
            if threading.current_thread().name != "masks":
                told.wait(60)
            self._lock.acquire()

        def __exit__(self, *_: object) -> None:
            self._lock.release()
            if threading.current_thread().name != "masks":
                looked.set()
            elif done.is_set() and not told.is_set():
                told.set()
                looked.wait(60)

    def slow() -> None:
        end = thread_time() + 0.03
        while thread_time() < end:
            pass
        done.set()

    one, good = fillers(), compiler.matcher(grammar_of(LINES))
    one.run([job(good.copy(Allowance()))])
    assert one._hand is not None
    one._hand._lock = Lock()  # type: ignore[assignment]
    jobs = [Job(good.copy(Allowance()), slow), job(good.copy(Allowance()))]
    assert one.run(jobs) == [None, None]
    assert looked.is_set()


def test_a_step_has_so_much_time_for_all(
    compiler: Compiler, fillers: Callable[[], Filler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whom there is none left for, the step does without. Tenants that have used little go
    first."""
    monkeypatch.setattr(matcher, "_SHARE", 0.0)
    good = compiler.matcher(grammar_of(LINES))
    order: list[str] = []
    many, few = Tenant(), Tenant()
    many.add(-0.1)

    def work(name: str) -> None:
        order.append(name)
        end = thread_time() + 0.6 * filler.STEP_S
        while thread_time() < end:
            pass

    jobs = [
        Job(good.copy(Allowance(tenant)), lambda name=name: work(name))  # type: ignore[misc]
        for name, tenant in [("m0", many), ("m1", many), ("f0", few), ("f1", few)]
    ]
    monkeypatch.setattr(filler, "TOKEN_S", 1.0)
    errors = fillers().run(jobs)
    assert order == ["f0", "f1"]
    assert errors[2:] == [None, None]
    assert all(isinstance(error, Late) for error in errors[:2])


def test_many_texts_of_one_grammar_have_one_allowance(
    compiler: Compiler, fillers: Callable[[], Filler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant's. Who has used it up waits until it has some again; guesses earn nothing."""
    monkeypatch.setattr(matcher, "_SHARE", 0.0)
    run, tenant = fillers().run, Tenant()
    texts = [
        compiler.matcher(grammar_of(Constraint("regex", f"{letter}([a-d]{{9}} ){{7}}")))
        for letter in "abcd"
    ]
    own = [text.copy(Allowance(tenant)) for text in texts]
    assert run([job(one) for one in own]) == [None] * 4
    tenant.add(-1.0)
    again = [text.copy(Allowance(tenant)) for text in texts]
    assert all(isinstance(error, Late) for error in run([job(one) for one in again]))
    other = texts[0].copy(Allowance(Tenant()))
    assert run([job(other)]) == [None]
    other.allowance.tenant.add(-0.1)
    left_s = other.allowance.tenant.left_s
    words = other._copied().no_words()
    guesses = library.np.tile(words, (5, 1))
    run([Job(other, lambda: other.fill_along(guesses, [5, 6, 7, 8]))])
    assert other.allowance.tenant.left_s < left_s
    tenant.add(0.19999)
    for one in again:
        one.give([])
    monkeypatch.setattr(matcher, "_SHARE", 1e9)
    assert run([job(one) for one in again]) == [None] * 4


def test_what_a_tenant_owes_has_an_end(
    compiler: Compiler, fillers: Callable[[], Filler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that could not be broken off took long, whose thread was left to it: his other outputs
    wait some seconds, not a twentyfold of that."""
    now_s = 0.0
    monkeypatch.setattr(matcher, "monotonic", lambda: now_s)
    tenant, run = Tenant(), fillers().run
    good = compiler.matcher(grammar_of(LINES)).copy(Allowance(tenant))
    Allowance(tenant).spend(20.0)
    for now_s, late in ((0.0, True), (3.0, True), (5.0, False)):  # noqa: B007
        (error,) = run([job(good)])
        assert isinstance(error, Late) is late

"""The engine in its own process, driven by EngineClient."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from services.common.children import dying_with_parent
from services.worker.engine import (
    Constraint,
    EngineClient,
    EngineConfig,
    EngineDied,
    EngineLoadError,
    FinishReason,
    KvBlocks,
    Request,
    RequestOutput,
    Sampling,
    SharedRef,
    StepOutput,
)
from services.worker.engine.clock import now_ns
from services.worker.engine.kv import payload as kv_payload
from tests.support.checkpoint import write_checkpoint
from tests.unit.engine.driving import SMALL, drive, greedy, make_engine, make_prompts

Checkpoint = Callable[..., Path]
shares_engine = pytest.mark.asyncio(loop_scope="module")
"""Starting a process takes seconds: tests that leave the engine as it was use one together."""
PROMPT = list(range(3, 43))


class Listener:
    """Gathers what a client tells."""

    def __init__(self) -> None:
        self.steps: list[StepOutput] = []
        self.tokens: dict[str, list[int]] = {}
        self.last: dict[str, RequestOutput] = {}
        self.exports: list[KvBlocks] = []
        self.shared: list[Any] = []
        """Those of them that are in shared memory."""
        self._changed = asyncio.Event()

    def __call__(self, step: StepOutput) -> None:
        self.steps.append(step)
        self.exports += step.kv_exports
        self.shared += [b for b in step.kv_exports if isinstance(b.data, SharedRef)]
        for output in step.outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason:
                self.last[output.request_id] = output
        self._changed.set()

    async def until(self, condition: Callable[[], object], timeout_s: float = 60) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


@pytest.fixture(scope="module")
def config(checkpoint: Checkpoint) -> EngineConfig:
    return EngineConfig(model=str(checkpoint()), **SMALL)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(config: EngineConfig) -> AsyncIterator[tuple[EngineClient, Listener]]:
    listener = Listener()
    client = EngineClient(config, listener)
    await client.start()
    yield client, listener
    await client.stop()
    assert not segments_of(listener)


def segments_of(listener: Listener) -> list[Path]:
    """Files of the engine that made the listener's exports."""
    (name,) = {b.data.name.rsplit("-", 1)[0] for b in listener.shared}
    return list(kv_payload.FOLDER.glob(f"{name}*"))


def wait_until_gone(pid: int, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while _is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} lives on"
        time.sleep(0.02)


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@shares_engine
async def test_streams_what_the_engine_computes(
    engine: tuple[EngineClient, Listener], config: EngineConfig
) -> None:
    client, listener = engine
    requests = [Request(str(i), p, greedy(16)) for i, p in enumerate(make_prompts(12))]
    local = drive(make_engine(Path(config.model)), requests)
    assert client.info
    assert client.info.num_blocks == SMALL["num_blocks"]
    for request in requests:
        client.add(request)
    await listener.until(lambda: len(listener.last) == len(requests))
    assert listener.tokens == local.tokens
    assert [step.step for step in listener.steps] == list(range(1, len(listener.steps) + 1))
    mirror: set[bytes] = set()
    for step in listener.steps:
        for event in step.kv_events:
            (mirror.update if event.stored else mirror.difference_update)(event.hashes)
    assert set(await client.snapshot()) == mirror


@shares_engine
async def test_refuses_cancels_and_sleeps_when_idle(engine: tuple[EngineClient, Listener]) -> None:
    client, listener = engine
    client.add(Request("bad", [], greedy(1)))
    client.add(Request("long", PROMPT, greedy(200)))
    with pytest.raises(ValueError, match="in use"):
        client.add(Request("long", PROMPT, greedy(200)))
    await listener.until(lambda: listener.tokens.get("long"))
    client.cancel("long")
    await listener.until(lambda: "long" in listener.last)
    assert listener.last["long"].finish_reason is FinishReason.CANCELLED
    assert listener.last["bad"].error
    assert listener.steps[-1].load.free_blocks == SMALL["num_blocks"]
    quiet = len(listener.steps)
    before = _cpu_seconds(client.pid)
    await asyncio.sleep(0.5)
    assert len(listener.steps) == quiet
    assert _cpu_seconds(client.pid) - before < 0.2


@shares_engine
async def test_a_cancel_frees_the_blocks_within_two_steps(
    engine: tuple[EngineClient, Listener],
) -> None:
    """Counted by the engine's own clock: what it did before it could know is on its way still."""
    client, listener = engine
    for name in ("gone", "stays"):
        client.add(Request(name, PROMPT, greedy(210), salt=name.encode()))
    await listener.until(lambda: len(listener.tokens.get("gone", [])) > 3)
    client.cancel("gone")
    cancelled_ns = now_ns()
    await listener.until(lambda: "stays" in listener.last)
    after = [step for step in listener.steps if step.started_ns > cancelled_ns]
    told = [
        (number, output)
        for number, step in enumerate(after, start=1)
        for output in step.outputs
        if output.request_id == "gone"
    ]
    assert told[-1][1].finish_reason is FinishReason.CANCELLED
    assert told[-1][0] <= 2
    assert all(number <= 2 for number, output in told if output.new_token_ids)
    held = [step.load.total_blocks - step.load.free_blocks for step in after]
    needed = -(-(len(PROMPT) + 210) // client.info.block_size)  # type: ignore[union-attr]
    assert len(after) > 2
    assert max(held[1:]) <= needed, "both requests hold blocks"


def _cpu_seconds(pid: int | None) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@shares_engine
async def test_steps_go_on_while_all_blocks_wait_for_others(
    engine: tuple[EngineClient, Listener],
) -> None:
    """Queued behind reservations nothing can be computed, but the step number moves."""
    client, listener = engine
    for i in range(SMALL["max_running"]):
        client.add(Request(f"r{i}", PROMPT, greedy(4), remote_prefill=True))
    client.add(Request("queued", PROMPT, greedy(4)))
    await listener.until(lambda: listener.steps and listener.steps[-1].pending == 1)
    started, steps = time.monotonic(), len(listener.steps)
    await listener.until(lambda: len(listener.steps) >= steps + 2)
    assert time.monotonic() - started > 0.5, "it spins"
    for i in range(SMALL["max_running"]):
        client.cancel(f"r{i}")
    await listener.until(lambda: "queued" in listener.last and "r0" in listener.last)


@pytest.mark.parametrize("form", ["inline", "shared"])
@shares_engine
async def test_split_between_processes(
    engine: tuple[EngineClient, Listener], config: EngineConfig, form: str
) -> None:
    client, listener = engine
    prompt = PROMPT if form == "shared" else PROMPT[::-1]
    request = Request(form, prompt, greedy(12), salt=form.encode())
    whole = drive(make_engine(Path(config.model)), [request])
    prefill, decode = f"{form}-prefill", f"{form}-decode"
    client.add(replace(request, request_id=decode, remote_prefill=True))
    client.add(
        replace(request, request_id=prefill, prefill_only=True, export_kv=form)  # type: ignore[arg-type]
    )
    await listener.until(lambda: prefill in listener.last)
    listener.exports, exports = [], listener.exports
    assert all(isinstance(b.data, SharedRef) == (form == "shared") for b in exports)
    for blocks in exports:
        client.write_kv(replace(blocks, request_id=decode))
    client.start_decode(decode, listener.tokens[prefill][0])
    await listener.until(lambda: decode in listener.last)
    assert listener.tokens[prefill] + listener.tokens[decode] == whole.tokens[form]


async def test_a_killed_process_is_noticed_and_cleaned_up(config: EngineConfig) -> None:
    listener = Listener()
    client = EngineClient(config, listener)
    await client.start()
    assert client.pid
    client.add(Request("a", PROMPT, greedy(1), prefill_only=True, export_kv="shared"))
    await listener.until(lambda: "a" in listener.last)
    assert len(segments_of(listener)) == 2, "one, and its owner's file"
    snapshot = asyncio.create_task(client.snapshot())
    os.kill(client.pid, signal.SIGSTOP)
    await asyncio.sleep(0)
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(
        EngineDied, match=r"signal 9 \(Killed\), the kernel's where memory runs out"
    ) as died:
        await asyncio.wait_for(client.wait_closed(), 60)
    assert died.value.killed
    with pytest.raises(EngineDied):
        await snapshot
    with pytest.raises(EngineDied, match="not running"):
        client.add(Request("b", PROMPT, greedy(1)))
    with pytest.raises(EngineDied):
        client.write_kv(listener.exports[0])
    assert not segments_of(listener)
    assert not client.running


async def test_an_exception_of_the_callback_ends_the_engine(config: EngineConfig) -> None:
    def on_step(step: StepOutput) -> None:
        raise KeyError("bug")

    client = EngineClient(config, on_step)
    await client.start()
    client.add(Request("a", PROMPT, greedy(4)))
    with pytest.raises(EngineDied, match="on_step failed: KeyError") as died:
        await asyncio.wait_for(client.wait_closed(), 60)
    assert not died.value.killed, "by this process, which knows why"


async def test_load_errors_reach_the_caller(config: EngineConfig, tmp_path: Path) -> None:
    client = EngineClient(replace(config, model=str(tmp_path)), Listener())
    with pytest.raises(EngineLoadError, match=r"UnsupportedModel: .*config\.json is missing"):
        await client.start()
    assert not client.running


async def test_stop_kills_what_does_not_end(config: EngineConfig) -> None:
    client = EngineClient(config, Listener())
    await client.start()
    assert client.pid
    os.kill(client.pid, signal.SIGSTOP)
    started = time.monotonic()
    await client.stop(timeout_s=0.3)
    assert time.monotonic() - started < 30
    await client.wait_closed()
    await asyncio.to_thread(wait_until_gone, client.pid)


PARENT = """
import asyncio, sys
from services.worker.engine import (EngineClient, EngineConfig)

async def main():
    client = EngineClient(EngineConfig(model=sys.argv[1], num_blocks=8, threads=1), print)
    await client.start()
    print(client.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_the_engine_ends_when_its_parent_is_killed(config: EngineConfig) -> None:
    parent = subprocess.Popen(
        [*dying_with_parent("KILL"), sys.executable, "-c", PARENT, config.model],
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        assert parent.stdout
        pid = int(await asyncio.to_thread(parent.stdout.readline))
        parent.kill()
    await asyncio.to_thread(wait_until_gone, pid)


@shares_engine
async def test_an_interrupt_of_the_terminal_is_the_parents_to_decide(
    engine: tuple[EngineClient, Listener],
) -> None:
    client, listener = engine
    assert client.pid
    os.kill(client.pid, signal.SIGINT)
    client.add(Request("after", PROMPT, greedy(4)))
    await listener.until(lambda: "after" in listener.last)
    assert len(listener.tokens["after"]) == 4


IN_THE_LIBRARY = """
import runpy, sys, threading, time
from services.worker.engine.grammar.library import Vocabulary

real = Vocabulary._in_tokens

def tokens(self, text):
    while threading.current_thread().name == "masks":
        time.sleep(0)
    return real(self, text)

Vocabulary._in_tokens = tokens
sys.argv[1:] = sys.argv[-2:]
runpy.run_module("services.worker.engine.process.loop", run_name="__main__")
"""


@pytest.mark.asyncio
async def test_it_ends_in_order_with_a_thread_in_the_grammar_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which it asked for tokens, and does not break off. Ended there by the interpreter's end, the
    thread would end the process with a signal."""
    folder = write_checkpoint(tmp_path / "checkpoint")
    python = tmp_path / "python"
    (tmp_path / "code.py").write_text(IN_THE_LIBRARY)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path / "code.py"} "$@"\n')
    python.chmod(0o755)
    listener = Listener()
    client = EngineClient(EngineConfig(model=str(folder), **SMALL), listener)
    with monkeypatch.context() as started:
        started.setattr(sys, "executable", str(python))
        await client.start()
    form = Constraint("choice", '["a text that can only be this"]')
    client.add(Request("a", PROMPT, Sampling(9, constraint=form)))
    await listener.until(lambda: listener.last)
    assert listener.last["a"].error
    assert "too long to tell" in listener.last["a"].error.message
    await client.stop(timeout_s=60)
    assert client._process
    assert client._process.returncode == 0

"""EngineClient alone: the test speaks for the engine process, frame by frame."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.worker.engine import (
    EngineClient,
    EngineConfig,
    EngineDied,
    EngineLoadError,
    FinishReason,
    KvBlocks,
    Load,
    ModelInfo,
    Request,
    RequestError,
    RequestOutput,
    Sampling,
    SharedRef,
    StepOutput,
)
from services.worker.engine.adapters import Adapter, PlaceInUse
from services.worker.engine.kv import payload as kv_payload
from services.worker.engine.process import loop as process
from services.worker.engine.process import wire
from tests.support.waiting import until

LOAD = Load(0, 0, 0, 0, 0, 16, 0, 0.0, 0.0, 1.0)
INFO = ModelInfo(
    architecture="Llama", vocab_size=10, max_model_len=64, eos_token_ids=(1,),
    dtype="float32", device="cpu", kernels="none", threads=1, num_parameters=1, parameter_bytes=4,
    weights="memory", huge_bytes=0, workspace_bytes=None, num_blocks=9, block_size=16,
    kv_bytes_per_block=64, kv_shape_per_block=(1, 2, 1, 16, 1), kv_format="f",
)  # fmt: skip


class Process:
    """Stands for the engine's process: the test reads its commands and writes its answers."""

    pid = 4321

    def __init__(self, fds: tuple[int, ...], env: dict[str, str]) -> None:
        self.env = env
        self.sockets = [socket.socket(fileno=os.dup(fd)) for fd in fds]
        self.commands, self.transfers = (process.Channel(sock) for sock in self.sockets)
        self.killed = False
        self._status: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        return await asyncio.shield(self._status)

    def kill(self) -> None:
        self.killed = True
        self.end(-9)

    def end(self, status: int) -> None:
        for sock in self.sockets:
            sock.close()
        if not self._status.done():
            self._status.set_result(status)

    async def hear(self, channel: process.Channel | None = None) -> Any:
        """The next message of the client."""
        got: list[Any] = []

        def heard() -> bool:
            message = (channel or self.commands).take()
            got.extend([] if message is None else [message])
            return bool(got)

        await until(heard)
        return got[0]

    def say(self, *messages: object) -> None:
        for message in messages:
            self.commands.send(message)

    def step(self, *outputs: RequestOutput) -> None:
        self.say(StepOutput(1, 0, 0, LOAD, 0, outputs=[*outputs]))


class Rig:
    """A client, its process, and all that it told."""

    def __init__(self, config: EngineConfig) -> None:
        self.told: list[Any] = []
        self.fail = False
        self.client = EngineClient(config, self._on_step, self.told.append)
        self.started: list[Process] = []

    def _on_step(self, step: StepOutput) -> None:
        if self.fail:
            raise KeyError("bug")
        self.told.append(step)

    @property
    def process(self) -> Process:
        return self.started[-1]

    async def start(self) -> ModelInfo:
        starting = asyncio.create_task(self.client.start())
        await until(lambda: bool(self.started))
        assert await self.process.hear() == self.client.config
        self.process.say(INFO)
        return await starting


@pytest.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    rig = Rig(EngineConfig(str(tmp_path), threads=3))

    async def start_process(*_: object, **how: Any) -> Process:
        assert not set(how["pass_fds"]) & {0, 1, 2}
        rig.started.append(Process(how["pass_fds"], how["env"]))
        return rig.process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_process)
    monkeypatch.setattr(kv_payload, "FOLDER", tmp_path)
    yield rig
    for one in rig.started:
        one.end(0)
    if rig.client._receiving is not None:
        await asyncio.wait([rig.client._receiving])


def request(name: str) -> Request:
    return Request(name, [3, 4], Sampling(5))


async def test_it_starts_with_what_the_process_loaded(rig: Rig) -> None:
    assert not rig.client.running
    assert await rig.start() == INFO == rig.client.info
    assert (rig.client.running, rig.client.pid) == (True, 4321)
    env = rig.process.env
    assert (env["OMP_NUM_THREADS"], env["OMP_WAIT_POLICY"]) == ("3", "PASSIVE")
    assert env["PATH"] == os.environ["PATH"]
    root = str(Path(__file__).parents[4])
    assert env["PYTHONPATH"].split(os.pathsep)[0] == root


async def test_commands_go_in_order_and_bulk_beside_them(rig: Rig) -> None:
    await rig.start()
    blocks = KvBlocks("d", 0, 1, b"kv")
    rig.client.write_kv(blocks)
    rig.client.start_decode("d", 7)
    rig.client.add(request("a"))
    rig.client.cancel("a")
    assert await rig.process.hear() == ("add", request("a"))
    assert await rig.process.hear() == ("cancel", "a")
    transfers = rig.process.transfers
    assert await rig.process.hear(transfers) == ("write_kv", blocks)
    assert await rig.process.hear(transfers) == ("start_decode", "d", 7)


async def test_what_the_engine_says_is_told_in_order(rig: Rig) -> None:
    await rig.start()
    rig.process.say(wire.LongStep(2.5))
    rig.process.step(RequestOutput("a", [7]))
    rig.process.step(RequestOutput("a", [8]))
    await until(lambda: len(rig.told) == 3)
    assert rig.told[0] == 2.5
    assert [step.outputs[0].new_token_ids for step in rig.told[1:]] == [[7], [8]]


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.ERROR, FinishReason.CANCELLED])
async def test_an_id_is_free_again_when_its_request_has_ended(
    rig: Rig, reason: FinishReason
) -> None:
    await rig.start()
    for name in ("a", "b"):
        rig.client.add(request(name))
    rig.process.step(RequestOutput("a", [7]))
    await until(lambda: len(rig.told) == 1)
    with pytest.raises(ValueError, match="'a' is in use"):
        rig.client.add(request("a"))
    error = RequestError("internal", "bug") if reason is FinishReason.ERROR else None
    rig.process.step(RequestOutput("a", [], reason, error))
    await until(lambda: len(rig.told) == 2)
    rig.client.add(request("a"))
    with pytest.raises(ValueError, match="'b' is in use"):
        rig.client.add(request("b"))


async def test_why_an_adapter_is_not_loaded_has_two_kinds(rig: Rig) -> None:
    """Who comes too early for a place may ask again."""
    await rig.start()
    loads = [asyncio.create_task(rig.client.load_adapter(Adapter("a", {}))) for _ in range(2)]
    numbers = [(await rig.process.hear())[1] for _ in loads]
    rig.process.say(wire.Done(numbers[0], "full", in_use=True), wire.Done(numbers[1], "broken"))
    with pytest.raises(PlaceInUse, match="full"):
        await loads[0]
    assert await loads[1] == "broken"


async def test_each_snapshot_answers_its_own_question(rig: Rig) -> None:
    await rig.start()
    asked = [asyncio.create_task(rig.client.snapshot()) for _ in range(3)]
    numbers = [(await rig.process.hear())[1] for _ in asked]
    asked[1].cancel()  # nobody waits for it any more, which harms nobody
    for number in reversed(numbers):
        rig.process.say(wire.Snapshot(number, [bytes([number])]))
    assert await asked[0] == [bytes([numbers[0]])]
    assert await asked[2] == [bytes([numbers[2]])]
    rig.process.step()
    await until(lambda: len(rig.told) == 1)


@pytest.mark.parametrize(
    ("failure", "words"), [("MemoryError: none left", "MemoryError: none left"), (None, "status 3")]
)
async def test_a_death_ends_all_that_waits(rig: Rig, failure: str | None, words: str) -> None:
    await rig.start()
    snapshot = asyncio.create_task(rig.client.snapshot())
    await rig.process.hear()
    if failure:
        rig.process.say(wire.Failure(failure))
    rig.process.end(3)
    with pytest.raises(EngineDied, match=words):
        await asyncio.wait_for(rig.client.wait_closed(), 20)
    with pytest.raises(EngineDied, match=words):
        await asyncio.wait_for(snapshot, 20)
    assert not rig.client.running
    kv = KvBlocks("d", 0, 1, kv_payload.share(b"kv"))
    assert isinstance(kv.data, SharedRef)
    for command in (
        lambda: rig.client.add(request("a")),
        lambda: rig.client.cancel("a"),
        lambda: rig.client.start_decode("a", 7),
        lambda: rig.client.write_kv(kv),
    ):
        with pytest.raises(EngineDied, match="not running"):
            command()
    assert not (kv_payload.FOLDER / kv.data.name).exists()


async def test_a_failure_while_it_loads_is_told_to_who_starts_it(rig: Rig) -> None:
    starting = asyncio.create_task(rig.client.start())
    await until(lambda: bool(rig.started))
    rig.process.say(wire.Failure("UnsupportedModel: config.json is missing"))
    rig.process.end(1)
    with pytest.raises(EngineLoadError, match=r"config\.json is missing"):
        await asyncio.wait_for(starting, 20)


async def test_who_starts_it_goes_on_before_any_step_is_told(rig: Rig) -> None:
    """An engine may have news before it is asked for anything: of what lies on its disk."""
    told: list[list[Any]] = []

    async def own() -> None:
        await rig.client.start()
        told.append(rig.told[:])

    owning = asyncio.create_task(own())
    await until(lambda: bool(rig.started))
    await rig.process.hear()
    step = StepOutput(1, 0, 0, LOAD, 0)
    rig.process.say(INFO, step)
    await asyncio.wait_for(owning, 20)
    assert told == [[]]
    await until(lambda: rig.told == [step])


async def test_a_start_that_nobody_awaits_any_more_ends_its_process(rig: Rig) -> None:
    starting = asyncio.create_task(rig.client.start())
    await until(lambda: bool(rig.started))
    await rig.process.hear()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert rig.process.killed
    await asyncio.wait_for(rig.client.wait_closed(), 20)  # which is no death


@pytest.mark.parametrize("message", [wire.LongStep(1.0), StepOutput(1, 0, 0, LOAD, 0)])
async def test_a_callback_that_fails_ends_the_process(rig: Rig, message: object) -> None:
    await rig.start()

    def fail(expected_s: float) -> None:
        raise KeyError("bug")

    rig.fail, rig.client._on_long_step = True, fail
    rig.process.say(message)
    with pytest.raises(EngineDied, match="on_step failed: KeyError"):
        await asyncio.wait_for(rig.client.wait_closed(), 20)
    assert rig.process.killed


async def test_stop_asks_and_waits(rig: Rig) -> None:
    await rig.client.stop()  # before its start: nothing
    await rig.start()
    stopping = asyncio.create_task(rig.client.stop(60))
    assert await rig.process.hear() == ("shutdown",)
    assert not stopping.done()
    rig.process.end(0)
    await asyncio.wait_for(stopping, 20)
    await rig.client.wait_closed()
    assert not rig.process.killed
    await rig.client.stop()


async def test_stop_kills_who_does_not_go(rig: Rig) -> None:
    await rig.start()
    await asyncio.wait_for(rig.client.stop(0.01), 20)
    assert rig.process.killed
    await rig.client.wait_closed()


async def test_the_engines_pace_holds_who_pushes(rig: Rig) -> None:
    await rig.start()
    rig.client.write_kv(KvBlocks("d", 0, 1, bytes(8 * 2**20)))
    draining = asyncio.create_task(rig.client.drain())
    done, _ = await asyncio.wait([draining], timeout=0.05)
    assert not done
    operation, blocks = await rig.process.hear(rig.process.transfers)
    assert (operation, len(blocks.data)) == ("write_kv", 8 * 2**20)
    await asyncio.wait_for(draining, 20)


async def test_the_segments_of_a_dead_engine_are_swept(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.start()
    (kv_payload.FOLDER / "penstock-kv-0123456789abcdef").touch()  # nobody holds its lock
    orphan = kv_payload.FOLDER / "penstock-kv-0123456789abcdef-1"
    orphan.touch()
    rig.process.end(-9)
    with pytest.raises(EngineDied):
        await asyncio.wait_for(rig.client.wait_closed(), 20)
    assert not orphan.exists()

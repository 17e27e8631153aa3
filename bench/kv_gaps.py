"""What arriving KV blocks cost those who decode: the time from one engine step to the next.

    python -m bench.kv_gaps [--model models/demo] [--rounds 10] [--seconds 1] [--decoding 1]

An engine decodes without end. In turn, for --seconds each and --rounds times, nothing else happens
("quiet"); another process pushes prompts' blocks as fast as they are taken, to a receiver in the
engine's replica that drops them ("dropped"); or to the engine ("taken"). So a machine's other load
meets all three alike, "dropped" shows what the bytes cost that two processes pass on beside the
engine, and the difference to "taken" is what taking them costs. Milliseconds from start to start.
"""

import argparse
import asyncio
import itertools
import os
import random
import statistics
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from services.common.transport import Transport, listen
from services.worker.engine import (
    EngineClient,
    EngineConfig,
    KvBlocks,
    ModelInfo,
    Request,
    Sampling,
    StepOutput,
)
from services.worker.engine.kv import payload as kv_payload
from services.worker.kv_receiver import KvReceiver
from services.worker.kv_sender import Channels

_SECRET = "only of this bench"
_PIECE_BYTES = 2**20  # as the engine exports them
_PROMPT = 0.9  # of the model's window


class Drop:
    """A receiver's engine that takes everything and keeps nothing."""

    def write_kv(self, blocks: KvBlocks) -> None:
        kv_payload.discard(blocks.data)

    def start_decode(self, request_id: str, first_token: int) -> None:
        pass

    async def drain(self) -> None:
        pass


class Decoding:
    """The engine, some sequences that it decodes without end, and the times of its steps."""

    def __init__(self, config: EngineConfig, sequences: int) -> None:
        self.engine = EngineClient(config, self._on_step)
        self.steps: list[StepOutput] = []
        self.reserved: dict[str, KvReceiver] = {}  # by request, whom to tell
        self.ended: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._sequences = sequences
        self._random = random.Random(3)

    async def start(self) -> ModelInfo:
        self.info = await self.engine.start()
        for _ in range(self._sequences):
            self._decode()
        return self.info

    def prompt(self, tokens: int) -> list[int]:
        return self._random.choices(range(10, self.info.vocab_size), k=tokens)

    def _decode(self) -> None:
        """Some hundred tokens, as a step takes longer the more there are before it."""
        sampling = Sampling(max_tokens=200, temperature=0, ignore_eos=True)
        self.engine.add(Request(f"decode {uuid.uuid4().hex}", self.prompt(64), sampling))

    def _on_step(self, step: StepOutput) -> None:
        self.steps.append(step)
        for reserved in step.kv_reserved:
            receiver = self.reserved[reserved.request_id]
            receiver.reserved(reserved.request_id, reserved.cached_blocks)
        for output in step.outputs:
            if output.finish_reason and output.request_id.startswith("decode"):
                self._decode()
            elif output.finish_reason:
                assert output.error is None, output.error
                self.ended[output.request_id].set()


class Pusher:
    """The process that pushes."""

    async def start(self, info: ModelInfo) -> None:
        command = [sys.executable, "-m", "bench.kv_gaps", "--push", str(info.kv_bytes_per_block)]
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )

    async def push(self, port: int, transfer_id: str, form: str, blocks: int) -> None:
        """Returns when the other side has confirmed it all."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{port} {transfer_id} {form} {blocks}\n".encode())
        assert await self._process.stdout.readline() == b"done\n"

    async def stop(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        await self._process.wait()


async def push_as_told(block_bytes: int) -> None:
    """The pusher's own part: a line from standard input is a transfer."""
    channels = Channels(Transport(_SECRET), progress_s=30.0)
    piece = max(1, _PIECE_BYTES // block_bytes)
    data = os.urandom(piece * block_bytes)
    while line := await asyncio.to_thread(sys.stdin.readline):
        port, transfer_id, form, count = line.split()
        blocks = int(count)
        async with channels.sender(f"127.0.0.1:{port}") as sender:
            await sender.reserve(transfer_id, blocks, "")
            pushing = asyncio.create_task(sender.push())
            for first in range(0, blocks, piece):
                n = min(piece, blocks - first)
                part = memoryview(data)[: n * block_bytes]
                content = kv_payload.share(part) if form == "shared" else part
                sender.put(KvBlocks("", first, n, content))
                await asyncio.sleep(0)
            sender.commit(first_token=10)
            await pushing
        print("done", flush=True)
    await channels.close()


class Bench:
    def __init__(self, decoding: Decoding, pusher: Pusher, form: str) -> None:
        self._decoding = decoding
        self._pusher = pusher
        self._form = form
        self._tokens = int(decoding.info.max_model_len * _PROMPT)
        self._blocks = -(-self._tokens // decoding.info.block_size)
        self._receivers: dict[str, tuple[KvReceiver, int]] = {}
        self.bytes_taken: dict[str, int] = defaultdict(int)

    async def run(self, rounds: int, seconds: float) -> dict[str, list[list[StepOutput]]]:
        """The steps of each window, by its kind."""
        engines = {"taken": self._decoding.engine, "dropped": Drop()}
        servers = []
        for kind, engine in engines.items():
            receiver = KvReceiver(engine, "")  # type: ignore[arg-type]
            server = Transport(_SECRET).server([("grpc.max_receive_message_length", -1)])
            receiver.add_to(server)
            self._receivers[kind] = (receiver, listen(server, "127.0.0.1", 0))
            await server.start()
            servers.append(server)
        windows: dict[str, list[list[StepOutput]]] = defaultdict(list)
        for number in range(-1, rounds):  # the first to warm up
            for kind in ("quiet", "dropped", "taken"):
                steps = await self._window(kind, seconds)
                if number >= 0:
                    windows[kind].append(steps)
                else:
                    self.bytes_taken.clear()
        for server in servers:
            await server.stop(None)
        return windows

    async def _window(self, kind: str, seconds: float) -> list[StepOutput]:
        self._decoding.steps = []
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if kind == "quiet":
                await asyncio.sleep(left)
            else:
                await self._transfer(kind)
        return self._decoding.steps

    async def _transfer(self, kind: str) -> None:
        receiver, port = self._receivers[kind]
        id = uuid.uuid4().hex
        with receiver.expect(id, id):
            if kind == "taken":
                self._decoding.reserved[id] = receiver
                sampling = Sampling(max_tokens=1, temperature=0, ignore_eos=True)
                prompt = self._decoding.prompt(self._tokens)
                self._decoding.engine.add(Request(id, prompt, sampling, remote_prefill=True))
            else:
                receiver.reserved(id, 0)
            await self._pusher.push(port, id, self._form, self._blocks)
            if kind == "taken":
                await self._decoding.ended[id].wait()
        self.bytes_taken[kind] += self._blocks * self._decoding.info.kv_bytes_per_block


def intervals_ms(steps: list[StepOutput]) -> list[float]:
    """Between the starts of decode steps that follow each other."""
    return [
        (b.started_ns - a.started_ns) / 1e6
        for a, b in itertools.pairwise(steps)
        if a.decode_tokens and b.decode_tokens and not a.prefill_tokens and not b.prefill_tokens
    ]


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def ratio(of: list[list[float]], to: list[list[float]], share_of: float, share_to: float) -> str:
    """Median and range over the rounds, each of which is a pair."""
    pairs = zip(of, to, strict=True)
    found = sorted(percentile(a, share_of) / percentile(b, share_to) for a, b in pairs)
    return f"{statistics.median(found):.1f} ({found[0]:.1f} to {found[-1]:.1f})"


def report(form: str, windows: dict[str, list[list[StepOutput]]], bench: Bench) -> Iterable[str]:
    gaps = {kind: [intervals_ms(steps) for steps in rounds] for kind, rounds in windows.items()}
    yield f"| {form} | steps | of them computing p50 | start to start p50 | p90 | p99 | MiB/s |"
    yield "| --- " * 7 + "|"
    for kind, rounds in gaps.items():
        every = [gap for one in rounds for gap in one]
        steps = [step for one in windows[kind] for step in one]
        computing = percentile([step.duration_ns / 1e6 for step in steps], 0.5)
        spent_s = sum((one[-1].started_ns - one[0].started_ns) / 1e9 for one in windows[kind])
        pace = bench.bytes_taken[kind] / spent_s / 2**20
        spread = " | ".join(f"{percentile(every, share):.1f}" for share in (0.5, 0.9, 0.99))
        yield f"| {kind} | {len(every)} | {computing:.1f} | {spread} | {pace:.0f} |"
    yield f"p90 taken of p50 quiet: {ratio(gaps['taken'], gaps['quiet'], 0.9, 0.5)}"
    yield f"p50 taken of p50 quiet: {ratio(gaps['taken'], gaps['quiet'], 0.5, 0.5)}"
    yield f"p90 taken of p90 dropped: {ratio(gaps['taken'], gaps['dropped'], 0.9, 0.9)}"
    yield f"p90 dropped of p50 quiet: {ratio(gaps['dropped'], gaps['quiet'], 0.9, 0.5)}\n"


async def run(args: argparse.Namespace) -> None:
    config = EngineConfig(model=str(args.model), threads=1, kv_cache_bytes=2**28, max_running=32)
    decoding, pusher = Decoding(config, args.decoding), Pusher()
    await pusher.start(await decoding.start())
    for form in ("shared", "inline"):
        bench = Bench(decoding, pusher, form)
        windows = await bench.run(args.rounds, args.seconds)
        print("\n".join(report(form, windows, bench)), flush=True)
    await pusher.stop()
    await decoding.engine.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("models/demo"))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--decoding", type=int, default=1, help="sequences")
    parser.add_argument("--push", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    asyncio.run(push_as_told(args.push) if args.push else run(args))
    return 0


if __name__ == "__main__":
    sys.exit(main())

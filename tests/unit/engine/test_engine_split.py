"""Prefill on one engine, decode on another: the same tokens as on one."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from services.worker.engine import FinishReason, KvBlocks, Request, Sampling, SharedRef, Usage
from services.worker.engine.engine import Engine
from services.worker.engine.kv import payload as kv_payload
from services.worker.engine.kv import transfer as kv_transfer
from tests.unit.engine.driving import Run, drive, greedy, make_engine, make_prompts

Checkpoint = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("both_loops")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_payload, "FOLDER", tmp_path)


def segments() -> list[str]:
    """All but the files of their owners."""
    return [path.name for path in kv_payload.FOLDER.glob("penstock-kv-*-*")]


class Pair:
    """A prefill and a decode engine, and between them what two workers would do."""

    def __init__(self, prefill: Engine, decode: Engine, form: str = "inline") -> None:
        self.prefill, self.decode = prefill, decode
        self.form = form
        self.at_prefill, self.at_decode = Run(), Run()
        self.exported: dict[str, list[KvBlocks]] = {}
        self.awaiting_reservation: dict[str, Request] = {}

    def add(self, request: Request) -> None:
        self.decode.add(replace(request, remote_prefill=True))
        self.awaiting_reservation[request.request_id] = request

    def run(self) -> dict[str, list[int]]:
        """Steps both until they are done; the tokens of each request."""
        for _ in range(20_000):
            if not (self.prefill.has_work or self.decode.has_work):
                break
            self._step_decode()
            self._step_prefill()
        for engine in (self.prefill, self.decode):
            engine.check()
            assert engine.pool.num_free == engine.pool.num_blocks
        assert segments() == []
        return {
            name: self.at_prefill.tokens[name] + self.at_decode.tokens.get(name, [])
            for name in self.at_prefill.tokens
        }

    def _step_decode(self) -> None:
        step = self.decode.step()
        self.at_decode.add(step)
        for reserved in step.kv_reserved:
            request = replace(
                self.awaiting_reservation.pop(reserved.request_id),
                prefill_only=True,
                export_kv=self.form,  # type: ignore[arg-type]
                export_from_block=reserved.cached_blocks,
            )
            self.prefill.add(request)

    def _step_prefill(self) -> None:
        step = self.prefill.step()
        self.at_prefill.add(step)
        for blocks in step.kv_exports:
            self.exported.setdefault(blocks.request_id, []).append(blocks)
            self.decode.write_kv(blocks)
        for output in step.outputs:
            if output.finish_reason is FinishReason.PREFILL_DONE:
                name = output.request_id
                self.decode.start_decode(name, self.at_prefill.tokens[name][0])
            elif output.finish_reason:
                self.decode.cancel(output.request_id)


def requests(count: int) -> list[Request]:
    """Greedy and seeded ones, some with a common beginning."""
    shared = list(range(3, 60))
    prompts = make_prompts(count, longest=100, seed=5)
    return [
        Request(
            str(i),
            (shared if i % 3 == 0 else []) + prompt,
            greedy(20) if i % 2 else Sampling(20, temperature=0.9, top_p=0.95, seed=i),
        )
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("form", ["inline", "shared"])
def test_split_equals_unsplit(checkpoint: Checkpoint, form: str) -> None:
    work = requests(24)
    unsplit = drive(make_engine(checkpoint()), work)
    pair = Pair(make_engine(checkpoint(), max_batched_tokens=24), make_engine(checkpoint()), form)
    for request in work:
        pair.add(request)
    assert pair.run() == unsplit.tokens
    # Blocks leave while the prompt is being computed, not only at its end.
    assert any(len(parts) > 1 for parts in pair.exported.values())
    for name, parts in pair.exported.items():
        expected = parts[0].first_block
        for part in parts:
            assert part.first_block == expected
            expected += part.num_blocks
        assert expected == -(-len(work[int(name)].prompt_token_ids) // 16)


@pytest.mark.parametrize("form", ["inline", "shared"])
def test_exports_leave_in_pieces(
    checkpoint: Checkpoint, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of at most PIECE_BYTES, in order and without gaps; each with its own blocks' bytes."""
    request = Request("a", list(range(3, 3 + 16 * 7 + 5)), greedy(12))
    whole = drive(make_engine(checkpoint(), max_batched_tokens=512), [request])
    pair = Pair(
        make_engine(checkpoint(), max_batched_tokens=512),
        make_engine(checkpoint(), max_batched_tokens=512),
        form,
    )
    size = pair.prefill.info.kv_bytes_per_block
    monkeypatch.setattr(kv_transfer, "PIECE_BYTES", 3 * size + 1)
    pair.add(request)
    assert pair.run() == whole.tokens
    parts = pair.exported["a"]
    assert [(p.first_block, p.num_blocks) for p in parts] == [(0, 3), (3, 3), (6, 2)]
    monkeypatch.setattr(kv_transfer, "PIECE_BYTES", size - 1)  # a block is never cut
    pair.exported.clear()
    pair.add(replace(request, request_id="b", salt=b"other"))
    assert pair.run()["b"] == whole.tokens["a"]
    assert [p.num_blocks for p in pair.exported["b"]] == [1] * 8


@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_blocks_that_come_again_are_skipped(checkpoint: Checkpoint, first: int) -> None:
    """An export may begin before what the decode engine holds: its head is dropped, not its tail,
    and what it holds is never written over."""
    request = Request("a", list(range(3, 3 + 16 * 4 + 1)), greedy(12))
    whole = drive(make_engine(checkpoint()), [request])
    prefill, decode = make_engine(checkpoint()), make_engine(checkpoint())
    size = prefill.info.kv_bytes_per_block
    at_prefill = drive(prefill, [replace(request, prefill_only=True, export_kv="inline")])
    data = b"".join(bytes(b.data) for s in at_prefill.steps for b in s.kv_exports)  # type: ignore[arg-type]
    decode.add(replace(request, remote_prefill=True))
    assert decode.step().kv_reserved[0].cached_blocks == 0
    decode.write_kv(KvBlocks("a", 0, 3, data[: 3 * size]))
    garbled = b"\xff" * ((3 - first) * size) + data[3 * size :]
    decode.write_kv(KvBlocks("a", first, 5 - first, garbled))
    decode.start_decode("a", at_prefill.tokens["a"][0])
    assert at_prefill.tokens["a"] + drive(decode, []).tokens["a"] == whole.tokens["a"]


def test_split_with_preemption_on_both_sides(checkpoint: Checkpoint) -> None:
    work = requests(24)
    unsplit = drive(make_engine(checkpoint()), work)
    pair = Pair(make_engine(checkpoint(), num_blocks=16), make_engine(checkpoint(), num_blocks=16))
    for request in work:
        pair.add(request)
    assert pair.run() == unsplit.tokens
    assert pair.at_decode.num_preempted > 0


def test_blocks_that_the_decode_engine_holds_are_not_sent(checkpoint: Checkpoint) -> None:
    prompt = list(range(3, 103))
    pair = Pair(make_engine(checkpoint()), make_engine(checkpoint()))
    unsplit = drive(make_engine(checkpoint()), [Request("a", prompt, greedy(8))])
    drive(pair.decode, [Request("warm", prompt, greedy(1))])
    drive(pair.prefill, [Request("warm", prompt, greedy(1))])
    pair.add(Request("a", prompt, greedy(8)))
    assert pair.run()["a"] == unsplit.tokens["a"]
    (part,) = pair.exported["a"]
    assert (part.first_block, part.num_blocks) == (6, 1)
    assert pair.at_decode.last["a"].num_cached_tokens == 96


def test_prefix_hits_of_the_prefill_engine_are_exported_too(checkpoint: Checkpoint) -> None:
    prompt = list(range(3, 103))
    pair = Pair(make_engine(checkpoint()), make_engine(checkpoint()))
    drive(pair.prefill, [Request("warm", prompt, greedy(1))])
    pair.add(Request("a", prompt, greedy(8)))
    pair.run()
    assert sum(part.num_blocks for part in pair.exported["a"]) == 7
    assert pair.at_prefill.last["a"].num_cached_tokens == 96


def test_what_is_received_becomes_cached_prefix(checkpoint: Checkpoint) -> None:
    prompt = list(range(3, 103))
    pair = Pair(make_engine(checkpoint()), make_engine(checkpoint()))
    pair.add(Request("a", prompt, greedy(8)))
    first = pair.run()["a"]
    again = drive(pair.decode, [Request("b", prompt, greedy(8))])
    assert again.last["b"].num_cached_tokens == 96
    assert again.tokens["b"] == first


def test_first_token_may_be_the_last(checkpoint: Checkpoint) -> None:
    prompt = list(range(3, 40))
    pair = Pair(make_engine(checkpoint()), make_engine(checkpoint()))
    pair.add(Request("a", prompt, greedy(1)))
    assert len(pair.run()["a"]) == 1
    assert pair.at_prefill.last["a"].finish_reason is FinishReason.LENGTH
    assert pair.at_decode.last["a"].finish_reason is FinishReason.CANCELLED


def test_usage_and_timeline_over_the_split(checkpoint: Checkpoint) -> None:
    pair = Pair(make_engine(checkpoint(), max_batched_tokens=16), make_engine(checkpoint()))
    pair.add(Request("a", list(range(3, 43)), greedy(5)))
    pair.run()
    at_prefill, at_decode = pair.at_prefill.last["a"], pair.at_decode.last["a"]
    assert at_prefill.usage
    assert at_decode.usage
    assert (at_prefill.usage.prompt_tokens, at_prefill.usage.completion_tokens) == (40, 1)
    assert (at_decode.usage.prompt_tokens, at_decode.usage.completion_tokens) == (40, 5)
    (timeline,) = [
        output.timeline for s in pair.at_prefill.steps for output in s.outputs if output.timeline
    ]
    assert [chunk.tokens for chunk in timeline.chunks] == [16, 16, 8]


def test_cancel_at_any_point_frees_everything(checkpoint: Checkpoint) -> None:
    rng = random.Random(0)
    pair = Pair(
        make_engine(checkpoint(), max_batched_tokens=16), make_engine(checkpoint()), "shared"
    )
    work = requests(16)
    for request in work:
        pair.add(request)
    for round_ in range(40):
        pair._step_decode()
        pair._step_prefill()
        if round_ % 2 == 0 and work:
            name = work.pop(rng.randrange(len(work))).request_id
            for engine in rng.sample([pair.prefill, pair.decode], 2):
                engine.cancel(name)
                engine.check()
    pair.run()


def reserve(decode: Engine, prompt: list[int]) -> int:
    """Brings a request "a" to the point where its blocks are awaited; block's bytes."""
    decode.add(Request("a", prompt, greedy(4), remote_prefill=True))
    assert decode.step().kv_reserved[0].cached_blocks == 0
    return decode.info.kv_bytes_per_block


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ((0, 1, 0.5), "same checkpoint, dtype and block size"),
        ((1, 1, 1), "expected from 0"),
        ((0, 4, 4), "to 3 at most"),
        (None, "0 of 3 KV blocks came"),
        (SharedRef("penstock-kv-0123456789abcdef-0", 0, 1), "No such file"),
        (SharedRef("../../etc/passwd", 0, 1), "not a KV segment's name"),
    ],
)
def test_bad_transfers_end_their_request_alone(
    checkpoint: Checkpoint, blocks: tuple[int, int, float] | SharedRef | None, words: str
) -> None:
    decode = make_engine(checkpoint())
    size = reserve(decode, list(range(3, 43)))
    decode.add(Request("other", [5, 6, 7], greedy(4)))
    match blocks:
        case None:
            decode.start_decode("a", 5)
        case SharedRef():
            decode.write_kv(KvBlocks("a", 0, 1, blocks))
        case (first, count, length):
            decode.write_kv(KvBlocks("a", first, count, bytes(int(size * length))))
    run = drive(decode, [])
    error = run.last["a"].error
    assert error
    assert error.code == "kv_transfer"
    assert words in error.message
    assert len(run.tokens["other"]) == 4


def test_decoding_does_not_begin_before_the_last_block_came(checkpoint: Checkpoint) -> None:
    decode = make_engine(checkpoint())
    size = reserve(decode, list(range(3, 43)))
    decode.write_kv(KvBlocks("a", 0, 2, bytes(2 * size)))
    decode.start_decode("a", 5)
    error = drive(decode, []).last["a"].error
    assert error
    assert error.message == "2 of 3 KV blocks came"


def test_commands_out_of_place_do_no_harm(checkpoint: Checkpoint) -> None:
    engine = make_engine(checkpoint())
    shared = kv_payload.share(b"x" * 10)
    engine.write_kv(KvBlocks("unknown", 0, 1, shared))
    assert segments() == []
    engine.start_decode("unknown", 3)
    engine.cancel("unknown")
    engine.add(Request("plain", [3, 4, 5], greedy(4)))
    engine.step()
    engine.start_decode("plain", 3)
    run = drive(engine, [])
    assert run.last["plain"].error
    assert run.last["plain"].error.code == "kv_transfer"


def test_kv_that_comes_for_a_request_of_another_kind_is_not_written(checkpoint: Checkpoint) -> None:
    """A request that computes its prompt itself would go on from a stranger's."""
    engine = make_engine(checkpoint())
    engine.add(Request("plain", list(range(3, 43)), greedy(8)))
    engine.step()
    before = bytes(engine._runner.cache.read([0, 1, 2]))
    engine.write_kv(KvBlocks("plain", 0, 1, bytes(engine.info.kv_bytes_per_block)))
    assert bytes(engine._runner.cache.read([0, 1, 2])) == before
    error = drive(engine, []).last["plain"].error
    assert error
    assert (error.code, error.message) == (
        "kv_transfer", "write_kv out of place: the request is not reserved",
    )  # fmt: skip


@pytest.mark.parametrize("token", [-1, 257])
def test_a_first_token_must_be_one(checkpoint: Checkpoint, token: int) -> None:
    decode = make_engine(checkpoint())
    size = reserve(decode, list(range(3, 43)))
    decode.write_kv(KvBlocks("a", 0, 3, bytes(3 * size)))
    decode.start_decode("a", token)
    error = drive(decode, []).last["a"].error
    assert error
    assert error.code == "kv_transfer"


def test_a_second_start_ends_the_request(checkpoint: Checkpoint) -> None:
    decode = make_engine(checkpoint())
    size = reserve(decode, list(range(3, 43)))
    decode.write_kv(KvBlocks("a", 0, 3, bytes(3 * size)))
    for _ in range(2):
        decode.start_decode("a", 5)
    assert drive(decode, []).last["a"].error


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        (greedy(1), FinishReason.LENGTH),
        (greedy(4, stop_token_ids=(5,)), FinishReason.STOP),
        (Sampling(4), FinishReason.STOP),
    ],
)
def test_a_first_token_that_ends_it_ends_the_decode_engines_part(
    checkpoint: Checkpoint, sampling: Sampling, reason: FinishReason
) -> None:
    decode = make_engine(checkpoint())
    decode._eos_token_ids = frozenset({5})
    prompt = list(range(3, 43))
    decode.add(Request("a", prompt, sampling, remote_prefill=True))
    decode.step()
    decode.write_kv(KvBlocks("a", 0, 3, bytes(3 * decode.info.kv_bytes_per_block)))
    decode.start_decode("a", 5)
    run = drive(decode, [])
    assert run.tokens["a"] == []
    assert run.last["a"].finish_reason is reason
    assert run.last["a"].usage == Usage(40, 0, 1)
    assert len(decode.snapshot()) == 2, "what came is cached as if computed here"


@pytest.mark.parametrize("chunk", [16, 64])
def test_no_room_for_what_is_exported_ends_its_request_alone(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """Amid its prompt or at its end."""
    engine = make_engine(checkpoint(), max_batched_tokens=chunk)
    prompt = list(range(3, 43))

    def full(data: object) -> SharedRef:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kv_payload, "share", full)
    engine.add(Request("a", prompt, greedy(4), prefill_only=True, export_kv="shared"))
    run = drive(engine, [Request("other", prompt[::-1], greedy(4))])
    error = run.last["a"].error
    assert error
    assert error.code == "kv_transfer"
    assert "No space left" in error.message
    assert run.tokens["a"] == []
    assert len(run.tokens["other"]) == 4


def test_a_prefill_without_export_gives_its_token_alone(checkpoint: Checkpoint) -> None:
    engine = make_engine(checkpoint())
    run = drive(engine, [Request("a", list(range(3, 43)), greedy(4), prefill_only=True)])
    assert run.last["a"].finish_reason is FinishReason.PREFILL_DONE
    assert len(run.tokens["a"]) == 1
    assert not any(step.kv_exports for step in run.steps)


def test_a_segment_for_a_refused_piece_is_removed_too(checkpoint: Checkpoint) -> None:
    decode = make_engine(checkpoint())
    size = reserve(decode, list(range(3, 43)))
    decode.write_kv(KvBlocks("a", 2, 1, kv_payload.share(bytes(size))))
    assert segments() == []
    assert drive(decode, []).last["a"].error


@pytest.mark.parametrize(("first", "count"), [(0, 1), (0, 3), (1, 2), (2, 1), (3, 0)])
def test_a_piece_that_brings_nothing_new_changes_nothing(
    checkpoint: Checkpoint, first: int, count: int
) -> None:
    request = Request("a", list(range(3, 3 + 16 * 3)), greedy(8))
    whole = drive(make_engine(checkpoint()), [request])
    prefill, decode = make_engine(checkpoint()), make_engine(checkpoint())
    size = prefill.info.kv_bytes_per_block
    at_prefill = drive(prefill, [replace(request, prefill_only=True, export_kv="inline")])
    data = b"".join(bytes(b.data) for s in at_prefill.steps for b in s.kv_exports)  # type: ignore[arg-type]
    decode.add(replace(request, remote_prefill=True))
    decode.step()
    decode.write_kv(KvBlocks("a", 0, 3, data))
    decode.write_kv(KvBlocks("a", first, count, b"\xff" * (count * size)))
    decode.start_decode("a", at_prefill.tokens["a"][0])
    assert at_prefill.tokens["a"] + drive(decode, []).tokens["a"] == whole.tokens["a"]


def test_blocks_of_one_who_gave_way_to_a_reservation_are_looked_at_at_once(
    checkpoint: Checkpoint,
) -> None:
    """A step in which somebody was only preempted is no standstill: what waits may fit now."""
    engine = make_engine(checkpoint(), num_blocks=5, prefix_caching=False)
    engine.add(Request("elsewhere", list(range(3, 19)), greedy(4), remote_prefill=True))
    engine.add(Request("long", list(range(3, 43)), greedy(30)))
    engine.step()
    engine.add(Request("short", list(range(3, 23)), greedy(2), priority=-1))
    while not (output := engine.step()).preempted:
        assert not engine.stuck
    assert (output.preempted, output.decode_tokens) == (["long"], 0)
    assert not engine.stuck
    assert engine.step().prefill_tokens == 20


def test_an_engine_is_stuck_once_all_wait_for_others(checkpoint: Checkpoint) -> None:
    engine = make_engine(checkpoint())
    engine.add(Request("elsewhere", list(range(3, 19)), greedy(4), remote_prefill=True))
    assert engine.step().kv_reserved
    assert not engine.stuck
    engine.step()
    assert engine.stuck
    engine.cancel("elsewhere")
    assert engine.step().outputs
    assert not engine.stuck

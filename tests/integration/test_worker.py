"""Two real workers, driven over links as a router would."""

import asyncio
import signal
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import psutil
import pytest
import pytest_asyncio

from protos import common_pb2, worker_pb2
from services.common.config import ModelSpec
from services.common.link import End, LinkClient, LinkRequest
from services.common.packed_ids import pack
from tests.support.checkpoint import write_checkpoint
from tests.support.cluster import Cluster, Process
from tests.support.transport import TRANSPORT
from tests.support.waiting import until

Work = worker_pb2.WorkRequest
PROMPT = list(range(3, 103))


class Attached:
    """A router's view of one worker."""

    def __init__(self, process: Process) -> None:
        assert process.replica is not None
        self.process = process
        self.replica = process.replica
        self.news: list[worker_pb2.WorkerNews] = []
        self.link = LinkClient(
            self.replica.address,
            "/penstock.v1.Worker/Link",
            transport=TRANSPORT,
            peer_id="test",
            on_news=lambda news: self.news.append(worker_pb2.WorkerNews.FromString(news)),
        )

    def open(self, work: Work, timeout_s: float = 30.0) -> tuple[list[Work], LinkRequest]:
        deltas: list[worker_pb2.TokenDelta] = []
        work.checkpoint = work.checkpoint or self.replica.facts["digest"]
        request = self.link.open(
            work.SerializeToString(),
            deadline=time.monotonic() + timeout_s,
            on_item=lambda item: deltas.append(worker_pb2.TokenDelta.FromString(item)),
        )
        return deltas, request

    async def run(self, work: Work) -> tuple[list[int], End, list[worker_pb2.TokenDelta]]:
        deltas, request = self.open(work)
        end = await request.ended()
        return [token for d in deltas for token in d.token_ids], end, deltas

    async def idle(self) -> None:
        """Waits until the engine holds no request and every block is free."""

        def empty() -> bool:
            load = self.news[-1].load
            return not load.running and not load.waiting and load.free_blocks == load.total_blocks

        await until(empty, what="the engine is empty")


def work(prompt: list[int] = PROMPT, max_tokens: int = 20, **fields: object) -> Work:
    tenant = str(fields.pop("tenant", "t"))
    sampling = common_pb2.Sampling(
        max_tokens=max_tokens,
        top_p=1.0,
        seed=5,
        ignore_eos=True,
        temperature=float(fields.pop("temperature", 0.0)),  # type: ignore[arg-type]
    )
    caller = common_pb2.Caller(request_id="r", tenant=tenant, priority=2, weight=1)
    fields = {"model": "tiny", **fields}
    return Work(caller=caller, prompt_token_ids=pack(prompt), sampling=sampling, **fields)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), window=2048)


@asynccontextmanager
async def two_workers(folder: Path, checkpoint: Path) -> AsyncIterator[tuple[Attached, Attached]]:
    async with Cluster(folder, [ModelSpec(name="tiny", path=str(checkpoint))]) as cluster:
        prefill = cluster.spawn("worker", WORKER__ROLE="prefill")
        decode = cluster.spawn("worker", WORKER__ROLE="decode")
        await cluster.up(prefill, decode)
        attached = Attached(prefill), Attached(decode)
        for one in attached:
            await one.link.start()
            await one.link.wait_ready(60)
        yield attached
        for one in attached:
            await one.link.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: Path
) -> AsyncIterator[tuple[Attached, Attached]]:
    """For tests that leave both alive."""
    async with two_workers(tmp_path_factory.mktemp("pair"), checkpoint) as attached:
        yield attached


def split(prefill: Attached, decode: Attached, host_id: str = "", **fields: object) -> list[Work]:
    transfer = uuid.uuid4().hex
    address = worker_pb2.WorkerAddress(
        address=decode.replica.address, host_id=host_id or decode.replica.host_id
    )
    return [
        work(mode=Work.PREFILL, transfer_id=transfer, push_to=address, **fields),
        work(mode=Work.DECODE, transfer_id=transfer, **fields),
    ]


@pytest.mark.asyncio(loop_scope="module")
async def test_split_equals_unsplit_over_both_transports(
    pair: tuple[Attached, Attached],
) -> None:
    prefill, decode = pair
    for number, (temperature, host) in enumerate(
        [(0.0, ""), (0.0, "another host"), (1.0, ""), (1.0, "another host")]
    ):
        own = {"temperature": temperature, "tenant": f"tenant-{number}"}
        alone, _, _ = await decode.run(work(**{**own, "tenant": f"alone-{number}"}))
        first, second = split(prefill, decode, host, **own)
        (head, head_end, head_deltas), (rest, rest_end, rest_deltas) = await asyncio.gather(
            prefill.run(first), decode.run(second)
        )
        assert (head_end.status.code, rest_end.status.code) == (0, 0)
        assert len(head) == 1
        assert head + rest == alone
        assert head_deltas[-1].finish == common_pb2.FINISH_PREFILL_DONE
        assert rest_deltas[-1].finish == common_pb2.FINISH_LENGTH
        assert rest_deltas[-1].usage.completion_tokens == 20
        assert {"worker", "queue", "prefill", "push kv"} <= {s.name for s in head_end.record.spans}
        assert {"worker", "decode"} <= {s.name for s in rest_end.record.spans}
    await prefill.idle()
    await decode.idle()


@pytest.mark.asyncio(loop_scope="module")
async def test_prefix_hits_stay_within_a_tenant_and_blocks_are_told(
    pair: tuple[Attached, Attached],
) -> None:
    from services.common.block_hash import block_hashes, tenant_salt

    _, decode = pair
    first, _, deltas = await decode.run(work(tenant="a"))
    assert deltas[-1].usage.cached_tokens == 0
    again, _, deltas = await decode.run(work(tenant="a"))
    assert again == first
    assert deltas[-1].usage.cached_tokens == 96
    other, _, deltas = await decode.run(work(tenant="b"))
    assert other == first
    assert deltas[-1].usage.cached_tokens == 0

    stored = b"".join(e.hashes for news in decode.news for e in news.events if e.stored)
    for tenant in ("a", "b"):
        for block in block_hashes(PROMPT, 16, tenant_salt(tenant)):
            assert block in stored
    late = Attached(decode.process)
    await late.link.start()
    await late.link.wait_ready(60)
    assert late.news[0].snapshot
    held = late.news[0].events[0].hashes
    assert {held[i : i + 16] for i in range(0, len(held), 16)} == {
        stored[i : i + 16] for i in range(0, len(stored), 16)
    }
    await late.link.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_cancel_frees_its_blocks_long_before_its_end(
    pair: tuple[Attached, Attached],
) -> None:
    # How many steps the engine makes after it hears of a cancel is counted in
    # tests/unit/engine; here a busy machine may let it step on before the word arrives.
    _, decode = pair
    deltas, request = decode.open(work(max_tokens=1900))
    await until(lambda: len(deltas) > 3, what="it streams")
    steps_before = decode.link.vitals[0]
    request.cancel()
    await decode.idle()
    assert decode.link.vitals[0] - steps_before < 1000


@pytest.mark.asyncio(loop_scope="module")
async def test_a_bad_request_is_refused_by_name_and_harms_nobody(
    pair: tuple[Attached, Attached],
) -> None:
    _, decode = pair
    good = asyncio.create_task(decode.run(work(max_tokens=200)))
    invalid = grpc.StatusCode.INVALID_ARGUMENT.value[0]
    for bad, param in [
        (work(prompt=[999_999]), "prompt_token_ids"),
        (work(prompt=[]), "prompt_token_ids"),
        (work(prompt=[5] * 2100), "prompt_token_ids"),
        (work(model="other"), "model"),
    ]:
        _, end, _ = await decode.run(bad)
        assert end.status.code == invalid, end.status
        assert param in end.status.param, end.status
    tokens, end, _ = await good
    assert (len(tokens), end.status.code) == (200, 0)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_push_that_breaks_off_ends_the_decode_with_its_cause(
    pair: tuple[Attached, Attached],
) -> None:
    from protos import worker_pb2_grpc

    _, decode = pair
    _, waiting = split(*pair)
    _, request = decode.open(waiting)
    async with TRANSPORT.dial(decode.replica.address, "worker") as channel:
        stream = worker_pb2_grpc.WorkerStub(channel).PushKv()
        begin = worker_pb2.KvBegin(
            transfer_id=waiting.transfer_id,
            prompt_tokens=100,
            kv_format=decode.replica.facts["kv_format"],
        )
        await stream.write(worker_pb2.KvPush(begin=begin))
        assert (await stream.read()).HasField("reserved")
        stream.cancel()
    end = await request.ended()
    assert end.status.code == grpc.StatusCode.UNAVAILABLE.value[0]
    assert end.status.reason == "kv_transfer"
    await decode.idle()


async def test_workers_that_die(tmp_path: Path, checkpoint: Path) -> None:
    async with two_workers(tmp_path, checkpoint) as (prefill, decode):
        await _a_killed_prefill_worker_leaves_the_decode_worker_whole(prefill, decode)
        await _a_killed_engine_ends_its_requests_and_takes_the_worker_away(decode)


async def _a_killed_prefill_worker_leaves_the_decode_worker_whole(
    prefill: Attached, decode: Attached
) -> None:
    prefill.process.signal(signal.SIGSTOP)  # so that the push has not happened when it dies
    first, second = split(prefill, decode)
    _, waiting = decode.open(second)
    _, lost = prefill.open(first)
    prefill.process.kill()
    assert (await lost.ended()).status.reason == "peer_lost"
    waiting.cancel()  # as a router does when its link to the prefill worker is lost
    assert (await waiting.ended()).status.code == grpc.StatusCode.CANCELLED.value[0]
    await decode.idle()
    tokens, end, _ = await decode.run(work())
    assert (len(tokens), end.status.code) == (20, 0)


async def _a_killed_engine_ends_its_requests_and_takes_the_worker_away(decode: Attached) -> None:
    deltas, request = decode.open(work(max_tokens=1500))
    await until(lambda: len(deltas) > 3, what="it streams")
    (engine,) = psutil.Process(decode.process.pid).children()
    engine.kill()
    end = await request.ended()
    assert end.status.code == grpc.StatusCode.UNAVAILABLE.value[0]
    assert end.status.reason == "engine_killed"
    assert await asyncio.to_thread(decode.process.popen.wait, 15) == 1

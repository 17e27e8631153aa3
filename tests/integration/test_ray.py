"""`penstock up`: the graph on a real Ray, what strangers can do to it, what it does when its parts
are killed, and a drain by Ctrl-C. One stack for all of this, in this order; the last test, of what
ends a stack, has its own."""

import asyncio
import os
import pickle
import signal
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import pytest_asyncio
from google.protobuf.wrappers_pb2 import BytesValue

from services.common.redis import connect
from tests.support.checkpoint import write_checkpoint
from tests.support.laptop import START_S, Laptop
from tests.support.streams import Stream, complete
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
GREEDY = {
    "model": "tiny",
    "prompt": "the water at the end of the penstock",
    "max_tokens": 400,
    "ignore_eos": True,
    "temperature": 0,
}
SERVE = "/ray.serve.ASGIService/"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def laptop(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Laptop]:
    folder = tmp_path_factory.mktemp("laptop")
    write_checkpoint(folder / "tiny", window=1024)
    # The secret is its own, which its data directory keeps.
    async with Laptop(folder, "--model", str(folder / "tiny"), INTERNAL_SECRET="") as laptop:
        yield laptop


def everything(laptop: Laptop) -> list[psutil.Process]:
    """All processes of the stack, whatever they call themselves."""
    main = psutil.Process(laptop.up.pid)
    return [main, *main.children(recursive=True)]


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    with suppress(psutil.NoSuchProcess):
        sockets = process.net_connections("inet")
        return {tuple(s.laddr) for s in sockets if s.status == psutil.CONN_LISTEN}
    return set()


async def test_all_that_listens_is_on_the_loopback(laptop: Laptop) -> None:
    found = {
        f"{address}:{port} of {process.name()}": address
        for process in everything(laptop)
        for address, port in listening(process)
    }
    assert len(found) > 20, "those of GCS, raylet and seven replicas"
    assert not [name for name in found if "redis" in name], "it has a socket, and no port"
    outside = [
        socket
        for socket, address in found.items()
        if address not in ("127.0.0.1", "::ffff:127.0.0.1")
    ]
    assert not outside


class Harm:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self._path,)


async def test_a_pickle_from_a_stranger_does_nothing(laptop: Laptop, tmp_path: Path) -> None:
    """Serve's server in each replica unpickles what it is sent, once it knows who sent it."""
    refused = 0
    for process in everything(laptop):
        for _, port in listening(process):
            mark = tmp_path / f"harm-{port}"
            harm = BytesValue(value=pickle.dumps(Harm(mark)))  # as ASGIRequest is on the wire
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                for method in ("HandleRequest", "HandleRequestWithRejection"):
                    call = channel.unary_unary(SERVE + method)
                    with pytest.raises(grpc.aio.AioRpcError) as error:
                        await call(harm.SerializeToString(), timeout=5)
                    refused += error.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert not mark.exists(), f"it ran code: {process.name()}, port {port}"
    assert refused >= 2 * 2 * 6, "Serve's server and the service's own, in each replica"


async def test_ray_knows_its_callers(laptop: Laptop) -> None:
    async def refused(port: int, method: str) -> grpc.StatusCode:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await channel.unary_unary(method)(b"", timeout=5)
            return error.value.code()

    def ports(named: str) -> list[int]:
        found = [p for p in everything(laptop) if named in " ".join(p.cmdline())]
        assert found
        return [port for process in found for _, port in listening(process)]

    (gcs,) = ports("gcs_server")
    for method in (
        "InternalKVGcsService/InternalKVGet",
        "ActorInfoGcsService/RegisterActor",
        "JobInfoGcsService/AddJob",
    ):
        assert await refused(gcs, f"/ray.rpc.{method}") is grpc.StatusCode.UNAUTHENTICATED
    raylet = [
        await refused(port, "/ray.rpc.NodeManagerService/RequestWorkerLease")
        for port in ports("raylet/raylet")
    ]
    assert grpc.StatusCode.UNAUTHENTICATED in raylet
    # The agents, one of which takes jobs, are not there.
    assert not [process for process in everything(laptop) if "Agent" in process.name()]


async def test_secrets_are_kept_and_not_shown(laptop: Laptop) -> None:
    files = [laptop.data_dir, *laptop.data_dir.iterdir()]
    for path in files:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    names = ("internal-secret", "ray-token", "redis/password", "key")
    kept = {name: (laptop.data_dir / name).read_text() for name in names}
    assert len(set(kept.values())) == len(names)
    told = [" ".join(process.cmdline()) for process in everything(laptop)]
    told.append(laptop.log.read_text().replace(kept["key"], "", 1))  # which is for the user
    for name, secret in kept.items():
        assert not any(secret in text for text in told), f"{name} is shown"


async def test_other_users_reach_no_socket_and_no_log(laptop: Laptop) -> None:
    """Ray makes its folders writable for all: something above them has to be closed."""
    files = {
        Path(name)
        for process in everything(laptop)
        for name in (
            *(file.path for file in process.open_files()),
            *(socket.laddr for socket in process.net_connections("unix") if socket.laddr),
        )
        if "/penstock-run-" in name or name.startswith(str(laptop.data_dir))
    }
    assert {"raylet", "plasma_store", "redis", "raylet.out"} < {path.name for path in files}
    for path in files:
        closed = [folder for folder in path.parents if not folder.stat().st_mode & stat.S_IXOTH]
        assert closed, f"open to all users: {path}"


async def penstock(laptop: Laptop, *arguments: str) -> tuple[int, str]:
    """One command beside it: its exit code, and what it says."""
    command = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.cli",
        *arguments,
        env={**os.environ, "PENSTOCK_DATA_DIR": str(laptop.data_dir)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await asyncio.wait_for(command.communicate(), 120)
    assert command.returncode is not None
    return command.returncode, said.decode()


async def test_models_come_and_go_while_it_runs(laptop: Laptop, tmp_path: Path) -> None:
    """Nothing else is restarted, and what runs on a model that goes ends first."""
    write_checkpoint(tmp_path / "second", window=1024)
    second = {**GREEDY, "model": "second"}

    async def others() -> set[str]:
        services = ("gateway", "retrieval", "tokenizer", "router", "worker")
        found = [r for name in services for r in await laptop.replicas(name)]
        return {r.id for r in found if r.facts.get("model") != "second"}

    async with laptop.api() as api:
        before = await others()
        assert (await api.post("/v1/completions", json=second)).status_code == 404
        code, said = await penstock(
            laptop, "models", "add", str(tmp_path / "second"), "--prefill", "0", "--decode", "1",
            "--worker", '{"max_running": 3}',
        )  # fmt: skip
        assert (code, said.splitlines()[-1]) == (0, "second is served"), said
        assert await complete(api, second) == await complete(api, GREEDY), "the same weights"
        (worker,) = [r for r in await laptop.replicas("worker") if r.facts["model"] == "second"]
        assert (worker.facts["role"], worker.facts["max_running"]) == ("both", "3")
        code, said = await penstock(laptop, "models", "add", str(tmp_path / "second"))
        assert code == 1
        assert "there is a model called 'second'" in said
        _, said = await penstock(laptop, "models", "list")
        assert "second" in said
        assert "tiny" in said

        stream = Stream(api, second)
        await stream.reached(chunks=5)
        removing = asyncio.create_task(penstock(laptop, "models", "remove", "second"))
        assert await stream.finished() == await complete(api, GREEDY), "it was not cut"
        code, said = await removing
        assert (code, said.splitlines()[-1]) == (0, "second is removed"), said

        async def unknown() -> bool:
            return (await api.post("/v1/completions", json=second)).status_code == 404

        await until(unknown, 30)
        assert not [r for r in await laptop.replicas("worker") if r.facts["model"] == "second"]
        assert await others() == before
        assert await complete(api, GREEDY)
        code, said = await penstock(laptop, "models", "remove", "second")
        assert code == 1
        assert "there are: tiny" in said


async def test_calls_wait_out_the_death_of_retrieval(laptop: Laptop) -> None:
    """They failed for 27 s. The new process is there in a few seconds, the calls just wait."""
    text = b"# Guide\n\nThe harbour opens at six."
    async with laptop.api() as api:
        form = {"files": {"file": ("guide.md", text)}, "data": {"purpose": "assistants"}}
        file = (await api.post("/v1/files", **form)).json()["id"]
        store = (await api.post("/v1/vector_stores", json={"file_ids": [file]})).json()["id"]

        async def searchable() -> bool:
            told = (await api.get(f"/v1/vector_stores/{store}")).json()
            return bool(told["file_counts"]["completed"])

        await until(searchable, 60)
        (lost,) = await laptop.replicas("retrieval")
        os.kill(lost.pid, signal.SIGKILL)
        model = lost.facts["embedding_model"]
        answers = await asyncio.gather(
            api.post("/v1/embeddings", json={"model": model, "input": "a text"}),
            api.post(f"/v1/vector_stores/{store}/search", json={"query": "harbour"}),
            api.post("/v1/embeddings", json={"model": model, "input": ["another"]}),
        )
        assert [answer.status_code for answer in answers] == [200] * 3
        (found,) = answers[1].json()["data"]
        assert found["file_id"] == file

        async def replaced() -> bool:  # its entry lives for its lease, its successor is quicker
            return lost.id not in {replica.id for replica in await laptop.replicas("retrieval")}

        await until(replaced, 10)


def running(laptop: Laptop, named: str) -> list[psutil.Process]:
    """Processes by their command line, dead ones not."""
    found = []
    for process in everything(laptop):
        with suppress(psutil.NoSuchProcess):  # a zombie is one, too
            if named in " ".join(process.cmdline()):
                found.append(process)
    return found


async def another(laptop: Laptop, named: str, killed: psutil.Process) -> None:
    """Returns once another process has taken the place of a killed one."""
    await until(
        lambda: any(p.pid != killed.pid for p in running(laptop, named)), 30, f"another {named}"
    )


async def written(laptop: Laptop) -> None:
    """Returns when Redis has written what it has acknowledged. While the disk is slow to sync what
    was before, it holds that back for up to two seconds, and a kill would lose it."""
    redis = connect(laptop.running.redis_url)

    async def nothing_waits() -> bool:
        return not (await redis.info("persistence"))["aof_buffer_length"]

    try:
        await until(nothing_waits, 10, "what was acknowledged is written")
    finally:
        await redis.aclose()


async def test_a_killed_redis_is_back_with_its_data(laptop: Laptop) -> None:
    async with laptop.api() as api:
        file = {"file": ("a.txt", b"kept through a kill", "text/plain")}
        uploaded = (await api.post("/v1/files", files=file, data={"purpose": "assistants"})).json()
        await written(laptop)
        (server,) = running(laptop, "redis-server")
        server.kill()
        await another(laptop, "redis-server", server)

        async def served() -> bool:
            answer = await api.get(f"/v1/files/{uploaded['id']}/content")
            return answer.status_code == 200 and answer.content == b"kept through a kill"

        await until(served, 20, "files are served again, those from before too")
        assert "redis ended" in laptop.log.read_text()


async def test_a_killed_gcs_is_back_and_nobody_noticed(laptop: Laptop) -> None:
    async with laptop.api() as api:
        expected = await complete(api, GREEDY)
        stream = Stream(api, GREEDY)
        await stream.reached(chunks=5)
        (gcs,) = running(laptop, "gcs_server")
        gcs.kill()
        assert await stream.finished() == expected
        await another(laptop, "gcs_server", gcs)
        assert await complete(api, GREEDY) == expected
        assert "(gcs) ended" in laptop.log.read_text()


async def test_up_survives_its_controller_and_drains_on_ctrl_c(laptop: Laptop) -> None:
    async with laptop.api() as api:
        expected = await complete(api, GREEDY)

        stream = Stream(api, GREEDY)
        await stream.reached(chunks=5)
        (controller,) = running(laptop, "ray::ServeController")
        controller.kill()
        assert await stream.finished() == expected, "it never noticed"
        assert await complete(api, GREEDY) == expected, "nor do new requests"

        await another(laptop, "ray::ServeController", controller)
        stream = Stream(api, GREEDY)
        await stream.reached(chunks=5)
        before = everything(laptop)
        left = asyncio.create_task(laptop.stop(timeout_s=90))
        assert await stream.finished() == expected, "a drain lets it finish"
        assert not await left
    assert laptop.up.returncode == 0, laptop.log.read_text()
    _, alive = psutil.wait_procs(before, timeout=10)
    assert not alive, "nothing is left running"


async def test_what_is_lost_comes_back_and_what_is_killed_leaves_nothing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "tiny", window=1024)
    async with Laptop(tmp_path, "--model", str(tmp_path / "tiny"), INTERNAL_SECRET="") as laptop:
        first = everything(laptop)[1:]
        async with laptop.api() as api:
            expected = await complete(api, GREEDY)
            (raylet,) = running(laptop, "raylet/raylet")
            raylet.kill()
            _, left = await asyncio.to_thread(psutil.wait_procs, first, 30)
            assert not left, "of the lost stack"

            def up_again() -> bool:
                return laptop.log.read_text().count("Penstock is up.") == 2

            await until(up_again, START_S, "a new stack")
            assert await complete(api, GREEDY) == expected, "where the lost one was"
        assert "raylet" in laptop.log.read_text()
        logs = sorted((laptop.data_dir / "logs").iterdir())
        assert len(logs) == 2, "those of the lost one stay"
        assert all(str(path) in laptop.log.read_text() for path in logs)
        assert all((path / "raylet.out").exists() for path in logs)
        second = everything(laptop)
        laptop.up.kill()
        _, left = await asyncio.to_thread(psutil.wait_procs, second, 60)
        assert not left, "of a stack whose main process was killed"

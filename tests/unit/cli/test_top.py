"""`penstock top`: rates and quantiles of what replicas tell, the tables, the command itself."""

import asyncio
import io
import os
import pty
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from protos import router_pb2, router_pb2_grpc
from services.cli.arguments import SORTS
from services.cli.commands import top
from services.cli.commands.top.samples import Metrics, Sample, Span, quantile
from services.cli.commands.top.view import view
from services.cli.main import main
from services.common.discovery import Registration, Replica
from services.common.redis import connect
from services.common.transport import listen
from tests.support.transport import TRANSPORT
from tests.support.web import serving

ROOT = Path(__file__).parents[3]


def worker(id: str, role: str = "decode") -> Replica:
    return Replica("worker", id, "h:1", "h", 1, facts={"role": role, "model": "demo"})


GATEWAY = Replica("gateway", "gateway-1", "h:1", "h", 1)
TOKENIZER = Replica("tokenizer", "tokenizer-1", "h:1", "h", 1)
RETRIEVAL = Replica("retrieval", "retrieval-1", "h:1", "h", 1)
ROUTER = Replica("router", "router-1", "h:1", "h", 1)


def plain(**figures: float) -> str:
    """Metrics without labels."""
    return "".join(f"{name} {value}\n" for name, value in figures.items())


def of_worker(steps: float, tokens: float, free: float, running: float = 0, more: str = "") -> str:
    own = 'model="demo",role="decode"'
    return f"""
# TYPE penstock_worker_steps counter
penstock_worker_steps_total{{{own}}} {steps}
# TYPE penstock_worker_step_seconds histogram
penstock_worker_step_seconds_bucket{{{own},le="+Inf"}} {steps}
penstock_worker_step_seconds_count{{{own}}} {steps}
penstock_worker_step_seconds_sum{{{own}}} {steps * 0.02}
# TYPE penstock_worker_decode_tokens counter
penstock_worker_decode_tokens_total{{{own}}} {tokens}
# TYPE penstock_worker_kv_free_blocks gauge
penstock_worker_kv_free_blocks{{{own}}} {free}
# TYPE penstock_worker_kv_blocks gauge
penstock_worker_kv_blocks{{{own}}} 100
# TYPE penstock_worker_running_sequences gauge
penstock_worker_running_sequences{{{own}}} {running}
{more}"""


def of_gateway(ended: int, failed: int, running: int, fast: int, slow: int) -> str:
    ttft = "penstock_gateway_time_to_first_token_seconds"
    return f"""
# TYPE penstock_gateway_generations counter
penstock_gateway_generations_total{{model="demo",outcome="ok"}} {ended - failed}
penstock_gateway_generations_total{{model="demo",outcome="failed"}} {failed}
# TYPE penstock_gateway_running_requests gauge
penstock_gateway_running_requests {running}
# TYPE {ttft} histogram
{ttft}_bucket{{model="demo",le="0.1"}} {fast}
{ttft}_bucket{{model="demo",le="1.0"}} {fast + slow}
{ttft}_bucket{{model="demo",le="+Inf"}} {fast + slow}
{ttft}_count{{model="demo"}} {fast + slow}
{ttft}_sum{{model="demo"}} 1
"""


def sample(at: float, *told: tuple[Replica, str], **more: object) -> Sample:
    """A look at replicas that tell these metrics."""
    by_id = {replica.id: Metrics(text) for replica, text in told}
    return Sample(at, [replica for replica, _ in told], by_id, **more)  # type: ignore[arg-type]


def shown(span: Span, width: int = 160, sort: str = "role", interactive: bool = False) -> str:
    out = Console(file=io.StringIO(), width=width)
    out.print(view(span, width=width, sort=sort, interactive=interactive))
    return out.file.getvalue()  # type: ignore[attr-defined, no-any-return]


# -- what is made of the metrics


def test_rates_are_of_what_grew_between_two_looks() -> None:
    one, two = worker("w-1"), worker("w-2")
    first = sample(10.0, (one, of_worker(100, 1000, 90)), (two, of_worker(7, 70, 90)))
    last = sample(14.0, (one, of_worker(140, 1400, 90)), (two, of_worker(17, 170, 90)))
    span = Span(first, last)
    assert span.rate("worker", "penstock_worker_decode_tokens_total") == pytest.approx(125)
    assert span.rate_of(one, "penstock_worker_steps_total") == pytest.approx(10)
    assert span.rate("worker", "penstock_worker_steps_total", role="prefill") is None
    assert span.rate("worker", "penstock_worker_no_such_total") is None
    assert span.total("worker", "penstock_worker_kv_blocks") == 200


def test_a_replica_that_came_since_has_no_rate_yet_and_adds_to_none() -> None:
    one, new = worker("w-1"), worker("w-2")
    first = sample(0.0, (one, of_worker(0, 0, 90)))
    last = sample(2.0, (one, of_worker(10, 100, 90)), (new, of_worker(5000, 90000, 90)))
    span = Span(first, last)
    assert span.rate("worker", "penstock_worker_decode_tokens_total") == pytest.approx(50)
    assert span.rate_of(new, "penstock_worker_decode_tokens_total") is None
    mute = Span(first, sample(2.0, (one, "")))
    assert mute.rate("worker", "penstock_worker_decode_tokens_total") is None


def test_quantiles_are_of_what_came_between_the_looks_alone() -> None:
    first = sample(0.0, (GATEWAY, of_gateway(0, 0, 0, fast=1000, slow=0)))
    last = sample(10.0, (GATEWAY, of_gateway(10, 0, 0, fast=1000, slow=10)))
    name = "penstock_gateway_time_to_first_token_seconds"
    half, most = Span(first, last).quantiles("gateway", name, 0.5, 1.0)
    assert half == pytest.approx(0.55)
    assert most == pytest.approx(1.0)
    assert Span(last, last).quantiles("gateway", name, 0.5) == [None]


@pytest.mark.parametrize(
    ("buckets", "share", "value"),
    [
        ([], 0.5, None),
        ([(1.0, 0.0), (float("inf"), 0.0)], 0.5, None),
        ([(1.0, 4.0), (2.0, 4.0), (float("inf"), 4.0)], 0.5, 0.5),
        ([(1.0, 0.0), (2.0, 10.0), (float("inf"), 10.0)], 0.9, 1.9),
        ([(1.0, 5.0), (2.0, 5.0), (float("inf"), 10.0)], 0.99, 2.0),
    ],
)
def test_a_quantile_is_as_prometheus_estimates_it(
    buckets: list[tuple[float, float]], share: float, value: float | None
) -> None:
    assert quantile(buckets, share) == (None if value is None else pytest.approx(value))


def test_all_metrics_that_are_shown_are_told_by_some_service() -> None:
    source = (ROOT / "services" / "cli" / "commands" / "top" / "view.py").read_text()
    page = (ROOT / "docs" / "metrics.md").read_text()
    told = set(re.findall(r"^\| `(penstock_\w+)`", page, re.MULTILINE))
    shown = {name.removesuffix("_sum") for name in re.findall(r'"(penstock_\w+)"', source)}
    assert shown
    assert shown <= told


# -- how it looks


def busy(**more: object) -> Span:
    a, b, c = worker("worker-a", "prefill"), worker("worker-b"), worker("worker-c")
    idle = of_worker(0, 0, 100)
    first = sample(0.0, (a, idle), (b, idle), (c, idle), (GATEWAY, of_gateway(0, 0, 0, 0, 0)))
    last = sample(
        10.0,
        (a, idle),
        (b, of_worker(100, 3000, 5, running=3)),
        (c, of_worker(50, 1000, 50, running=9)),
        (GATEWAY, of_gateway(20, 5, 7, fast=10, slow=0)),
        **more,
    )
    return Span(first, last)


def test_the_figures_are_where_one_looks_for_them() -> None:
    status = router_pb2.WorkerStatus(id="worker-b", state="ready", breaker="closed")
    tripped = router_pb2.WorkerStatus(id="worker-c", state="ready", breaker="open")
    text = shown(busy(workers={"worker-b": status, "worker-c": tripped}))
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "7 running" in lines["requests"]
    assert "2.0/s ended" in lines["requests"]
    assert "0.5/s failed" in lines["requests"]
    assert "400/s decoded" in lines["tokens"]
    assert "p50 50 ms" in lines["TTFT"]
    assert "of the last 10 s" in lines["TTFT"]
    b = lines["worker-b"].split()
    assert b[1:4] == ["demo", "decode", "ready"]
    assert "95%" in b
    assert "300" in b, "tokens a second"
    assert "20" in b, "milliseconds a step"
    assert "breaker open" in lines["worker-c"]
    assert "not linked" in lines["worker-a"]


@pytest.mark.parametrize(
    ("sort", "order"),
    [
        ("role", ["worker-a", "worker-b", "worker-c"]),
        ("kv", ["worker-b", "worker-c", "worker-a"]),
        ("running", ["worker-c", "worker-b", "worker-a"]),
        ("tokens", ["worker-b", "worker-c", "worker-a"]),
        ("waiting", ["worker-a", "worker-b", "worker-c"]),
    ],
)
def test_workers_are_sorted_as_asked(sort: str, order: list[str]) -> None:
    text = shown(busy(), sort=sort, interactive=True)
    assert sorted(order, key=text.index) == order
    assert f"s sorts by {sort}" in text
    assert "q quits" not in shown(busy(), sort=sort)


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_a_narrow_terminal_shows_less_and_cuts_nothing(width: int) -> None:
    lines = shown(busy(), width=width, interactive=True).splitlines()
    assert "s sorts by role  q quits" in lines[0]
    assert all(len(line.rstrip()) <= width for line in lines)
    tables = [line for line in lines if line.startswith(("worker", "gateway"))]
    assert tables
    assert not any("…" in line for line in tables)
    assert any("KV used" in line for line in lines)
    assert ("memory" in "".join(tables)) == (width == 160)


def test_every_service_tells_what_it_does() -> None:
    """And what the installation does is the sum of it."""
    itl = "penstock_gateway_inter_token_latency_seconds_bucket"
    gateway = plain(
        penstock_gateway_running_requests=7,
        penstock_gateway_requests_total=30,
        process_cpu_seconds_total=5,
        process_resident_memory_bytes=3 * 2**30,
    )
    gateway += "".join(
        f'{itl}{{le="{le}"}} {n}\n' for le, n in (("0.01", 10), ("0.5", 20), ("+Inf", 20))
    )
    router = plain(
        penstock_router_admitted_requests=4,
        penstock_router_queued_requests=2,
        penstock_router_prompt_tokens_total=1000,
        penstock_router_prefix_hit_tokens_total=250,
    )
    engine = plain(
        penstock_worker_prefill_tokens_total=600,
        penstock_worker_waiting_sequences=11,
        process_cpu_seconds_total=5,
        penstock_worker_engine_cpu_seconds_total=10,
        process_resident_memory_bytes=2**29,
        penstock_worker_engine_resident_memory_bytes=2**30,
    )
    told = [
        (GATEWAY, gateway),
        (ROUTER, router),
        (TOKENIZER, plain(penstock_tokenizer_prompt_tokens_total=12000)),
        (RETRIEVAL, plain(penstock_retrieval_requests_total=25)),
        (worker("worker-a"), engine),
    ]
    before = [(replica, re.sub(r" [\d.]+\n", " 0\n", text)) for replica, text in told]
    lines = {
        line.split()[0]: line
        for line in shown(Span(sample(0.0, *before), sample(10.0, *told))).splitlines()
        if line.strip()
    }
    assert "7 running" in lines["requests"]
    assert "2 waiting" in lines["requests"], "at the routers"
    assert "60/s prefilled" in lines["tokens"]
    assert "25% cached" in lines["tokens"]
    assert re.findall(r"p\d\d \S+ m?s", lines["ITL"]) == ["p50 10 ms", "p95 451 ms", "p99 490 ms"]
    assert "7 running, 3.0 calls/s" in lines["gateway-1"]
    assert lines["gateway-1"].split()[-3:] == ["50%", "3.0", "GiB"]
    assert "4 admitted, 2 waiting" in lines["router-1"]
    assert "1,200 prompt tokens/s" in lines["tokenizer-1"]
    assert "2.5 calls/s" in lines["retrieval-1"]
    assert "11" in lines["worker-a"].split(), "waiting"
    assert "60" in lines["worker-a"].split(), "prefill tokens a second"
    assert lines["worker-a"].split()[-3:] == ["150%", "1.5", "GiB"], "with its engine"


@pytest.mark.parametrize(
    ("le", "text"), [("0.001", "1.0 ms"), ("0.01", "10 ms"), ("0.5", "500 ms"), ("2.0", "2.00 s")]
)
def test_a_time_has_the_digits_that_it_needs(le: str, text: str) -> None:
    name = "penstock_gateway_time_to_first_token_seconds_bucket"
    counts = f'{name}{{le="{le}"}} %d\n{name}{{le="+Inf"}} %d\n'
    span = Span(sample(0.0, (GATEWAY, counts % (0, 0))), sample(1.0, (GATEWAY, counts % (0, 9))))
    assert f"p50 {text}" in shown(span), "past the last bound it is that bound"


def test_a_replica_that_began_anew_counts_from_nothing() -> None:
    one, two = worker("w-1"), worker("w-2")
    first = sample(0.0, (one, of_worker(500, 5000, 90)), (two, of_worker(0, 0, 90)))
    last = sample(2.0, (one, of_worker(3, 30, 90)), (two, of_worker(10, 100, 90)))
    assert Span(first, last).rate("worker", "penstock_worker_decode_tokens_total") == 50
    assert Span(last, last).rate("worker", "penstock_worker_decode_tokens_total") is None


def test_who_gives_no_answer_and_who_drains_is_told() -> None:
    mute = Span(sample(0.0, (ROUTER, "")), sample(1.0, (ROUTER, ""), (worker("worker-a"), "")))
    assert shown(mute).count("no answer") == 2
    for id in ("worker-b", "gateway-1"):
        (line,) = [li for li in shown(busy(draining={id})).splitlines() if "drains" in li]
        assert line.startswith(id)
    assert "Redis is away" in shown(busy(fresh=False))
    assert "no worker is registered" in shown(Span(sample(0.0), sample(1.0, (ROUTER, ""))))


def test_gpus_have_columns_where_there_are_some() -> None:
    gpu = """
# TYPE penstock_gpu_utilization_ratio gauge
penstock_gpu_utilization_ratio{gpu="0"} 0.5
penstock_gpu_utilization_ratio{gpu="1"} 1.0
# TYPE penstock_gpu_memory_used_bytes gauge
penstock_gpu_memory_used_bytes{gpu="0"} 42949672960
penstock_gpu_memory_used_bytes{gpu="1"} 42949672960
"""
    one = worker("worker-a")
    text = shown(Span(sample(0.0, (one, "")), sample(1.0, (one, of_worker(0, 0, 1, more=gpu)))))
    assert "75%" in text
    assert "80.0 GiB" in text
    assert "GPU" not in shown(busy())


# -- the command


@pytest.fixture
def platform(redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A registered worker and a router that sees it."""
    monkeypatch.setenv("REDIS_URL", redis_url)
    monkeypatch.setenv("PENSTOCK_NAMESPACE", namespace)
    over, ready, loop = asyncio.Event(), threading.Event(), asyncio.new_event_loop()
    at: list[str] = []

    class Router(router_pb2_grpc.RouterServicer):
        async def GetStatus(self, request: object, context: object) -> router_pb2.RouterStatus:
            told = router_pb2.RouterStatus()
            told.workers.add(id="worker-a", state="ready", breaker="half-open")
            return told

    async def serve() -> None:
        server = TRANSPORT.server()
        router_pb2_grpc.add_RouterServicer_to_server(Router(), server)
        at.append(f"127.0.0.1:{listen(server, '127.0.0.1', 0)}")
        await server.start()
        ready.set()
        await over.wait()
        await server.stop(0)

    async def register(metrics: str) -> None:
        client = connect(redis_url)
        facts = {"role": "decode", "model": "demo"}
        for replica in (
            Replica("worker", "worker-a", "h:1", "h", 1, metrics, facts),
            Replica("router", "router-a", at[0], "h", 1, metrics),
        ):
            await Registration(client, namespace, replica, 3600)._once()
        await client.aclose()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(20)
    with serving({"/metrics": (200, of_worker(1, 1, 25, running=3))}) as address:
        asyncio.run(register(f"http://{address}/metrics"))
        yield
    loop.call_soon_threadsafe(over.set)
    thread.join(20)
    loop.close()


@pytest.mark.usefixtures("platform")
def test_once_prints_plain_text_and_leaves(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--interval", "0.1"]) == 0
    said = capsys.readouterr().out
    assert said.count("penstock top") == 1
    assert "breaker half-open" in said
    assert "75%" in said
    assert "\x1b" not in said
    assert "q quits" not in said


def test_into_a_pipe_goes_one_view_after_the_other_each_of_at_least_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = iter(((0, 0), (4, 40), (8, 80), (16, 400), (30, 680)))

    async def look(*_: object) -> Sample:
        for at, tokens in looks:
            return sample(at, (worker("w"), of_worker(at, tokens, 90)))
        raise KeyboardInterrupt

    monkeypatch.setattr(top, "look", look)
    assert main(["top", "--interval", "0.1"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("tokens")]
    rates = [re.search(r"(\d+)/s decoded", line) for line in lines]
    assert [rate and rate[1] for rate in rates] == ["10", "10", "30", "20"]


@pytest.mark.usefixtures("platform")
def test_who_drains_and_who_hangs_is_there_once(
    redis_url: str, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that drains is for a moment under both names; a router that is gone keeps no figure
    away."""

    async def register() -> None:
        client = connect(redis_url)
        drains = Replica("worker", "worker-a", "h:1", "h", 1, "", {"role": "decode", "model": "m"})
        await Registration(client, namespace, drains, 3600, under="draining")._once()
        gone = Replica("router", "router-0", "127.0.0.1:1", "h", 1, "http://127.0.0.1:1/metrics")
        await Registration(client, namespace, gone, 3600)._once()
        await client.aclose()

    asyncio.run(register())
    assert main(["top", "--once", "--interval", "0.1"]) == 0
    said = capsys.readouterr().out
    assert "worker 1" in said
    (line,) = [line for line in said.splitlines() if line.startswith("worker-a")]
    assert "no answer" in line, "of the record under which it drains"
    (line,) = [line for line in said.splitlines() if line.startswith("router-0")]
    assert "no answer" in line


def test_without_anything_to_see_it_says_so(
    redis_url: str,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("REDIS_URL", redis_url)
    monkeypatch.setenv("PENSTOCK_NAMESPACE", namespace)
    assert main(["top"]) == 1
    assert "nothing is registered" in capsys.readouterr().err
    monkeypatch.setenv("REDIS_URL", "redis://:hunter2@127.0.0.1:1/0")
    assert main(["top"]) == 1
    said = capsys.readouterr().err
    assert "cannot be reached" in said
    assert "hunter2" not in said


@pytest.mark.parametrize("interval", ["0", "-1", "soon", "1e9", "nan"])
def test_an_interval_is_a_sensible_number(interval: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["top", f"--interval={interval}"])
    assert ended.value.code == 2


@pytest.mark.usefixtures("platform")
def test_in_a_terminal_keys_sort_and_quit_and_the_terminal_is_as_before() -> None:
    ours, theirs = pty.openpty()
    import termios

    termios.tcsetwinsize(theirs, (40, 150))
    before = termios.tcgetattr(theirs)
    process = subprocess.Popen(
        [sys.executable, "-m", "services.cli", "top", "--interval", "3600"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm", "PYTHONPATH": str(ROOT)},
    )
    read = _reader(ours)
    try:
        read("s sorts by role")
        for sort in (*SORTS[1:], SORTS[0]):
            os.write(ours, b"s")
            read(f"s sorts by {sort}")  # at once, though the next look is an hour away
        os.write(ours, b"xq")
        assert process.wait(30) == 0
        assert termios.tcgetattr(theirs) == before
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


def _reader(descriptor: int) -> Callable[[str], None]:
    """Reads on until it has read a text, for at most a minute."""
    text = ""
    written = select.poll()
    written.register(descriptor, select.POLLIN)

    def read(wanted: str) -> None:
        nonlocal text
        deadline = time.monotonic() + 60
        while wanted not in text:
            assert time.monotonic() < deadline, text
            if written.poll(200):
                text += os.read(descriptor, 65536).decode(errors="replace")
        text = text.partition(wanted)[2]

    return read

"""How it looks: what clients get in a few lines, then the workers, then the other replicas."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from services.cli.commands.top.samples import Span
from services.common.discovery import SERVICES, Replica

Cell = Callable[[Span, Replica], str | Text]
_BAR = 10  # characters
_GAP = 2
_NOTHING = "–"
_TOO_FULL = 0.9


@dataclass(frozen=True)
class Column:
    """One of a table of replicas."""

    name: str
    cell: Cell
    rank: int  # the highest is left out first where there is no room
    justify: Literal["left", "right"] = "right"
    optional: bool = False  # left out when nobody has something to tell


def view(span: Span, *, width: int, sort: str, interactive: bool) -> Group:
    """Everything there is to see in `width` columns; `interactive`: with the keys."""
    workers = sorted(span.last.of("worker"), key=lambda worker: _rank(span, worker, sort))
    others = [replica for replica in span.last.replicas if replica.service != "worker"]
    none = Text("no worker is registered: requests wait, then fail", style="bold red")
    parts: list[RenderableType] = [
        _title(span, sort if interactive else ""),
        "",
        _summary(span),
        "",
        _fitting(_WORKER, span, workers, width) if workers else none,
        "",
        _fitting(_OTHER, span, others, width) if others else "",
    ]
    return Group(*parts)


def _title(span: Span, sort: str) -> RenderableType:
    line = Table.grid(expand=True)
    keys = f"s sorts by {sort}  q quits" if sort else ""
    line.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    line.add_column(justify="right", no_wrap=True, min_width=len(keys))
    counts = [f"{s} {len(span.last.of(s))}" for s in SERVICES]
    left = Text(f"penstock top  {time.strftime('%H:%M:%S')}  ", style="bold")
    left.append("  ".join(counts), style="default")
    if not span.last.fresh:
        left.append("  Redis is away: replicas as last seen", style="bold red")
    line.add_row(left, Text(keys, style="dim"))
    return line


def _summary(span: Span) -> RenderableType:
    grid = Table.grid(padding=(0, 3))
    for _ in range(5):
        grid.add_column()
    running = span.total("gateway", "penstock_gateway_running_requests")
    waiting = span.total("router", "penstock_router_queued_requests")
    ended = span.rate("gateway", "penstock_gateway_generations_total")
    bad = span.rate("gateway", "penstock_gateway_generations_total", outcome="failed")
    failing = Text(f"{_number(bad, 1)}/s failed", style="bold red" if bad else "")
    queue = Text(f"{_number(waiting)} waiting", style="yellow" if waiting else "")
    grid.add_row(
        Text("requests", style="bold"),
        f"{_number(running)} running",
        queue,
        f"{_number(ended, 1)}/s ended",
        failing,
    )
    decoded = span.rate("worker", "penstock_worker_decode_tokens_total")
    computed = span.rate("worker", "penstock_worker_prefill_tokens_total")
    grid.add_row(
        Text("tokens", style="bold"),
        f"{_number(decoded)}/s decoded",
        f"{_number(computed)}/s prefilled",
        f"{_share(_hits(span))} cached",
    )
    for label, name in (
        ("TTFT", "penstock_gateway_time_to_first_token_seconds"),
        ("ITL", "penstock_gateway_inter_token_latency_seconds"),
    ):
        half, most, worst = span.quantiles("gateway", name, 0.5, 0.95, 0.99)
        row = [f"p50 {_duration(half)}", f"p95 {_duration(most)}", f"p99 {_duration(worst)}"]
        grid.add_row(
            Text(label, style="bold"), *row, Text(f"of the last {span.seconds:.0f} s", style="dim")
        )
    return grid


def _hits(span: Span) -> float | None:
    prompts = span.rate("router", "penstock_router_prompt_tokens_total")
    hits = span.rate("router", "penstock_router_prefix_hit_tokens_total")
    return hits / prompts if prompts and hits is not None else None


def _rank(span: Span, worker: Replica, sort: str) -> tuple[object, ...]:
    """Busiest first; by role, as on a request's way."""
    metrics, by_name = span.last.metrics[worker.id], (worker.facts.get("model", ""), worker.id)
    busy = {
        "kv": lambda: _used(span, worker),
        "running": lambda: metrics.get("penstock_worker_running_sequences"),
        "waiting": lambda: metrics.get("penstock_worker_waiting_sequences"),
        "tokens": lambda: span.rate_of(worker, "penstock_worker_decode_tokens_total"),
    }
    if sort in busy:
        return (-(busy[sort]() or 0.0), *by_name)
    roles = ("prefill", "both", "decode")
    role = worker.facts.get("role", "")
    return (by_name[0], roles.index(role) if role in roles else len(roles), worker.id)


def _used(span: Span, worker: Replica) -> float | None:
    metrics = span.last.metrics[worker.id]
    free = metrics.get("penstock_worker_kv_free_blocks")
    total = metrics.get("penstock_worker_kv_blocks")
    return 1 - free / total if total and free is not None else None


def _gpu_busy(span: Span, worker: Replica) -> str:
    """Mean over its GPUs."""
    return _share(span.last.metrics[worker.id].mean("penstock_gpu_utilization_ratio"))


def _step_s(span: Span, worker: Replica) -> float | None:
    """A step's mean duration."""
    steps = span.rate_of(worker, "penstock_worker_steps_total")
    spent = span.rate_of(worker, "penstock_worker_step_seconds_sum")
    return spent / steps if steps and spent is not None else None


def _cpu(span: Span, replica: Replica) -> float | None:
    """Cores in use, a worker's engine included."""
    names = ("process_cpu_seconds_total", "penstock_worker_engine_cpu_seconds_total")
    return _sum([span.rate_of(replica, name) for name in names])


def _memory(span: Span, replica: Replica) -> float | None:
    names = ("process_resident_memory_bytes", "penstock_worker_engine_resident_memory_bytes")
    return _sum([span.last.metrics[replica.id].get(name) for name in names])


def _state(span: Span, worker: Replica) -> Text:
    """As the routers have it."""
    seen = span.last.workers.get(worker.id)
    if not span.last.metrics[worker.id]:
        return Text("no answer", style="bold red")
    if worker.id in span.last.draining:
        return Text("drains", style="yellow")
    if seen is None:
        return Text("not linked", style="yellow")
    if seen.breaker not in ("", "closed"):
        return Text(f"breaker {seen.breaker}", style="bold red")
    return Text(seen.state, style="green" if seen.state == "ready" else "yellow")


def _answers(span: Span, replica: Replica) -> Text:
    if not span.last.metrics[replica.id]:
        return Text("no answer", style="bold red")
    if replica.id in span.last.draining:
        return Text("drains", style="yellow")
    return Text("answers", style="green")


def _does(span: Span, replica: Replica) -> str:
    """What tells most of a service."""
    metrics = span.last.metrics[replica.id]
    if replica.service == "gateway":
        running = metrics.get("penstock_gateway_running_requests")
        asked = span.rate_of(replica, "penstock_gateway_requests_total")
        return f"{_number(running)} running, {_number(asked, 1)} calls/s"
    if replica.service == "router":
        admitted = metrics.get("penstock_router_admitted_requests")
        queued = metrics.get("penstock_router_queued_requests")
        return f"{_number(admitted)} admitted, {_number(queued)} waiting"
    if replica.service == "tokenizer":
        tokens = span.rate_of(replica, "penstock_tokenizer_prompt_tokens_total")
        return f"{_number(tokens)} prompt tokens/s"
    calls = span.rate_of(replica, "penstock_retrieval_requests_total")
    return f"{_number(calls, 1)} calls/s"


def _gauge(name: str, shown: Callable[[float | None], str]) -> Cell:
    return lambda span, replica: shown(span.last.metrics[replica.id].get(name))


def _rate(name: str) -> Cell:
    return lambda span, replica: _number(span.rate_of(replica, name))


def _fitting(columns: list[Column], span: Span, replicas: list[Replica], width: int) -> Table:
    """The columns that fit, by their rank; optional ones that tell nothing are left out."""
    filled = [(column, [column.cell(span, r) for r in replicas]) for column in columns]
    filled = [(c, cells) for c, cells in filled if not c.optional or any(map(_told, cells))]

    def needed(column: Column, cells: list[str | Text]) -> int:
        return max(len(column.name), *(cell_len(str(cell)) for cell in cells)) + _GAP

    while sum(needed(*each) for each in filled) > width and len(filled) > 2:
        filled.remove(max(filled, key=lambda each: each[0].rank))
    table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="bold reverse")
    for column, _ in filled:
        table.add_column(column.name, justify=column.justify, no_wrap=True)
    for row in zip(*(cells for _, cells in filled), strict=True):
        table.add_row(*row)
    return table


def _told(cell: str | Text) -> bool:
    return str(cell) != _NOTHING


def _bar(share: float | None) -> Text:
    if share is None:
        return Text(_NOTHING)
    full = round(share * _BAR)
    style = "red" if share > _TOO_FULL else "green"
    bar = Text("█" * full, style=style).append("░" * (_BAR - full), style="dim")
    return bar.append(f" {share:4.0%}", style="default")


def _number(value: float | None, digits: int = 0) -> str:
    return _NOTHING if value is None else f"{value:,.{digits}f}"


def _share(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.0%}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return _NOTHING
    return (
        f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.{1 if seconds < 0.01 else 0}f} ms"
    )


def _bytes(size: float | None) -> str:
    if size is None:
        return _NOTHING
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def _sum(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


_WORKER = [
    Column("worker", lambda _, worker: worker.id, 0, "left"),
    Column("model", lambda _, worker: worker.facts.get("model", ""), 7, "left"),
    Column("role", lambda _, worker: worker.facts.get("role", ""), 6, "left"),
    Column("state", _state, 1, "left"),
    Column("KV used", lambda span, worker: _bar(_used(span, worker)), 2),
    Column("run", _gauge("penstock_worker_running_sequences", _number), 3),
    Column("wait", _gauge("penstock_worker_waiting_sequences", _number), 4),
    Column("tok/s", _rate("penstock_worker_decode_tokens_total"), 5),
    Column("prefill/s", _rate("penstock_worker_prefill_tokens_total"), 8),
    Column("steps/s", _rate("penstock_worker_steps_total"), 11),
    Column("step", lambda span, worker: _duration(_step_s(span, worker)), 12),
    Column("CPU", lambda span, worker: _share(_cpu(span, worker)), 13),
    Column("memory", lambda span, worker: _bytes(_memory(span, worker)), 14),
    Column("GPU", _gpu_busy, 9, optional=True),
    Column("GPU memory", _gauge("penstock_gpu_memory_used_bytes", _bytes), 10, optional=True),
]
_OTHER = [
    Column("replica", lambda _, replica: replica.id, 0, "left"),
    Column("state", _answers, 1, "left"),
    Column("does", _does, 2, "left"),
    Column("CPU", lambda span, replica: _share(_cpu(span, replica)), 3),
    Column("memory", lambda span, replica: _bytes(_memory(span, replica)), 4),
]

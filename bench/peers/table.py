"""A comparison as a page of Markdown."""

from collections.abc import Iterable
from dataclasses import dataclass

from bench.peers.comparison import OURS, Comparison, Target, targets
from bench.peers.floors import Machine

LOUD_CORES = 0.2
"""From here on others' share of the machine is worth a word."""


@dataclass(frozen=True)
class About:
    """What the page says of the run itself."""

    date: str
    processor: str
    cores: int
    arithmetic: str
    """Of the peers: `bf16` where the processor has it, else `f32`."""
    machine: Machine
    versions: dict[str, str]
    """By contestant."""


def page(comparison: Comparison, about: About) -> str:
    models = list(dict.fromkeys(r.model for r in comparison.repetitions))
    parts = [_head(about)]
    for model in models:
        parts.append(_model(comparison, model))
    parts += [_targets(targets(comparison)), _repetitions(comparison)]
    return "\n\n".join(parts) + "\n"


def _head(about: About) -> str:
    flop = ", ".join(f"{v / 1e9:.0f} GFLOP/s in {k}" for k, v in about.machine.flop_per_s.items())
    pages = {"pages_4k": "pages of 4 KiB", "pages_2m": "pages of 2 MiB"}
    read = [f"{v / 1e9:.1f} GB/s on {pages[k]}" for k, v in about.machine.bytes_per_s.items()]
    versions = ", ".join(f"{name} {version}" for name, version in about.versions.items())
    lines = [
        f"# Penstock beside its peers ({about.date})",
        "",
        "By `make bench-peers`. Medians; each repetition runs all in turn, alone (the others are "
        "stopped meanwhile).",
        "",
        f"- Machine: {about.processor}, {about.cores} cores; peers compute in {about.arithmetic}.",
        f"- In this run, the medians of looks before each round: PyTorch's best product {flop}; "
        f"a plain read of memory {' and '.join(read) or 'not measured: no compiler'}.",
        f"- Versions: {versions}.",
    ]
    return "\n".join(lines)


def _model(comparison: Comparison, model: str) -> str:
    rows = [_figures(comparison, name, model) for name in [OURS, *comparison.peers(model)]]
    if floor := comparison.floors.get(model):
        rows.append(
            [
                "floor",
                f"{floor.w1_tok_per_s:.0f}",
                "",
                f"{floor.w2_ttft_s * 1e3:.0f} ms",
                f"{floor.w2_itl_s * 1e3:.1f} ms",
                f"{floor.w3_wall_s:.2f} s",
                f"{floor.most_rss / 1e6:.0f} MB at most",
                "",
            ]
        )
    heads = [f"model {model}", "w1 tok/s", "w1 p99 between tokens", "w2 first token"]
    heads += ["w2 between tokens", "w3 whole", "peak RSS", "start"]
    failed = [
        f"- {contestant} gave no (more) figures: {words}"
        for (contestant, of), words in comparison.failed.items()
        if of == model
    ]
    return "\n".join([f"## Model {model}", "", _grid(heads, rows), *["", *failed] * bool(failed)])


def _figures(comparison: Comparison, contestant: str, model: str) -> list[str]:
    def told(workload: str, figure: str, scale: float, form: str) -> str:
        value = comparison.median(contestant, model, workload, figure)
        return "" if value is None else form.format(value * scale)

    rss = comparison.peak_rss.get((contestant, model))
    start = comparison.start_s.get((contestant, model))
    return [
        contestant,
        told("w1", "output_tok_per_s", 1, "{:.1f}"),
        told("w1", "itl_p99_s", 1e3, "{:.0f} ms"),
        told("w2", "ttft_s", 1e3, "{:.0f} ms"),
        told("w2", "itl_s", 1e3, "{:.1f} ms"),
        told("w3", "wall_s", 1, "{:.2f} s"),
        "" if rss is None else f"{rss / 1e6:.0f} MB",
        "" if start is None else f"{start:.1f} s",
    ]


def _targets(found: list[Target]) -> str:
    heads = ["target", "against", "asked", "came", "met"]
    rows = []
    for target in found:
        asked = f"{'at least' if target.at_least else 'at most'} {_number(target.bound, target)}"
        came = "not measured" if target.came is None else _number(target.came, target)
        met = {None: "", True: "yes", False: "**no**"}[target.met]
        rows.append([target.words, target.against, asked, came, met])
    return f"## Targets\n\n{_grid(heads, rows)}"


def _number(value: float, target: Target) -> str:
    return f"{value:.2f}" if target.unit == "x" else f"{value:.4g} {target.unit}"


def _repetitions(comparison: Comparison) -> str:
    heads = ["model", "workload", "who", "tok/s", "first token", "between", "p99", "whole"]
    heads += ["cores of others"]
    rows = [
        [
            r.model,
            r.workload,
            r.contestant,
            f"{r.output_tok_per_s:.1f}",
            f"{r.ttft_s * 1e3:.0f} ms",
            f"{r.itl_s * 1e3:.1f} ms",
            f"{r.itl_p99_s * 1e3:.0f} ms",
            f"{r.wall_s:.2f} s",
            f"{'**' * loud}{r.foreign_cores:.2f}{'**' * loud}",
        ]
        for r in comparison.repetitions
        for loud in [r.foreign_cores >= LOUD_CORES]
    ]
    return f"## Repetitions, in their order\n\n{_grid(heads, rows)}"


def _grid(heads: list[str], rows: Iterable[list[str]]) -> str:
    lines = [heads, ["---"] + ["---:"] * (len(heads) - 1), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)

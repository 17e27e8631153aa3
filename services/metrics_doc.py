"""`python -m services.metrics_doc`: docs/metrics.md, from the modules that make the metrics."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parents[1] / "docs" / "metrics.md"
_MODULES = {
    "Every service": (
        "common.telemetry.metrics",
        "common.transport",
        "common.locks.certificates",
        "common.policy.metrics",
    ),
    "Gateway": ("gateway.metrics",),
    "Retrieval": ("retrieval.metrics",),
    "Tokenizer": ("tokenizer.metrics",),
    "Router": ("router.metrics",),
    "Worker": ("worker.metrics", "worker.engine_metrics", "worker.gpu_metrics"),
}
_HEAD = """# Metrics

What each replica tells Prometheus on its metrics port (`PENSTOCK_<SERVICE>__METRICS_PORT`, path
`/metrics`). A histogram has `_bucket`, `_sum` and `_count`. Beside these, every replica has
`process_*` and `python_*`, as Prometheus' client makes them. Labels are bounded: no request, no
key, no text. This page is made by `make docs` from the code.
"""


@dataclass(frozen=True)
class Family:
    """One metric as it is named in queries; a histogram's name lacks its suffixes."""

    name: str
    kind: str  # counter, gauge, histogram
    labels: tuple[str, ...]
    told: str

    @property
    def series(self) -> set[str]:
        """The names of its series."""
        suffixes = ("_bucket", "_sum", "_count") if self.kind == "histogram" else ("",)
        return {self.name + suffix for suffix in suffixes}


def families(names: tuple[str, ...]) -> Iterator[Family]:
    """Of these modules below `services`, in the order in which they stand there."""
    for name in names:
        module = import_module(f"services.{name}")
        for value in vars(module).values():
            if hasattr(value, "describe") and not isinstance(value, type):
                yield from _families(value)


def _families(collector: Any) -> Iterator[Family]:
    for family in collector.describe():
        own: tuple[str, ...] = getattr(collector, "_labelnames", ())
        name = family.name + "_total" * (family.type == "counter")
        labels = own or getattr(family, "_labelnames", ())
        yield Family(name, family.type, tuple(labels), family.documentation)


def all_families() -> dict[str, Family]:
    """By name."""
    return {f.name: f for names in _MODULES.values() for f in families(names)}


def document() -> str:
    """The whole file."""
    parts = [_HEAD]
    for title, names in _MODULES.items():
        parts += [f"## {title}\n", "| name | kind | labels | |", "| --- | --- | --- | --- |"]
        for family in families(names):
            labels = ", ".join(f"`{label}`" for label in family.labels)
            parts.append(f"| `{family.name}` | {family.kind} | {labels} | {family.told} |")
        parts.append("")
    return "\n".join(parts)


if __name__ == "__main__":
    DOCUMENT.write_text(document())
    print(DOCUMENT, file=sys.stderr)

"""The ledger's entries in files: CSV, or Parquet where pyarrow is installed."""

import csv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from services.gateway.metering.ledger import Entry

COLUMNS = (
    *("time", "entry", "id", "status", "tenant", "user", "model", "tier", "route"),
    *("prompt", "cached", "output", "cost"),
)
_ROWS = 10_000  # in memory at once
Write = Callable[[Entry], None]


@contextmanager
def writer(path: Path) -> Iterator[Write]:
    """Writes entries to a file of that ending, which is whole when the block ends. Raises
    ValueError for another ending than .csv and .parquet and where no file can be made, RuntimeError
    without pyarrow."""
    kinds = {".csv": _csv, ".parquet": _parquet}
    if path.suffix not in kinds:
        raise ValueError(f"--export: {path} ends with neither .csv nor .parquet")
    part = path.with_name(path.name + ".part")
    try:
        part.touch()
    except OSError as error:
        raise ValueError(f"--export: {path}: {error.strerror}") from None
    try:
        with kinds[path.suffix](part) as write:
            yield write
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _csv(path: Path) -> Iterator[Write]:
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        yield lambda entry: rows.writerow(
            [
                row.isoformat() if isinstance(row, datetime) else row
                for row in (_row(entry)[name] for name in COLUMNS)
            ]
        )


@contextmanager
def _parquet(path: Path) -> Iterator[Write]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise RuntimeError("Parquet needs pyarrow: pip install 'penstock[parquet]'") from None
    numbers = dict.fromkeys(("prompt", "cached", "output"), pa.int64())
    kinds = {"time": pa.timestamp("ms", tz="UTC"), "cost": pa.decimal128(18, 9), **numbers}
    schema = pa.schema([(name, kinds.get(name, pa.string())) for name in COLUMNS])
    waiting: list[dict[str, Any]] = []
    with pq.ParquetWriter(path, schema) as file:

        def flush() -> None:
            file.write_table(pa.Table.from_pylist(waiting, schema))
            waiting.clear()

        def write(entry: Entry) -> None:
            waiting.append(_row(entry))
            if len(waiting) >= _ROWS:
                flush()

        yield write
        flush()


def _row(entry: Entry) -> dict[str, Any]:
    told = {name: getattr(entry, name) for name in COLUMNS[1:]}
    return {"time": datetime.fromtimestamp(entry.time_s, UTC), **told}

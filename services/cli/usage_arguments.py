"""What `penstock usage` takes. Imports next to nothing, as arguments.py."""

import argparse
import time
from datetime import UTC, datetime
from pathlib import Path

COLUMNS = ("tenant", "user", "model", "tier", "route", "status", "day", "month")


def usage(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tenant", help="of this tenant alone")
    parser.add_argument("--user", help="of this key or user alone, as the ledger has it: key_…")
    parser.add_argument("--model", help="of this model alone")
    parser.add_argument(
        "--since", type=_moment, metavar="WHEN", help="2026-11-01 (UTC), or 24h, 30d ago"
    )
    parser.add_argument("--until", type=_moment, metavar="WHEN", help="before then")
    parser.add_argument(
        "--by",
        type=_columns,
        default=["tenant", "model"],
        metavar="NAMES",
        help=f"rows by these, with commas: {', '.join(COLUMNS)} (default tenant,model)",
    )
    parser.add_argument(
        "--export", type=Path, metavar="FILE", help="entries to FILE.csv or FILE.parquet instead"
    )
    parser.add_argument(
        "--remove",
        action="store_true",
        help="with --export of all: what is in the file leaves the ledger",
    )


def _moment(text: str) -> float:
    """Unix time of "2026-11-01" (UTC), or of so long ago: "24h", "30d"."""
    number, unit = text[:-1], {"m": 60, "h": 3600, "d": 86_400}.get(text[-1:])
    if unit is not None and number.isdecimal():
        return time.time() - int(number) * unit
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        message = f"{text!r} is no date like 2026-11-01, and no time ago like 24h or 30d"
        raise argparse.ArgumentTypeError(message) from None
    return at.replace(tzinfo=at.tzinfo or UTC).timestamp()


def _columns(text: str) -> list[str]:
    """Of --by."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or any(name not in COLUMNS for name in names):
        raise argparse.ArgumentTypeError(f"{text!r}: names from {', '.join(COLUMNS)}")
    return names

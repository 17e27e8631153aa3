"""What `penstock bench serve` takes; apart from what it runs, so that `--help` is told at once."""

import argparse
from pathlib import Path

from bench.result_file import result_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", required=True, help="the server's address, with or without /v1")
    add("--workload", required=True, type=Path, help="JSON lines, one request each")
    add("--json", required=True, type=result_file, help="where the results go")
    add("--key", help="API key (default: PENSTOCK_API_KEY, or the local Penstock's own)")
    add("--ca", type=Path, metavar="FILE", help="authorities of its certificate, PEM")
    add("--model", default="", help="default: the first that the server lists")
    add("--concurrency", type=_positive_int, help="most requests in flight; default: no limit")
    add("--timeout-s", type=_positive, default=600.0, help="per request (default: %(default)s)")
    add("--slo-ttft-ms", type=_positive, help="goodput: time to the first text")
    add("--slo-tpot-ms", type=_positive, help="goodput: mean time per output token after it")
    add("--slo-e2e-ms", type=_positive, help="goodput: whole request")


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text}")
    return value

"""`penstock usage`: sums of the ledger, and its entries in files."""

import asyncio
import csv
from decimal import Decimal
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from services.cli.command_line import parser
from services.cli.commands.usage import main
from services.common.redis import Redis
from services.gateway.metering.ledger import Entry, Ledger
from services.gateway.metering.run import Held, Run, Used
from services.gateway.metering.shared_meter import SharedMeter


@pytest.fixture
async def ledger(
    redis: Redis,
    redis_url: str,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Ledger:
    monkeypatch.setenv("PENSTOCK_REDIS_URL", redis_url)
    monkeypatch.setenv("PENSTOCK_NAMESPACE", namespace)
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "200")
    meter = SharedMeter(redis, namespace, 15, 5)
    for number, (tenant, model, cost) in enumerate(
        (("a", "m", 1_500_000_001), ("a", "m", 2), ("a", "n", 7), ("b", "m", 30))
    ):
        who = {"tenant": tenant, "user": "key_1", "model": model, "tier": "normal", "route": "/v1"}
        run = Run(f"r{number}", who, (), Held(0, 0), Used(10, 4, 3, cost), "ok")
        await meter.settle(run)
    await meter.settle(Run("r3", who, (), Held(0, 0), Used(11, 4, 3, 31), "ok"))  # 1 was missing
    return Ledger(redis, namespace)


async def usage(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[list[str]]:
    """The rows of what it shows."""
    assert await asyncio.to_thread(run, list(arguments)) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.replace("│", " ").split() for line in lines]
    return [row for row in rows if row and row[-1][-1].isdigit()]


def run(argv: list[str]) -> int:
    return main(parser().parse_args(["usage", *argv]))


async def test_sums_by_whatever_is_asked_for(ledger, capsys):
    assert await usage(capsys) == [
        ["a", "m", "2", "20", "8", "6", "1.500000003"],
        ["a", "n", "1", "10", "4", "3", "0.000000007"],
        ["b", "m", "1", "11", "4", "3", "0.000000031"],
        ["all", "4", "41", "16", "12", "1.500000041"],
    ]
    rows = await usage(capsys, "--by", "month,status", "--tenant", "b")
    assert [row[1:3] for row in rows[:2]] == [["correction", "0"], ["ok", "1"]]
    assert await usage(capsys, "--until", "2020-01-01", "--by", "tenant") == []


@pytest.mark.parametrize("kind", ["csv", "parquet"])
async def test_files_have_what_the_ledger_has(ledger, capsys, tmp_path, kind):
    file = tmp_path / f"usage.{kind}"
    entries: list[Entry] = [entry async for entry in ledger.entries()]
    await usage(capsys, "--export", str(file), "--remove")
    with file.open("rb" if kind == "parquet" else "r") as opened:
        read = csv.DictReader(opened) if kind == "csv" else pq.read_table(opened).to_pylist()
        rows = list(read)
    assert [row["entry"] for row in rows] == [entry.entry for entry in entries]
    assert sum(Decimal(row["cost"]) for row in rows) == Decimal("1.500000041")
    assert {row["user"] for row in rows} == {"key_1"}
    assert [entry async for entry in ledger.entries()] == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--export", "x.txt"], "ends with neither"),
        (["--remove"], "--remove: with --export"),
        (["--remove", "--export", "x.csv", "--tenant", "a"], "--remove: with --export"),
        (["--by", "tenant,week"], "names from tenant"),
        (["--since", "yesterday"], "no date like"),
    ],
)
async def test_wrong_usage_is_told(ledger, capsys, arguments, told):
    with pytest.raises((SystemExit, ValueError)) as refused:
        await asyncio.to_thread(run, list(arguments))
    assert told in str(refused.value) + capsys.readouterr().err
    assert [entry async for entry in ledger.entries()]

"""The command: exit codes, JSON, bounds, and that it changes nothing and tells no secret."""

import asyncio
import json
import threading
from pathlib import Path

import pytest

from services.cli.commands import doctor
from services.cli.commands.doctor import findings
from services.cli.commands.doctor.findings import Finding, aside, bounded, failed, ok, warning
from services.cli.main import main
from tests.support.findings import about


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """What the command finds."""
    told: list[Finding] = []

    async def examine(_: object) -> list[Finding]:
        return told

    monkeypatch.setattr(doctor, "examine", examine)
    return told


GOOD = ok("this", "is well")
DOUBTFUL = warning("that", "is odd", "mend that")
BAD = failed("those", "are broken", "mend those")


@pytest.mark.parametrize(
    ("told", "arguments", "code"),
    [
        ([GOOD], [], 0),
        ([GOOD], ["--strict"], 0),
        ([GOOD, DOUBTFUL], [], 0),
        ([GOOD, DOUBTFUL], ["--strict"], 1),
        ([BAD, GOOD], [], 1),
        ([BAD, GOOD], ["--json"], 1),
    ],
)
def test_what_failed_makes_the_exit_code_and_warnings_if_asked(
    found: list[Finding], told: list[Finding], arguments: list[str], code: int
) -> None:
    found += told
    assert main(["doctor", *arguments]) == code


def test_each_finding_is_a_line_and_says_what_to_do(
    found: list[Finding], capsys: pytest.CaptureFixture[str]
) -> None:
    found += [GOOD, DOUBTFUL, BAD]
    main(["doctor"])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0].split() == ["ok", "this", "is", "well"]
    assert lines[1].split() == ["warning", "that", "is", "odd"]
    assert lines[2].strip() == "→ mend that"
    assert lines[3].split() == ["failed", "those", "are", "broken"]
    assert lines[-1] == "1 failed, 1 warning"
    found[:] = [GOOD]
    main(["doctor"])
    assert capsys.readouterr().out.splitlines()[-1].rstrip() == "all is well"


def test_as_json_nothing_but_the_findings_is_printed(
    found: list[Finding], capsys: pytest.CaptureFixture[str]
) -> None:
    found += [GOOD, BAD]
    main(["doctor", "--json"])
    assert json.loads(capsys.readouterr().out) == [
        {"state": "ok", "about": "this", "told": "is well", "advice": ""},
        {"state": "failed", "about": "those", "told": "are broken", "advice": "mend those"},
    ]


def test_a_wrong_setting_and_wrong_usage_are_2(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--fast"])
    assert ended.value.code == 2
    monkeypatch.setenv("PENSTOCK_LEASE_S", "never")
    assert main(["doctor"]) == 2


def test_an_installation_to_be_started_is_well_and_stays_untouched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("REDIS_URL", "PENSTOCK_REDIS_URL", "QDRANT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("PENSTOCK_GATEWAY__PORT", "0")
    monkeypatch.setenv("PENSTOCK_GATEWEY__PORT", "0")
    main(["doctor", "--json"])
    told = [Finding(**each) for each in json.loads(capsys.readouterr().out)]
    assert [f for f in told if f.state == "failed"] == []
    assert "PENSTOCK_GATEWEY__PORT is set" in about(told, "settings").told
    for what in ("installed", "processor", "disk", "redis", "model demo", "services"):
        assert about(told, what).state in ("ok", "warning")
    assert list(tmp_path.iterdir()) == []


async def test_what_hangs_is_told_and_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "LIMIT_S", 0.05)
    held = threading.Event()
    before = set(threading.enumerate())  # of other tests

    async def hangs_in_a_thread() -> list[Finding]:
        return [await aside(held.wait)]  # type: ignore[list-item]

    async def hangs() -> list[Finding]:
        await asyncio.Event().wait()
        return []

    for check in (hangs, hangs_in_a_thread):
        told = await bounded("the store", check())
        assert about(told, "the store").state == "failed"
        assert "no answer within 0.05 s" in about(told, "the store").told
    # A thread that were waited for would hold up the end of the command.
    begun = set(threading.enumerate()) - before
    held.set()
    assert begun
    assert all(thread.daemon for thread in begun)


async def test_a_check_that_breaks_is_a_finding_without_secrets() -> None:
    async def breaks() -> list[Finding]:
        raise KeyError("redis://user:hunter2@host/0")

    [told] = await bounded("the store", breaks())
    assert told.state == "failed"
    assert "KeyError" in told.told
    assert "hunter2" not in told.told


async def test_aside_gives_what_a_call_gives_and_raises() -> None:
    assert await aside(max, 3, 4) == 4
    with pytest.raises(ZeroDivisionError):
        await aside(lambda: 1 // 0)

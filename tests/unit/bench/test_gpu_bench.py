"""The GPU's bench, as far as a CPU goes: that the command works in form, and stops at a wrong
kernel."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu import checks, report
from bench.gpu.__main__ import Run, main
from bench.gpu.checks import Check
from bench.gpu.device import Device
from bench.gpu.kernels import Measured


def test_a_dry_run_checks_and_measures_everything(tmp_path: Path) -> None:
    target = tmp_path / "gpu.json"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "bench.gpu", "--dry", "--json", str(target)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(target.read_text())
    assert len(result["checks"]) > 15
    assert all(check["passed"] for check in result["checks"])
    assert result["left_out"] == []
    assert result["agreement"]["equal"] == result["agreement"]["tokens"] > 0
    names = " ".join(line["name"] for section in ("kernels", "engine") for line in result[section])
    for kernel in (
        "decode",
        "prefill",
        "add and norm",
        "silu",
        "rotary",
        "sampling",
        "fp8 rows",
        "experts",
        "routing, 3 tokens, 8 of 128",
        "adapters",
        "linear, 3 rows, int8",
        "weights int4",
    ):
        assert kernel in names
    assert all(line["seconds"] > 0 and line["floor_s"] > 0 for line in result["kernels"])
    written = (tmp_path / "gpu.md").read_text()
    assert written == report.markdown(result)
    assert written in done.stdout


def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", str(tmp_path / "gpu.json")]) == 2
    assert "torch sees no NVIDIA GPU" in capsys.readouterr().err


def test_a_wrong_kernel_ends_the_run_before_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [Check("good", 0.001, 0.01), Check("bad", 0.5, 0.01)]
    monkeypatch.setattr(checks, "run", lambda device: iter(found))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    target = tmp_path / "gpu.json"
    assert main(["--dry", "--json", str(target)]) == 1
    result = json.loads(target.read_text())
    assert result["kernels"] == result["engine"] == []
    text = target.with_suffix(".md").read_text()
    assert "1 of 2 passed" in text
    assert "FAILED bad: 5.00e-01" in text


def test_a_kernel_that_does_not_run_is_a_failed_check() -> None:
    def broken() -> checks.Iterator[Check]:
        yield Check("good", 0.001, 0.01)
        raise RuntimeError("no such instruction")

    good, bad = checks.guarded(broken)
    assert good.passed
    assert not bad.passed
    assert "no such instruction" in bad.name


def test_what_fails_or_comes_too_late_is_said() -> None:
    run = Run(minutes=1)

    def fails() -> Measured:
        raise ValueError("out of memory")

    run.attempt("one", "kernels", fails)
    run.attempt("two", "kernels", lambda: Measured("two", 2.0, 1.0))
    late = Run(minutes=-1)
    late.attempt("three", "kernels", fails)
    assert run.result["left_out"] == ["one: ValueError: out of memory"]
    assert [line["of_floor"] for line in run.result["kernels"]] == [0.5]
    assert late.result["left_out"] == ["three: no time was left"]


def test_nan_fails_a_check() -> None:
    import torch

    check = checks._compared("x", torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0]))
    assert not check.passed
    assert Device(torch.device("cpu"), "", 1, 1).is_dry

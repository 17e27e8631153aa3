"""`penstock bench engine` and the workload format that the benches share."""

import argparse
import json
from pathlib import Path
from typing import Any, get_args

import pytest

from bench import engine, workload
from kernels.cpu.library import built
from services.common.config import WorkerSettings
from services.worker.engine.models.registry import read_config
from services.worker.engine.sizes import choose_dtype
from tests.support.checkpoint import write_checkpoint

LINE: dict[str, Any] = {
    "id": "a",
    "prompt_token_ids": [3, 4, 5],
    "max_tokens": 4,
    "temperature": 0,
    "ignore_eos": True,
    "arrival_s": 0.0,
}


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("".join(x if isinstance(x, str) else json.dumps(x) + "\n" for x in lines))
    return path


def test_lines_come_by_arrival(tmp_path: Path) -> None:
    path = write(tmp_path / "w", LINE | {"arrival_s": 2}, "\n", LINE | {"id": 7, "seed": 2**64 - 1})
    second, first = workload.load(path)[::-1]
    assert (first.id, first.seed, first.arrival_s) == ("7", 2**64 - 1, 0.0)
    assert (second.id, second.seed, second.arrival_s) == ("a", None, 2.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": 0}, "line 2: max_tokens must be a whole number above 0"),
        ({"max_tokens": True}, "line 2: max_tokens must be"),
        ({"temperature": "hot"}, "line 2: temperature must be a number"),
        ({"ignore_eos": 1}, "line 2: ignore_eos must be true or false"),
        ({"arrival_s": -1}, "line 2: arrival_s must be seconds"),
        ({"seed": -1}, "line 2: seed must be"),
        ({"prompt_token_ids": []}, "line 2: prompt_token_ids must be"),
        ({"prompt": "hi"}, "line 2: needs exactly one of"),
        ({"prompt_token_ids": None}, "line 2: needs exactly one of"),
        ({"stop": "x"}, "line 2: stop is not a field"),
        ({"id": "a"}, "line 2: id 'a' is there twice"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(workload.WorkloadError, match=words):
        workload.load(write(tmp_path / "w", LINE, LINE | {"id": "b"} | change))


def test_missing_fields_and_broken_files_are_named(tmp_path: Path) -> None:
    short = {name: value for name, value in LINE.items() if name != "arrival_s"}
    for lines, words in [
        ((short,), "line 1: arrival_s is missing"),
        (("{\n",), "line 1: not JSON"),
        (("[]\n",), "line 1: not a JSON object"),
        (("\n",), "holds no requests"),
    ]:
        with pytest.raises(workload.WorkloadError, match=words):
            workload.load(write(tmp_path / "w", *lines))


def run(model: Path, path: Path, out: Path, *more: str) -> int:
    parser = argparse.ArgumentParser()
    engine.add_arguments(parser)
    given = ["--model", str(model), "--workload", str(path), "--json", str(out), "--threads", "1"]
    return engine.main(parser.parse_args([*given, *more]))


def test_a_run_reports_every_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_checkpoint(tmp_path / "model")
    text = {name: value for name, value in LINE.items() if name != "prompt_token_ids"}
    path = write(
        tmp_path / "w",
        LINE,
        text | {"id": "b", "prompt": "hello there", "arrival_s": 0.05, "temperature": 1.0},
        text | {"id": "c", "messages": [{"role": "user", "content": "hello"}]},
        LINE | {"id": "d", "prompt_token_ids": [10**6]},
    )
    assert run(model, path, tmp_path / "out.json") == 0
    result = json.loads((tmp_path / "out.json").read_text())
    by_id = {request["id"]: request for request in result["requests"]}
    for name in "abc":
        assert by_id[name]["finish_reason"] == "length"
        assert len(by_id[name]["token_ids"]) == 4
        assert len(by_id[name]["itl_s"]) == 3
        assert by_id[name]["ttft_s"] > 0
    assert by_id["d"]["error"]
    totals = result["totals"]
    assert (totals["requests"], totals["failed"], totals["output_tokens"]) == (4, 1, 12)
    assert totals["output_tok_per_s"] > 0
    assert totals["wall_s"] > 0.05
    memory = result["memory"]
    assert memory["parameter_bytes"] > 0
    assert 0 < memory["kv_used_peak_bytes"] <= memory["kv_cache_bytes"]
    assert memory["rss_peak_bytes"] > memory["parameter_bytes"] + memory["kv_used_peak_bytes"]
    assert result["engine"]["threads"] >= 1
    told = capsys.readouterr().err
    assert "loading" in told
    assert "1 of 4 requests failed, the first d: prompt_token_ids must be in" in told
    assert run(model, write(path, LINE | {"prompt_token_ids": [10**6]}), tmp_path / "o.json") == 1


def test_it_says_what_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write_checkpoint(tmp_path / "model")
    path = write(tmp_path / "w", LINE)
    assert run(model, path, tmp_path / "out.json", "--kernels", "reference") == 0
    assert "kernels reference, float32" in caplog.text


def test_what_cannot_run_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, write(tmp_path / "w", LINE), tmp_path / "out.json") == 1
    assert "config.json is missing" in capsys.readouterr().err
    assert run(tmp_path, tmp_path / "nothing", tmp_path / "out.json") == 1
    assert "nothing" in capsys.readouterr().err
    model = write_checkpoint(tmp_path / "model")
    for option, value in (("--device", "xyz"), ("--max-batched-tokens", str(10**12))):
        assert run(model, tmp_path / "w", tmp_path / "out.json", option, value) == 1
        assert option[2:].replace("-", "_") in capsys.readouterr().err


def test_where_no_result_can_go_is_told_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing"
    for out, words in [
        (missing / "out.json", f"--json: there is no folder {missing}"),
        (tmp_path, f"--json: {tmp_path} is a folder"),
    ]:
        with pytest.raises(SystemExit) as ended:
            run(tmp_path, tmp_path / "nothing", out)
        assert ended.value.code == 2
        assert words in capsys.readouterr().err
    assert not missing.exists()


def test_a_run_computes_as_a_worker_does_by_itself(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    path, out = write(tmp_path / "w", LINE), tmp_path / "out.json"
    own = choose_dtype("auto", read_config(model), "cpu", "avx512_bf16" in built())
    for given, chosen in [([], own), (["--dtype", "bfloat16"], "bfloat16")]:
        assert run(model, path, out, *given) == 0
        assert json.loads(out.read_text())["engine"]["dtype"] == chosen


def test_it_takes_every_format_that_a_worker_takes() -> None:
    parser = argparse.ArgumentParser()
    engine.add_arguments(parser)
    offered = {action.dest: action.choices for action in parser._actions}
    for name in ("quantization", "kv_format"):
        taken = get_args(WorkerSettings.model_fields[name].annotation)
        assert {*(offered[name] or ())} == {*taken}

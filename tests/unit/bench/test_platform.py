"""The bench of the way through the platform: what it asks and what it counts."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from bench import platform, sweep
from bench.openai_stream import Outcome
from bench.peers.comparison import OURS, Repetition
from bench.workload import WorkloadRequest


@pytest.mark.parametrize("bench", [platform, sweep])
def test_a_model_that_is_none_is_wrong_usage(
    bench: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--model", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 2
    assert f"--model: {tmp_path} has no config.json" in capsys.readouterr().err


def test_streams_are_of_one_size_and_differ() -> None:
    asked = platform._streams(32)
    assert [len(one.prompt) for one in asked] == [64] * 32
    assert {one.output for one in asked} == {256}
    assert len({tuple(one.prompt) for one in asked}) == 32


def test_tokens_without_a_piece_of_their_own_count_too() -> None:
    outcome = Outcome("a", 0.0, ttft_s=0.5, itl_s=[0.1, 0.2], completion_tokens=6)
    times = platform._times(outcome)
    answer = {"wall_s": 2.0, "requests": [times]}
    assert Repetition.of("a", "", "w", answer, 0.0).output_tok_per_s == 3.0
    assert times["itl_s"][:2] == [0.1, 0.2]


def test_the_table_sets_medians_against_each_other() -> None:
    def run(who: str, rate: float) -> Repetition:
        return Repetition(who, "", "w1", 1.0, rate, 0.1, 0.01, 0.02, 0.0)

    found = [run(OURS, rate) for rate in (90.0, 100.0, 900.0)]
    found += [run(platform.PLATFORM, rate) for rate in (10.0, 93.0, 95.0)]
    assert list(platform._table(found, ["w1"]))[2].startswith("| w1 | 100 | 93 | 93.0% |")


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (Outcome("a", 0.0, completion_tokens=4), "request a: 4 of 5 tokens came"),
        (Outcome("a", 0.0, completion_tokens=5, error="503"), "request a: 503"),
    ],
)
def test_a_request_that_failed_or_came_short_is_no_result(outcome: Outcome, words: str) -> None:
    request = WorkloadRequest("a", [20], None, None, 5, 0.0, True, 0.0, None)
    with pytest.raises(RuntimeError, match=words):
        platform._answer([request], [outcome], 1.0)

"""The comparison with the peers: who runs when, what is counted, which targets are met."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench import workload
from bench.peers import checkpoints, floors, install, workloads
from bench.peers.comparison import OURS, Comparison, Floor, Repetition, Target, targets, turns
from bench.peers.contestant import Contestant, ContestantError
from bench.peers.floors import Machine
from bench.peers.foreign import ForeignLoad, busy_s
from bench.peers.table import About, page
from services.worker.engine.models.registry import read_config

ROOT = Path(__file__).parents[3]

ABOUT = About(
    date="some day",
    processor="a processor",
    cores=2,
    arithmetic="bf16",
    machine=Machine({"float32": 1e11, "bfloat16": 4e11}, {"pages_4k": 2e10, "pages_2m": 3e10}),
    versions={OURS: "abc", "vllm": "1"},
)


def repetition(who: str, work: str = "w1", model: str = "S", **figures: float) -> Repetition:
    given = {"wall_s": 1.0, "output_tok_per_s": 100.0, "ttft_s": 0.1, "itl_s": 0.01}
    given |= {"itl_p99_s": 0.1, "foreign_cores": 0.0}
    return Repetition(who, model, work, **(given | figures))


def target(comparison: Comparison, words: str) -> Target:
    (found,) = (t for t in targets(comparison) if t.words == words)
    return found


def test_all_run_in_turn() -> None:
    assert list(turns(["a", "b", "c"], 2)) == [
        *((0, "a"), (0, "b"), (0, "c")),
        *((1, "a"), (1, "b"), (1, "c")),
    ]


def test_figures_of_a_run() -> None:
    requests = [
        {"ttft_s": 1.0, "itl_s": [0.1] * 99},
        {"ttft_s": 2.0, "itl_s": [0.1] * 98 + [0.9]},
        {"ttft_s": 9.0, "itl_s": [0.2] * 99},
    ]
    answer = {"wall_s": 10.0, "requests": requests}
    found = Repetition.of("a", "S", "w1", answer, 0.3)
    assert found.output_tok_per_s == pytest.approx(30.0)
    assert (found.ttft_s, found.itl_s, found.foreign_cores) == (2.0, 0.1, 0.3)
    assert found.itl_p99_s == 0.2
    assert found.wall_s == 10.0


def test_a_target_asks_for_medians_against_the_best_peer() -> None:
    comparison = Comparison()
    for ours, slow, fast in [(130.0, 90.0, 100.0), (10.0, 5.0, 100.0), (900.0, 99.0, 500.0)]:
        comparison.repetitions += [
            repetition(OURS, output_tok_per_s=ours),
            repetition("slow", output_tok_per_s=slow),
            repetition("fast", output_tok_per_s=fast),
        ]
    rate = target(comparison, "S: w1, output tokens/s")
    assert (rate.came, rate.against, rate.bound) == (1.3, "fast", 1.3)
    assert rate.met is True
    comparison.repetitions.append(repetition("slow", output_tok_per_s=1e4))
    assert target(comparison, "S: w1, output tokens/s").against == "fast"


@pytest.mark.parametrize(
    ("words", "work", "figure", "limit"),
    [
        ("S: w1, p99 between tokens", "w1", "itl_p99_s", 0.6),
        ("S: w2, first token", "w2", "ttft_s", 1.0),
        ("S: w3, whole", "w3", "wall_s", 0.7),
    ],
)
def test_of_times_the_best_peer_is_the_shortest(
    words: str, work: str, figure: str, limit: float
) -> None:
    for factor, met in [(0.99, True), (1.01, False)]:
        comparison = Comparison(
            [
                repetition("long", work, **{figure: 5.0}),
                repetition("short", work, **{figure: 2.0}),
                repetition(OURS, work, **{figure: 2.0 * limit * factor}),
            ]
        )
        found = target(comparison, words)
        assert (found.against, found.met) == ("short", met)


def test_between_tokens_it_is_llama_cpp_that_counts() -> None:
    comparison = Comparison(
        [
            repetition("vllm", "w2", itl_s=0.001),
            repetition("llama.cpp", "w2", itl_s=0.01),
            repetition(OURS, "w2", itl_s=0.0089),
        ]
    )
    assert target(comparison, "S: w2, between tokens").met is True


def test_targets_against_the_floor() -> None:
    floor = Floor(
        w1_tok_per_s=150, w2_ttft_s=0.1, w2_itl_s=0.009, w3_wall_s=1.0, most_rss=1_000_000_000
    )
    comparison = Comparison(
        [
            repetition(OURS, "w1", output_tok_per_s=99),
            repetition(OURS, "w3", wall_s=1.49),
            repetition(OURS, "w2", "M", itl_s=0.0101),
        ],
        peak_rss={(OURS, "S"): 999_000_000, (OURS, "M"): 1_001_000_000},
        start_s={(OURS, "S"): 5.1, (OURS, "M"): 1.0},
        floors={"S": floor, "M": floor},
    )
    assert target(comparison, "S: w1, time").came == pytest.approx(150 / 99)
    assert target(comparison, "S: w1, time").met is False
    assert target(comparison, "S: w3, time").met is True
    assert target(comparison, "M: w2, share of a plain read's bandwidth").met is False
    assert target(comparison, "S: peak RSS").met is True
    assert target(comparison, "M: peak RSS").met is False
    assert target(comparison, "S: start, warm disk").met is False


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    comparison = Comparison([repetition(OURS, "w1")], failed={("vllm", "S"): "no such wheel"})
    assert all(t.met is None for t in targets(comparison))
    text = page(comparison, ABOUT)
    assert "vllm gave no (more) figures: no such wheel" in text
    assert "not measured" in text
    json.dumps(comparison.as_json())


def test_the_page_tells_figures_targets_and_noise() -> None:
    comparison = Comparison(
        [
            repetition(OURS, "w1", output_tok_per_s=123.4, foreign_cores=0.5),
            repetition("vllm", "w1", output_tok_per_s=100.0, foreign_cores=0.1),
        ],
        start_s={(OURS, "S"): 0.5},
        peak_rss={("vllm", "S"): 4_600_000_000},
    )
    text = page(comparison, ABOUT)
    assert "| penstock | 123.4 | 100 ms |  |  |  |  | 0.5 s |" in text
    assert "| vllm | 100.0 | 100 ms |  |  |  | 4600 MB |  |" in text
    assert "| S: w1, output tokens/s | vllm | at least 1.30 | 1.23 | **no** |" in text
    assert "| **0.50** |" in text
    assert "| 0.10 |" in text
    assert "400 GFLOP/s in bfloat16" in text
    assert "30.0 GB/s on pages of 2 MiB" in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("| S: ")}
    assert widths == {6}


def test_workloads_are_the_same_each_time_and_valid(tmp_path: Path) -> None:
    for name, requests, prompt_tokens, output in [
        ("w1", 32, 8962, 3778),
        ("w2", 1, 512, 128),
        ("w3", 32, 32 * 544, 32 * 32),
    ]:
        asked = workloads.make(name)
        assert asked == workloads.make(name)
        assert asked != workloads.make(name, seed=1)
        assert len(asked) == requests
        assert sum(len(a.prompt) for a in asked) == prompt_tokens
        assert sum(a.output for a in asked) == output
        workloads.write(asked, tmp_path / name)
        lines = workload.load(tmp_path / name)
        assert [line.prompt_token_ids for line in lines] == [a.prompt for a in asked]


def test_a_turn_shares_no_prefix_with_another_and_all_of_its_own() -> None:
    asked = workloads.make("w3")
    turns_of = [workloads.turned(asked, turn) for turn in (1, 2, 3)]
    assert len({one[0].prompt[0] for one in turns_of}) == 3
    for one in turns_of:
        assert len({tuple(a.prompt[:512]) for a in one}) == 1
        ids = [token for a in one for token in a.prompt]
        assert min(ids) >= workloads.SPECIAL
        assert max(ids) < checkpoints.VOCABULARY


def test_floors_of_a_shape_that_can_be_counted_by_hand() -> None:
    shape = checkpoints.Shape(hidden=4, layers=1, heads=2, kv_heads=1, intermediate=8)
    assert shape.layer_weights == 4 * 4 * 2 + 2 * 4 * 2 + 3 * 4 * 8
    output = 4 * checkpoints.VOCABULARY
    first = 2 * shape.layer_weights * 3 + 4 * 4 * (1 + 2 + 3) + 2 * output
    alone = [workloads.Asked([1, 2, 3], 1)]
    assert floors.prompts_flop(shape, alone) == first
    both = [*alone, workloads.Asked([1, 2, 9], 1)]
    second = 2 * shape.layer_weights + 4 * 4 * 3 + 2 * output
    assert floors.prompts_flop(shape, both) == first + second
    assert floors.floor_s(shape, both, flop_per_s=1, bytes_per_s=1) == first + second
    answering = [workloads.Asked([1, 2, 3], 2)]
    step = 2 * (shape.layer_weights + output) + 4 * 4 * 4
    assert floors.floor_s(shape, answering, flop_per_s=1, bytes_per_s=1e9) == first + step
    read = 2 * (shape.layer_weights + output) + shape.kv_bytes_per_token * 4
    assert floors.floor_s(shape, answering, flop_per_s=1e9, bytes_per_s=1) == read


def test_a_machine_is_the_median_of_its_looks() -> None:
    looks = [Machine({"float32": x}, {"pages_2m": 2 * x}) for x in (1.0, 9.0, 2.0)]
    assert floors.typical(looks) == Machine({"float32": 2.0}, {"pages_2m": 4.0})
    without = [Machine({"float32": 1.0}, {})]
    assert floors.typical(without).best_bytes_per_s is None


def test_a_checkpoint_is_one_that_the_engine_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = checkpoints.Shape(hidden=64, layers=1, heads=2, kv_heads=1, intermediate=32)
    monkeypatch.setitem(checkpoints.SHAPES, "S", shape)
    home = checkpoints.write("S", tmp_path)
    config = read_config(home)
    assert (config.vocab_size, config.num_layers) == (checkpoints.VOCABULARY, 1)
    size = (home / "model.safetensors").stat().st_size
    assert shape.bytes < size < shape.bytes + 4096
    before = (home / "model.safetensors").stat().st_mtime_ns
    assert checkpoints.write("S", tmp_path) == home
    assert (home / "model.safetensors").stat().st_mtime_ns == before
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(home / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == checkpoints.VOCABULARY
    assert tokenizer.decode(tokenizer.encode("the flow, 1 + 2").ids) == "the flow, 1 + 2"


DRIVER = """
from bench.peers.drivers.line import Stamps, serve

def load():
    print("noise of a library")
    def run(requests):
        stamps = Stamps(requests)
        for request in requests:
            stamps.add(request["id"], 1)
            stamps.add(request["id"], request["max_tokens"] - 1 - SHORT)
        return stamps.answer()
    return run

serve(load)
"""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    contestants: list[Contestant] = []

    def start(short: int = 0) -> Contestant:
        command = [sys.executable, "-c", DRIVER.replace("SHORT", str(short))]
        environment = {"PYTHONPATH": str(ROOT)}
        contestant = Contestant("it", command, tmp_path / "log", environment)
        contestants.append(contestant)
        contestant.start()
        return contestant

    yield start
    for contestant in contestants:
        contestant.stop()


def write_workload(tmp_path: Path) -> Path:
    path = tmp_path / "w.jsonl"
    workloads.write([workloads.Asked([20, 21], 3), workloads.Asked([22], 2)], path)
    return path


def test_a_contestant_answers_and_stands_still_in_between(started: Any, tmp_path: Path) -> None:
    contestant = started()
    assert contestant.start_s > 0
    (process,) = contestant._tree()
    contestant.freeze()
    for _ in range(1000):
        if process.status() == psutil.STATUS_STOPPED:
            break
        time.sleep(0.01)
    else:
        pytest.fail("it goes on")
    contestant.thaw()
    answer = contestant.run(write_workload(tmp_path))
    assert [len(request["itl_s"]) for request in answer["requests"]] == [2, 1]
    assert "noise" in (tmp_path / "log").read_text()
    assert contestant.peak_rss() > 1_000_000
    assert contestant.cpu_s() > 0
    contestant.freeze()
    contestant.stop()
    assert not process.is_running()


def test_a_token_too_few_is_no_result(started: Any, tmp_path: Path) -> None:
    contestant = started(short=1)
    with pytest.raises(ContestantError, match="it ended, see"):
        contestant.run(write_workload(tmp_path))
    assert "2 of 3 tokens came" in (tmp_path / "log").read_text()
    contestant.stop()


def test_one_that_does_not_start_says_where_its_log_is(tmp_path: Path) -> None:
    contestant = Contestant("it", [sys.executable, "-c", "1/0"], tmp_path / "log")
    with pytest.raises(ContestantError, match=r"it ended, see .*log"):
        contestant.start()
    contestant.stop()


def test_our_own_work_is_no_foreign_load() -> None:
    alone, shared = ForeignLoad(lambda: 0.0), ForeignLoad(busy_s)
    began = psutil.Process().cpu_times().user
    while psutil.Process().cpu_times().user < began + 0.1:
        pass
    assert shared.cores() == 0.0
    assert alone.cores() >= 0.0


def test_of_a_wheel_all_is_installed_but_what_no_text_model_uses(tmp_path: Path) -> None:
    import zipfile

    wheel = tmp_path / "it-1-py3-none-any.whl"
    needs = ["regex", "torch==2.13.0+cpu; platform_machine == 'x86_64'", "torchvision"]
    needs += ["opencv-python-headless>=4", "einops>=0.8", 'scipy; extra == "bench"']
    with zipfile.ZipFile(wheel, "w") as archive:
        lines = ["Name: it", *(f"Requires-Dist: {need}" for need in needs)]
        archive.writestr("it-1.dist-info/METADATA", "\n".join(lines))
    assert install._requirements(wheel) == ["regex", "einops>=0.8"]


def test_an_install_that_failed_says_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(home: Path) -> None:
        install._run(home, [sys.executable, "-c", "raise SystemExit('no such wheel')"])

    monkeypatch.setitem(install.INSTALLERS, "vllm", fails)
    monkeypatch.setattr(install.venv, "create", lambda home, with_pip: None)
    with pytest.raises(install.InstallError, match=r"vllm: .*ended with 1, see .*install\.log"):
        install.install("vllm", tmp_path)
    assert "no such wheel" in (tmp_path / "vllm" / "install.log").read_text()
    assert not (tmp_path / "vllm" / "installed").exists()

"""All stages of the models' making, with little of each, and the command that makes them."""

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from models.recipe import begin, evaluate, make, swaps, train
from models.recipe import tokenizer as bpe
from models.recipe.card import NOT_YET
from models.recipe.crew import Tally
from models.recipe.export import load
from models.recipe.files import alone, state_of
from models.recipe.swaps import Swaps
from models.recipe.train import Plan

FEW = {
    "reader": Plan(1, 1e-4, 4e-4, (0.1, 0.1), longest=400),
    "told": Plan(1, 1e-3, 0.0, (0.1, 0.1), longest=400),
    "saying": Plan(1, 0.0, 4e-4, (0.1, 0.1), longest=400),
    "answers": Plan(2, 2e-4, 4e-4, (0.1, 0.1), longest=400),
    "settling": Plan(1, 0.0, 2e-4, (0.1, 0.1), longest=400),
    "draft": Plan(1, 2e-3, 1e-3, (0.1, 0.1), longest=400),
}


@pytest.fixture(scope="module")
def learned() -> Iterator[list[str]]:
    """The lessons of the pools that were learned, with little of each."""
    names, learn = list[str](), train.Training.learn

    def counted(training: train.Training) -> Tally:
        names.append(type(training.lesson).__name__)
        return learn(training)

    def no_swaps(_: Tokenizer) -> Swaps:
        return Swaps({}, {}, {}, set(), set())

    def meanings(_: Tokenizer, size: int) -> torch.Tensor:
        return torch.randn(bpe.VOCABULARY, size)

    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in (
            (train, "POOL", 4), (begin, "READ", 20), (begin, "FITTED", 12), (begin, "POINTED", 8),
            (begin, "LONGEST", 450), (begin, "meanings", meanings), (swaps.Swaps, "of", no_swaps),
            (train, "SAVE_EVERY", 1), (train.Training, "learn", counted), (make, "PLANS", FEW),
        ):  # fmt: skip
            patch.setattr(module, name, value)
        yield names


@pytest.fixture(scope="module")
def runs(
    learned: list[str], tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder of runs, in which that of seed 0 is at its end and was never cut off."""
    runs = tmp_path_factory.mktemp("runs")
    folder = through(runs)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    make.Run(folder, 0, 1, FEW).models()
    assert learned == ["Reading", "Told", "Saying", "Answers", "Answers", "Saying", "Draft"]
    return runs


def through(runs: Path) -> Path:
    return runs / f"0-{make.fingerprint()}"


def test_a_run_goes_on_where_it_was(
    runs: Path, learned: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off before a stage and in the midst of one, it ends as one that never was."""
    learn, heads, cuts = train.Training.learn, begin.heads, ["heads", "Answers"]

    def learns(training: train.Training) -> Tally:
        at = type(training.lesson).__name__, training.done.pool
        if cuts == ["Answers"] and at == ("Answers", 1):
            cut()
        return learn(training)

    def begun(*to: Any) -> None:
        if cuts[:1] == ["heads"]:
            cut()
        heads(*to)

    def cut() -> None:
        learned.clear()
        del cuts[0]
        raise KeyboardInterrupt

    monkeypatch.setattr(train.Training, "learn", learns)
    monkeypatch.setattr(begin, "heads", begun)
    for name in ("tokenizer.json", "reader.done.pt", "told.done.pt"):  # as these stages left it
        shutil.copyfile(through(runs) / name, tmp_path / name)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            make.Run(tmp_path, 0, 1, FEW).models()
    make.Run(tmp_path, 0, 1, FEW).models()
    assert learned == ["Answers", "Saying", "Draft"]
    for stage in FEW:
        ours, theirs = (state_of(f / f"{stage}.done.pt") for f in (tmp_path, through(runs)))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), stage


def start(
    monkeypatch: pytest.MonkeyPatch, out: Path, runs: Path, table: Callable[..., str]
) -> None:
    monkeypatch.setattr(evaluate, "table", table)
    given = ["make", "--out", str(out), "--runs", str(runs), "--threads", "1"]
    monkeypatch.setattr(sys, "argv", given)
    make.main()


def test_the_command_makes_both_models_and_their_card(
    runs: Path, learned: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off as it measures, it leaves no figures of other weights; started again it trains
    nothing.
    """
    learned.clear()
    card = tmp_path / "demo/README.md"

    def cut(*_: object) -> str:
        raise KeyboardInterrupt

    def table(demo: Path, draft: Path, count: int) -> str:
        for folder, name in ((demo, "demo"), (draft, "draft")):
            assert load(folder)[0].shape == make.SHAPES[name]
        return f"| {count} of each |"

    with pytest.raises(KeyboardInterrupt):
        start(monkeypatch, tmp_path, runs, cut)
    assert (tmp_path / "demo-draft/model.safetensors").exists()
    assert NOT_YET in card.read_text()
    start(monkeypatch, tmp_path, runs, table)
    assert learned == []
    said = card.read_text()
    assert "| 200 of each |" in said
    assert NOT_YET not in said
    assert "with seed 0;" in said
    assert "These weights" not in said


def test_a_stage_that_is_cut_off_as_it_is_written_is_written_again(
    runs: Path, learned: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned.clear()
    whole = (through(runs) / "draft.done.pt").read_bytes()
    for path in through(runs).iterdir():
        if path.name != "draft.done.pt":
            (tmp_path / path.name).symlink_to(path)

    def dies(_: object, file: Path) -> None:
        file.write_bytes(whole[: len(whole) // 2])
        raise OSError("no space is left")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", dies)
        with pytest.raises(OSError, match="no space"):
            make.Run(tmp_path, 0, 1, FEW).models()
    make.Run(tmp_path, 0, 1, FEW).models()
    assert learned == []
    ours, theirs = (state_of(f / "draft.done.pt") for f in (tmp_path, through(runs)))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("held", ["out", "run"])
def test_two_starts_do_not_write_the_same_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: str
) -> None:
    """Of two seeds in one folder, or of one seed into two."""
    out, runs = tmp_path / "out", tmp_path / "runs"
    folder = {"out": out, "run": through(runs)}[held]
    with alone(folder), pytest.raises(BlockingIOError, match=f"another training runs in {folder}"):
        start(monkeypatch, out, runs, lambda *_: "")
    assert not list(out.iterdir())
    assert runs.exists() == (held == "run")


def test_a_run_is_of_what_shapes_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    neutral = ("evaluate.py", "card.py", "bank/check.py")
    for name in ("train.py", "bank/words.txt", *neutral):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
    assert {path.name for path in make.RECIPE.rglob("*.py")} >= make.OTHERS
    monkeypatch.setattr(make, "RECIPE", tmp_path)
    of = make.fingerprint()
    for name in neutral:
        (tmp_path / name).write_text("2")
        assert make.fingerprint() == of
    for name in ("train.py", "bank/words.txt"):
        (tmp_path / name).write_text("2")
        assert make.fingerprint() != of
        of = make.fingerprint()

"""All stages of the models' making, with little of each."""

import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from models.recipe import begin, make, swaps, train
from models.recipe import tokenizer as bpe
from models.recipe.swaps import Swaps
from models.recipe.train import Plan

FEW = {
    "reader": Plan(1, 1e-4, 4e-4, (0.1, 0.1), longest=500),
    "told": Plan(1, 1e-3, 0.0, (0.1, 0.1), longest=500),
    "saying": Plan(1, 0.0, 4e-4, (0.1, 0.1), longest=500),
    "answers": Plan(2, 2e-4, 4e-4, (0.1, 0.1), longest=500),
    "draft": Plan(1, 2e-3, 1e-3, (0.1, 0.1), longest=500),
}


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in (
        (train, "POOL", 6), (begin, "READ", 40), (begin, "FITTED", 20), (begin, "POINTED", 12),
        (begin, "LONGEST", 450),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(swaps.Swaps, "of", lambda _: Swaps({}, {}, {}, set(), set()))
    monkeypatch.setattr(begin, "meanings", lambda words, size: torch.randn(bpe.VOCABULARY, size))


def test_a_run_goes_on_where_it_was(
    little: None, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off in the midst of a stage, or begun behind some, it ends the same."""
    learn, learned = train.Training.learn, list[str]()
    cut = ["Reading", "Told", "Saying", "Answers", "Answers"]

    def counted(training: train.Training) -> train.Tally:
        learned.append(type(training.lesson).__name__)
        if learned == cut:
            learned.clear()
            raise KeyboardInterrupt
        return learn(training)

    monkeypatch.setattr(train.Training, "learn", counted)
    monkeypatch.setattr(train, "SAVE_EVERY", 1)
    first, other = tmp_path / "first", tmp_path / "other"
    first.mkdir()
    tokenizer.save(str(first / "tokenizer.json"))
    with pytest.raises(KeyboardInterrupt):
        make.Run(first, 0, 1, FEW).models()
    made = make.Run(first, 0, 1, FEW).models()
    assert learned == ["Answers", "Draft"]
    learned.clear()
    other.mkdir()
    for done in ("tokenizer.json", "reader.done.pt", "told.done.pt"):
        shutil.copy(first / done, other)
    again = make.Run(other, 0, 1, FEW).models()
    assert learned == ["Saying", "Answers", "Answers", "Draft"]
    for name, model in again.items():
        for a, b in zip(model.parameters(), made[name].parameters(), strict=True):
            assert torch.equal(a, b)

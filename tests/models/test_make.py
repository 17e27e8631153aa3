"""All stages of the models' making, with little of each."""

from pathlib import Path
from typing import Any

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
    "settling": Plan(1, 0.0, 2e-4, (0.1, 0.1), longest=500),
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
    """Cut off before a stage and in the midst of one, it ends as one that never was."""
    learn, learned = train.Training.learn, list[str]()
    heads, cuts = begin.heads, ["heads", "Answers"]

    def counted(training: train.Training) -> train.Tally:
        learned.append(type(training.lesson).__name__)
        if cuts == ["Answers"] and learned[-2:] == cuts * 2:
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

    monkeypatch.setattr(train.Training, "learn", counted)
    monkeypatch.setattr(begin, "heads", begun)
    monkeypatch.setattr(train, "SAVE_EVERY", 1)
    for folder in ("cut", "through"):
        (tmp_path / folder).mkdir()
        tokenizer.save(str(tmp_path / folder / "tokenizer.json"))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            make.Run(tmp_path / "cut", 0, 1, FEW).models()
    made = make.Run(tmp_path / "cut", 0, 1, FEW).models()
    assert learned == ["Answers", "Saying", "Draft"]
    learned.clear()
    through = make.Run(tmp_path / "through", 0, 1, FEW).models()
    assert learned == ["Reading", "Told", "Saying", "Answers", "Answers", "Saying", "Draft"]
    for name, model in through.items():
        for a, b in zip(model.parameters(), made[name].parameters(), strict=True):
            assert torch.equal(a, b)

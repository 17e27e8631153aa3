"""All stages of the models' making, with little of each."""

from pathlib import Path

import pytest
import torch

from models.recipe import begin, make, swaps, train
from models.recipe.model import Llama
from models.recipe.swaps import Swaps
from models.recipe.train import Plan

FEW = {
    "reader": Plan(1, 1e-4, 4e-4, (0.1, 0.1), longest=700),
    "told": Plan(1, 1e-3, 0.0, (0.1, 0.1), longest=700),
    "saying": Plan(1, 0.0, 4e-4, (0.1, 0.1), longest=700),
    "answers": Plan(2, 2e-4, 4e-4, (0.1, 0.1), longest=700),
    "draft": Plan(1, 2e-3, 1e-3, (0.1, 0.1), longest=700),
}


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in (
        (train, "POOL", 6), (begin, "READ", 40), (begin, "FITTED", 20), (begin, "POINTED", 12),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(swaps.Swaps, "of", lambda _: Swaps({}, {}, {}, set(), set()))


def test_a_run_goes_on_where_it_was(
    little: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is cut off in the middle of the answers."""
    learn, learned = train.Training.learn, list[str]()
    cut_off = True

    def counted(training: train.Training) -> train.Tally:
        learned.append(type(training.lesson).__name__)
        if cut_off and learned.count("Answers") == 2:
            raise KeyboardInterrupt
        return learn(training)

    monkeypatch.setattr(train.Training, "learn", counted)
    monkeypatch.setattr(train, "SAVE_EVERY", 1)
    with pytest.raises(KeyboardInterrupt):
        make.Run(tmp_path, 0, 1, FEW).models()
    cut_off = False
    assert learned == ["Reading", "Told", "Saying", "Answers", "Answers"]
    made = make.Run(tmp_path, 0, 1, FEW).models()
    assert learned[5:] == ["Answers", "Draft"]
    again = make.Run(tmp_path, 0, 1, FEW).models()
    assert len(learned) == 7
    for name, model in made.items():
        assert isinstance(model, Llama)
        for a, b in zip(model.parameters(), again[name].parameters(), strict=True):
            assert torch.equal(a, b)

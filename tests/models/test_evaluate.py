"""The command that measures: what it is given, and when it writes the card."""

import sys
from pathlib import Path

import pytest

from models.recipe import evaluate
from models.recipe.card import NOT_YET, card_in
from models.recipe.files import alone


def start(monkeypatch: pytest.MonkeyPatch, *given: object) -> None:
    monkeypatch.setattr(sys, "argv", ["evaluate", *map(str, given)])
    evaluate.main()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (("--count", "0"), "--count: 0 is not a number from 1 on"),
        (("--count", "-1"), "--count: -1 is not"),
        (("--count", "²"), "--count: ² is not"),
        (("--threads", "0"), "--threads: 0 is not"),
        (("--model", "/nonexistent"), "--model: /nonexistent has no config.json"),
        (("--draft", "/nonexistent"), "--draft: /nonexistent has no config.json"),
    ],
)
def test_wrong_arguments_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    given: tuple[str, str],
    why: str,
) -> None:
    with pytest.raises(SystemExit):
        start(monkeypatch, *given)
    assert why in capsys.readouterr().err


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for a checkpoint, of which nothing is measured."""
    folder = tmp_path / "demo"
    card_in(folder)
    (folder / "config.json").touch()
    monkeypatch.setattr(evaluate, "table", lambda *_: "| one |")
    return folder


def test_figures_go_into_the_card_where_that_is_asked_for(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = model / "README.md"
    before = card.read_text()
    start(monkeypatch, "--model", model)
    assert card.read_text() == before
    start(monkeypatch, "--model", model, "--card")
    assert "| one |" in card.read_text()
    assert NOT_YET not in card.read_text()


def test_a_card_is_not_written_while_its_models_are_made(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (model / "README.md").read_text()
    with alone(model.parent), pytest.raises(BlockingIOError, match="another training runs in"):
        start(monkeypatch, "--model", model, "--card")
    assert (model / "README.md").read_text() == before


def test_a_card_without_a_place_is_refused_before_the_hours(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model / "README.md").write_text("no marks\n")
    monkeypatch.setattr(evaluate, "table", lambda *_: pytest.fail("it measured"))
    with pytest.raises(ValueError, match="no place for the figures"):
        start(monkeypatch, "--model", model, "--card")

"""The model card: what is about the weights is written anew with them, and the rest stays."""

import re
from pathlib import Path

import pytest

from models.recipe.card import FIGURES, NOT_YET, OURS, WEIGHTS, begin_anew, card_in, write_figures


def outside(text: str, *places: tuple[str, str, str]) -> str:
    """What stands in no marks."""
    for _, begins, ends in places:
        text = re.sub(f"{begins}.*?{ends}", "", text, flags=re.DOTALL)
    return text


@pytest.fixture
def card(tmp_path: Path) -> Path:
    return card_in(tmp_path / "new" / "demo")


def test_the_card_has_a_place_before_anything_is_learned(card: Path) -> None:
    assert card.read_text() == OURS.read_text()
    for text in ("no marks\n", card.read_text().replace(WEIGHTS.begins, "")):
        card.write_text(text)
        with pytest.raises(ValueError, match=r"no place for (the figures|words on the weights)"):
            card_in(card.parent)


def test_figures_replace_those_of_the_card(card: Path) -> None:
    for figures in ("| one |", "| two |"):
        write_figures(card, figures)
    before, after = OURS.read_text(), card.read_text()
    assert "| two |" in after
    assert "| one |" not in after
    assert after.split(FIGURES.begins)[0] == before.split(FIGURES.begins)[0]
    assert after.split(FIGURES.ends)[1] == before.split(FIGURES.ends)[1]


def test_other_weights_have_nothing_of_what_was_measured_on_ours(card: Path) -> None:
    """Each share, each count of right answers, and how these were trained."""
    begin_anew(card, 7)
    before, after = OURS.read_text(), card.read_text()
    assert outside(after, FIGURES, WEIGHTS) == outside(before, FIGURES, WEIGHTS)
    assert f"{FIGURES.begins}\n{NOT_YET}\n{FIGURES.ends}" in after
    assert after.count("Made by `make model` with seed 7; nothing but the figures below") == 1
    about = re.compile(r"\d %|\d (?:are )?right|These weights|denied \d")
    assert about.search(before)
    assert not about.search(after)
    begin_anew(card, 8)
    assert card.read_text() == after.replace("seed 7", "seed 8")


def test_a_card_is_whole_or_as_it_was(card: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(path: Path, text: str) -> None:
        path.write_bytes(text.encode()[:100])
        raise OSError("no space is left")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="no space"):
        write_figures(card, "| one |")
    assert card.read_text() == OURS.read_text()

"""What a saved model says of itself: transformers, the engine and the recipe read the same."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import BPE

from models.recipe import export
from models.recipe.model import Llama, Shape
from services.worker.engine.models.registry import read_config
from services.worker.engine.rope import angle_tables

PLAIN = Shape(64, hidden=32, inner=48, layers=2, heads=4, head_dim=16, context=300)
STILL = Shape(
    64, hidden=32, inner=48, layers=2, heads=4, head_dim=16, context=300, theta=1e9, still=6,
    biased=True,
)  # fmt: skip


@pytest.fixture(params=[PLAIN, STILL], ids=["all turn", "two turn"])
def model(request: pytest.FixtureRequest) -> Llama:
    torch.manual_seed(0)
    made = Llama(request.param)
    with torch.no_grad():
        for weight in made.parameters():  # that none is nothing
            weight.add_(torch.randn_like(weight) * 0.2).copy_(weight.bfloat16())
    return made


@pytest.fixture
def folder(model: Llama, tmp_path: Path) -> Path:
    export.save(model, Tokenizer(BPE()), tmp_path)
    return tmp_path


def test_transformers_says_what_the_recipe_says(model: Llama, folder: Path) -> None:
    """To the end of the context, where another choice of frequencies would begin."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(0, 64, (2, 300), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(ids), theirs(ids).logits, rtol=1e-3, atol=1e-3)


def test_the_engine_turns_the_same_pairs(model: Llama, folder: Path) -> None:
    config = read_config(folder)
    for served in (8, 300):
        [(cos, sin)] = angle_tables(config, served)
        np.testing.assert_allclose(cos, model.cos[:served], atol=1e-4)
        np.testing.assert_allclose(sin, model.sin[:served], atol=1e-4)


def test_a_saved_model_comes_back(model: Llama, folder: Path) -> None:
    again, _ = export.load(folder)
    assert again.shape == model.shape
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)


def test_pairs_that_stand_still_tell_nothing_of_places() -> None:
    model = Llama(STILL)
    assert (model.cos[:, 2:] == 1).all()
    assert model.sin[:, 2:].abs().max() < 1e-9
    assert model.cos[:, :2].std(0).min() > 0.1

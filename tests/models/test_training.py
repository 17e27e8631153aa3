"""The start, the optimizer, the batches and the loop of the training."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from models.recipe import start
from models.recipe.batches import answer_mask, collate, pool, steps
from models.recipe.export import load, save
from models.recipe.model import QUERIES, Llama, Shape, attend
from models.recipe.optim import orthogonalise
from models.recipe.tokenizer import ASSISTANT, CITES, END, PAD, USER
from models.recipe.train import Crew, Plan, Tally, Training

TINY = Shape(2048, hidden=64, inner=64, layers=2, heads=4, head_dim=16)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(ROOT / "models/demo/tokenizer.json"))


def test_a_fresh_model_already_copies() -> None:
    torch.manual_seed(0)
    model = Llama(Shape(2048))
    start.prepare(model, list(range(10, 10 + len(CITES))))
    tokens = torch.randint(300, 2048, (4, 80)).repeat(1, 2)
    with torch.no_grad():
        guessed = model(tokens[:, :-1]).argmax(-1)[:, 90:]
    assert (guessed == tokens[:, 91:]).float().mean() > 0.6


def test_orthogonalise_flattens_the_singular_values() -> None:
    for rows, columns in ((48, 48), (32, 80), (80, 32)):
        made = orthogonalise(torch.randn(3, rows, columns))
        values = torch.linalg.svdvals(made)
        assert values.min() > 0.3
        assert values.max() < 1.4


def test_plain_attention_equals_the_fused_kernel() -> None:
    shape = (2, 4, 2 * QUERIES + 5, 16)
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    plain = attend(q, k, v)
    fused = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(plain, fused, rtol=1e-4, atol=1e-5)
    seed = torch.randn_like(plain)
    for a, b in zip(
        torch.autograd.grad(plain, (q, k, v), seed),
        torch.autograd.grad(fused, (q, k, v), seed),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_only_answers_and_their_end_are_weighted() -> None:
    ids = [USER, 50, 51, END, ASSISTANT, 60, 61, END, USER, 52, END, ASSISTANT, 62, END]
    said = [i for i, inside in zip(ids, answer_mask(ids), strict=True) if inside]
    assert said == [60, 61, END, 62, END]
    batch = collate([(ids, "passages"), (ids[:8], "recall")], prompt_weight=0.0)
    assert batch.targets[batch.weights > 0].tolist() == [60, 61, END, 62, END, 60, 61, END]
    assert batch.inputs.shape == (2, 16)
    assert (batch.inputs[1, 7:] == PAD).all()


def test_steps_are_of_like_size(tokenizer: Tokenizer) -> None:
    batches = pool(tokenizer, 0, 5, 0.5, 2304, 2048)
    groups = list(steps(batches, 4096))
    assert [batch for group in groups for batch in group] == batches
    assert all(2048 < sum(b.inputs.numel() for b in group) < 8192 for group in groups)


def test_two_threads_find_the_gradient_of_one(tokenizer: Tokenizer) -> None:
    group = pool(tokenizer, 0, 5, 0.5, 2304, 2048)[:3]
    found = []
    for threads in (1, 2):
        torch.manual_seed(0)
        crew = Crew(Llama(TINY), threads)
        crew.learn(group, Tally())
        found.append([p.grad for p in crew.replicas[0].parameters()])
    torch.testing.assert_close(found[0], found[1], rtol=0.02, atol=1e-4)


def test_a_resumed_training_ends_as_an_uninterrupted_one(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    def begun() -> Training:
        return Training(TINY, Plan(pools=2), tokenizer.encode("[1][2]").ids, "cpu", 1)

    through, before, after = begun(), begun(), begun()
    for _ in range(2):
        through.learn(tokenizer)
    before.learn(tokenizer)
    before.save(tmp_path / "last.pt")
    after.restore(tmp_path / "last.pt")
    after.learn(tokenizer)
    assert after.done == through.done
    for a, b in zip(after.model.parameters(), through.model.parameters(), strict=True):
        assert torch.equal(a, b)

    longer = Training(TINY, Plan(pools=3), tokenizer.encode("[1][2]").ids, "cpu", 1)
    with pytest.raises(ValueError, match="another shape or plan"):
        longer.restore(tmp_path / "last.pt")


def test_what_is_exported_loads_again(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = Llama(TINY)
    save(model, tokenizer, tmp_path)
    loaded, same = load(tmp_path)
    assert loaded.shape == TINY
    assert same.to_str() == tokenizer.to_str()
    for a, b in zip(model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a.bfloat16().float(), b)

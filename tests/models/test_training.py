"""The start, the optimizer and the batches of the training."""

import torch

from models.recipe import start
from models.recipe.batches import answer_mask, collate
from models.recipe.model import Llama, Shape, attend
from models.recipe.optim import orthogonalise
from models.recipe.tokenizer import ASSISTANT, END, PAD, USER


def test_a_fresh_model_already_copies() -> None:
    torch.manual_seed(0)
    model = Llama(Shape(2048))
    start.prepare(model)
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
    q, k, v = (torch.randn(2, 4, 37, 16, requires_grad=True) for _ in range(3))
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

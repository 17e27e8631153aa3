"""The start, the optimizer, the batches and the loop of the training."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from models.recipe import start
from models.recipe.batches import answer_mask, collate, pool, steps
from models.recipe.export import load, save
from models.recipe.model import QUERIES, Llama, RMSNorm, Shape, attend
from models.recipe.optim import orthogonalise
from models.recipe.tokenizer import ASSISTANT, CITES, END, PAD, USER
from models.recipe.train import Crew, Plan, Tally, Training, alone, train
from services.tokenizer.checkpoints.own_sampling import read_own

TINY = Shape(2048, hidden=64, inner=64, layers=2, heads=4, head_dim=16)
ROOT = Path(__file__).parents[2]
MARKS = list(range(9, 10 + len(CITES)))  # any tokens would do


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(ROOT / "models/demo/tokenizer.json"))


def test_a_fresh_model_already_copies() -> None:
    torch.manual_seed(0)
    model = Llama(Shape(2048))
    start.prepare(model, MARKS)
    tokens = torch.randint(300, 2048, (4, 80)).repeat(1, 2)
    with torch.no_grad():
        guessed = model(tokens[:, :-1]).argmax(-1)[:, 90:]
    assert (guessed == tokens[:, 91:]).float().mean() > 0.6


def test_a_fresh_model_copies_from_the_passage_that_it_cites() -> None:
    torch.manual_seed(0)
    model = Llama(Shape(2048))
    start.prepare(model, MARKS)
    rows, passages = 64, 3
    lead = torch.randint(300, 2048, (rows, 2))  # the same two tokens before each passage's value
    values = torch.randint(300, 2048, (rows, passages))
    parts = []
    for number in range(passages):
        mark = torch.full((rows, 1), MARKS[number + 1])
        noise = torch.randint(300, 2048, (rows, 12))
        parts += [mark, noise, lead, values[:, number : number + 1], noise.flip(1)]
    parts.append(torch.full((rows, 1), MARKS[0]))
    right = 0
    for number in range(passages):
        mark = torch.full((rows, 1), MARKS[number + 1])
        with torch.no_grad():
            scores = model(torch.cat([*parts, mark, lead], 1))[:, -1]
        right += int((scores.gather(1, values).argmax(1) == number).sum())
    assert right > 0.5 * rows * passages  # a third by chance


def test_orthogonalise_flattens_the_singular_values() -> None:
    for rows, columns in ((48, 48), (32, 80), (80, 32)):
        left, _, right = torch.linalg.svd(torch.randn(3, rows, columns), full_matrices=False)
        uneven = left * torch.linspace(0.05, 1, left.shape[-1]) @ right
        values = torch.linalg.svdvals(orthogonalise(uneven))
        assert values.min() > 0.3
        assert values.max() < 1.4


def assert_same(ours: Tensor, theirs: Tensor, inputs: list[Tensor]) -> None:
    """Two results for the same inputs, and their gradients."""
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    seed = torch.randn_like(ours)
    found, wanted = (torch.autograd.grad(x, inputs, seed) for x in (ours, theirs))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, QUERIES, 2 * QUERIES + 5])
def test_attention_and_its_gradients(tokens: int) -> None:
    shape = (2, tokens, 4, 16)
    inputs = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    angles = torch.arange(tokens)[:, None] * torch.rand(8)
    cos, sin = angles.cos(), angles.sin()

    def turned(x: Tensor) -> Tensor:  # as complex numbers
        pairs = torch.complex(*x.transpose(1, 2).chunk(2, -1)) * torch.complex(cos, sin)
        return torch.cat((pairs.real, pairs.imag), -1)

    q, k, v = inputs
    fused = torch.nn.functional.scaled_dot_product_attention(
        turned(q), turned(k), v.transpose(1, 2), is_causal=True
    )
    assert_same(attend(q, k, v, cos, sin), fused.transpose(1, 2), inputs)


def test_norm_and_its_gradients() -> None:
    norm = RMSNorm(24, 1e-3)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(3, 7, 24, requires_grad=True)
    wanted = torch.nn.functional.rms_norm(x, (24,), norm.weight, 1e-3)
    assert_same(norm(x), wanted, [x, norm.weight])


def test_the_gradient_in_bfloat16_is_near_that_in_float32() -> None:
    torch.manual_seed(0)
    model = Llama(TINY)
    start.prepare(model, MARKS)
    for weight in model.parameters():
        weight.data += 0.02 * torch.randn_like(weight)
    tokens = torch.randint(0, 2048, (2, 2 * QUERIES + 5))
    found: list[list[Tensor]] = []
    for half in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            states = model.hidden(tokens)
        scores = model.logits(states.float())
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), tokens.flatten())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        assert all(g.dtype == torch.float32 for g in gradients)
        found.append(list(gradients))
    for exact, rounded in zip(*found, strict=True):
        assert torch.cosine_similarity(exact.flatten(), rounded.flatten(), dim=0) > 0.97


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
        model = Llama(TINY)
        start.prepare(model, MARKS)
        crew = Crew(model, threads, half=False)
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


def test_two_trainings_do_not_share_a_folder(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with alone(tmp_path), pytest.raises(BlockingIOError, match="another training runs in"):
        train(TINY, Plan(pools=0), tokenizer, tmp_path, "cpu", 1)
    train(TINY, Plan(pools=0), tokenizer, tmp_path, "cpu", 1)


@pytest.mark.parametrize("tiles", [True, False])
def test_a_cpu_multiplies_halves_where_it_has_tiles_for_them(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, tiles: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    training = Training(TINY, Plan(pools=1), tokenizer.encode("[1][2]").ids, "cpu", 1)
    seen = []
    training.model.model.norm.register_forward_hook(lambda _, given, made: seen.append(made.dtype))
    training.crew.learn(pool(tokenizer, 0, 5, 0.5, 2304, 2048)[:1], Tally())
    wanted = torch.bfloat16 if tiles else torch.float32
    assert seen == [wanted]
    assert training.optimizers[0].dtype == wanted  # type: ignore[attr-defined]


def test_what_is_exported_loads_again(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = Llama(TINY)
    save(model, tokenizer, tmp_path)
    loaded, same = load(tmp_path)
    assert loaded.shape == TINY
    assert same.to_str() == tokenizer.to_str()
    for a, b in zip(model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a.bfloat16().float(), b)
    assert read_own(tmp_path) == {"temperature": 0}, "greedy, where a request does not say"

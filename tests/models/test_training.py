"""The start, the optimizer, the batches, the guides and the loop of the training."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import cast

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from models.recipe import batches, corpus, minilm, start
from models.recipe import tokenizer as bpe
from models.recipe.batches import answer_mask, collate, pool, row, steps
from models.recipe.export import load, save
from models.recipe.guides import SENTENCE, TOLD, Guide, looks
from models.recipe.model import QUERIES, Layer, Llama, RMSNorm, Shape, attend
from models.recipe.optim import orthogonalise
from models.recipe.swaps import Swaps
from models.recipe.tokenizer import ASSISTANT, CITES, DOCUMENTS, END, PAD, USER
from models.recipe.train import Crew, Learner, Plan, Tally, Training, alone, train

TINY = Shape(bpe.VOCABULARY, hidden=96, inner=64, layers=6, heads=4, head_dim=16)
NO_SWAPS = Swaps({}, {}, {}, set(), set())


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    """The recipe's, with meanings drawn at random in place of MiniLM's, which take long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minilm, "encode", lambda texts: drawn(len(texts), minilm.WIDTH))
        patch.setattr(start, "meanings", meanings)
        yield bpe.train()


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def meanings(tokenizer: Tokenizer, size: int) -> Tensor:
    """A meaning for each word, with and without a space."""
    words = [name.removeprefix("Ġ").lower() for name in start.texts(tokenizer)]
    known = {word: i for i, word in enumerate(dict.fromkeys(words))}
    return drawn(len(known), size)[[known[word] for word in words]]


def fresh(shape: Shape, tokenizer: Tokenizer) -> Llama:
    torch.manual_seed(0)
    model = Llama(shape)
    start.prepare(model, tokenizer)
    return model


def words(tokenizer: Tokenizer, *shape: int) -> Tensor:
    """Whole words at random, each with a space before it."""
    names = start.texts(tokenizer)
    ids = [i for i, name in enumerate(names) if name[1:].isalpha() and name[0] == "Ġ"]
    return torch.tensor(ids)[torch.randint(len(ids), shape)]


def test_a_value_is_cut_alike_wherever_it_stands(tokenizer: Tokenizer) -> None:
    for value in ("Bristol", "the side gate", "Okonkwo & Söhne", "8.30 a.m.", "QX-417"):
        within = tokenizer.encode(f"in {value}").tokens[1:]
        alone = tokenizer.encode(value).tokens
        assert within == ["Ġ" + alone[0], *alone[1:]]


def test_ordinary_words_are_one_token(tokenizer: Tokenizer) -> None:
    text = "which manager opens our garden before the meeting on a wet Thursday in October"
    assert len(tokenizer.encode(text).ids) == len(text.split())


def test_a_word_means_the_same_with_and_without_a_space(tokenizer: Tokenizer) -> None:
    rows = fresh(TINY, tokenizer).model.embed_tokens.weight
    ids = [tokenizer.token_to_id(t) for t in ("garden", "Ġgarden", "window")]
    apart = [(rows[ids[0]] != rows[other]).nonzero().flatten().tolist() for other in ids[1:]]
    assert apart[0] == [start.Layout(TINY).own.stop - 1]
    assert len(apart[1]) > 10


def pointed(model: Llama, tokens: Tensor) -> Tensor:
    """(rows) where the pointing head looks from the last token."""
    layer, rows = start.points(model.shape), torch.arange(len(tokens))
    with torch.no_grad():
        read = model.seen(tokens, layer)[1]
        return looks(model, layer, read, rows, torch.full_like(rows, tokens.shape[1] - 1)).argmax(1)


def test_a_fresh_model_looks_for_what_followed(tokenizer: Tokenizer) -> None:
    model = fresh(Shape(bpe.VOCABULARY), tokenizer)
    tokens = words(tokenizer, 32, 60)
    assert (pointed(model, torch.cat((tokens, tokens[:, :11]), 1)) == 11).float().mean() > 0.8


def test_a_fresh_model_tells_what_passages_share_with_the_question(tokenizer: Tokenizer) -> None:
    model = fresh(Shape(bpe.VOCABULARY), tokenizer)
    at = start.Layout(model.shape)
    weights = start.weights(tokenizer)
    asked, other = words(tokenizer, 2, 400)
    asked, other = (x[weights[x] > 0.8] for x in (asked, other))
    question, shared, else_ = asked[:8], asked[:8].flip(0), other[:8]
    cite = tokenizer.token_to_id("[1]")
    mark = [torch.tensor([x]) for x in (USER, END, DOCUMENTS, cite)]
    tokens = torch.cat([mark[0], question, *mark[1:], shared, else_])[None]
    with torch.no_grad():
        alike = model.seen(tokens, 2)[1][0, :, at.alike.start] / start.SPREAD
    same, unlike = alike[-16:-8], alike[-8:]
    assert same.median() > 4 * unlike.median().clamp(min=0.2)


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
    for weight in model.parameters():
        weight.data += 0.02 * torch.randn_like(weight)
    tokens = torch.randint(0, bpe.VOCABULARY, (2, QUERIES + 5))
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
    rows = [batches.Row(ids, "recall", Guide()), batches.Row(ids[:8], "recall", Guide())]
    batch = collate(rows)
    assert batch.targets[batch.weights > 0].tolist() == [60, 61, END, 62, END, 60, 61, END]
    assert batch.inputs.shape == (2, 16)
    assert (batch.inputs[1, 7:] == PAD).all()


def test_where_there_are_passages_only_what_follows_them_is_learned() -> None:
    ids = [USER, 50, END, ASSISTANT, 60, END, USER, 51, END, DOCUMENTS, 70, END, USER, 51, END]
    ids += [ASSISTANT, 61, END]
    assert [i for i, said in zip(ids, answer_mask(ids), strict=True) if said] == [61, END]


def looked_up(count: int) -> Iterator[corpus.Conversation]:
    source = (made for made in corpus.training(1, 0, 0.5) if made.skill in ("passages", "not_told"))
    return islice(source, count)


def test_the_guides_say_what_the_answer_does(tokenizer: Tokenizer) -> None:
    told = 0
    for made in looked_up(60):
        one = row(tokenizer, made, 2048)
        by_output = [[g for g in one.guide.guesses if g[1] == o] for o in (SENTENCE, TOLD)]
        sentences, whole = by_output
        assert [truth for _, _, truth in whole] == [bool(made.tells)]
        assert any(truth for _, _, truth in sentences) == bool(made.tells)
        pairs = [(one.ids[at + 1], {one.ids[to] for to in aims}) for at, aims in one.guide.pointers]
        if not made.tells:
            assert [aims for _, aims in pairs] == [{DOCUMENTS}]
        elif pairs:
            told += 1
            named = [
                (tokenizer.id_to_token(token), {*map(tokenizer.id_to_token, aims)})
                for token, aims in pairs
            ]
            (first, aims), *middle, _, (cite, cited) = named
            assert {first, "Ġ" + first} >= aims
            assert all({token} == aims for token, aims in middle)
            assert cited == {cite}
            assert cite in CITES
    assert told > 20


def test_swapped_words_keep_the_answer_and_the_places(tokenizer: Tokenizer) -> None:
    names = {name: i for i, name in enumerate(start.texts(tokenizer))}
    pair = {word: (names[word], names["Ġ" + word]) for word in ("garden", "window", "castle")}
    stems = {spaced: plain for plain, spaced in pair.values()}
    near = {pair["garden"][0]: [pair["window"][0]]}
    rest = names["ing"]
    swaps = Swaps(near, stems, {plain: spaced for spaced, plain in stems.items()}, {rest}, {rest})
    garden, window, castle = (pair[word][1] for word in pair)
    question = [USER, 300, garden, END]
    ids = [*question, DOCUMENTS, 301, garden, castle, garden, rest, END, *question]
    ids += [ASSISTANT, castle, END]
    seen = {tuple(swaps.swapped(ids, {7}, random.Random(seed))) for seed in range(40)}
    other = [window if token == garden else token for token in ids]
    other[8] = garden  # of a longer word
    assert seen == {tuple(ids), tuple(other)}


def test_steps_are_of_like_size(tokenizer: Tokenizer) -> None:
    made = pool(tokenizer, NO_SWAPS, 0, 5, 0.5, 2304, 2048)
    groups = list(steps(made, 4096))
    assert [batch for group in groups for batch in group] == made
    assert all(1024 < sum(b.inputs.numel() for b in group) < 8192 for group in groups)


def test_two_threads_find_the_gradient_of_one(tokenizer: Tokenizer) -> None:
    group = pool(tokenizer, NO_SWAPS, 0, 5, 0.5, 2304, 2048)[:3]
    found = []
    for threads in (1, 2):
        torch.manual_seed(0)
        learner = Learner(TINY)
        learner.llama = fresh(TINY, tokenizer)
        crew = Crew(learner, threads, half=False)
        crew.learn(group, Tally())
        found.append([p.grad for p in crew.replicas[0].parameters()])
    torch.testing.assert_close(found[0], found[1], rtol=0.02, atol=1e-4)


def test_the_finding_and_the_pointing_head_learn_where_to_look(tokenizer: Tokenizer) -> None:
    learner = Learner(TINY)
    learner.llama = fresh(TINY, tokenizer)
    batch = collate([row(tokenizer, one, 2048) for one in looked_up(4)])
    layers = start.finds(TINY), start.points(TINY)
    _, before, read = learner.llama.seen(batch.inputs, *layers)
    losses = learner.guides.losses(learner.llama, before, read, batch.guided)
    for layer, loss in zip(layers, (losses[3], losses[1]), strict=True):
        learner.zero_grad()
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        attention = cast(Layer, learner.llama.model.layers[layer]).self_attn
        grad = attention.q_proj.weight.grad
        assert grad is not None
        assert grad[attention.rows(0)].abs().sum() > 0
        assert grad[attention.rows(1)].abs().sum() == 0


def test_the_finder_is_told_the_sentence_that_tells(tokenizer: Tokenizer) -> None:
    for made in looked_up(60):
        found = row(tokenizer, made, 2048).guide
        told = {at for _, aims in found.finds for at in aims}
        if made.tells:
            assert found.inside <= told
        else:
            assert len(told) == 1


def begun(tokenizer: Tokenizer, pools: int) -> Training:
    made = Training(TINY, Plan(pools), tokenizer, NO_SWAPS, "cpu", 1)
    made.begin()
    return made


def test_words_keep_what_they_mean(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "POOL", 24)
    training = begun(tokenizer, 2)
    rows = training.learner.llama.model.embed_tokens.weight
    before = rows.detach().clone()
    training.learn()
    moved = {tokenizer.id_to_token(int(i)) for i in (rows != before).any(1).nonzero().flatten()}
    assert {"<|assistant|>", "[1]", "Ġ1"} <= moved
    assert not moved & {"garden", "Ġthe", "Ġmanager"}


def test_a_resumed_training_ends_as_an_uninterrupted_one(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "POOL", 24)
    through, before, after = (begun(tokenizer, 2) for _ in range(3))
    for _ in range(2):
        through.learn()
    before.learn()
    before.save(tmp_path / "last.pt")
    after.restore(tmp_path / "last.pt")
    after.learn()
    assert after.done == through.done
    for a, b in zip(after.learner.parameters(), through.learner.parameters(), strict=True):
        assert torch.equal(a, b)

    other = Training(Shape(bpe.VOCABULARY), Plan(2), tokenizer, NO_SWAPS, "cpu", 1)
    with pytest.raises(ValueError, match="another shape"):
        other.restore(tmp_path / "last.pt")


def test_two_trainings_do_not_share_a_folder(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with alone(tmp_path), pytest.raises(BlockingIOError, match="another training runs in"):
        train(TINY, Plan(1), tokenizer, tmp_path, "cpu", 1)


@pytest.mark.parametrize("biased", [False, True])
def test_what_is_exported_loads_again(tokenizer: Tokenizer, tmp_path: Path, biased: bool) -> None:
    model = Llama(replace(TINY, biased=biased))
    save(model, tokenizer, tmp_path)
    loaded, same = load(tmp_path)
    assert loaded.shape == model.shape
    assert same.to_str() == tokenizer.to_str()
    for a, b in zip(model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a.bfloat16().float(), b)

"""MiniLM as a teacher, and the first weights that its layers make."""

import copy
import random
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from models.recipe import copying, corpus, layers, minilm, own_heads
from models.recipe import tokenizer as bpe
from models.recipe.batches import row
from models.recipe.copying import FAST, Layout, fitted
from models.recipe.guides import Aims, looks
from models.recipe.layers import FAR, PLACE, Texts, compared
from models.recipe.model import Layer, Llama, Shape
from models.recipe.pointing import BEGINS, GOES_ON, REPEATS, STANDS, Seen, point
from models.recipe.reader import pairs
from models.recipe.teacher import CLS, SEP, Teacher, read, unit
from models.recipe.tokenizer import ASSISTANT, DOCUMENTS, END, USER
from models.recipe.vocabulary import spelled

SHAPE = Shape(bpe.VOCABULARY, hidden=448, inner=704, layers=7, heads=14, head_dim=32, theta=1e9)
AT = Layout.of(SHAPE)


@pytest.fixture(scope="module")
def teacher(tokenizer: Tokenizer) -> Teacher:
    return Teacher()


@pytest.fixture(scope="module")
def rows(tokenizer: Tokenizer) -> list[list[int]]:
    """Questions, each with a passage."""
    made = (row(tokenizer, corpus.looked_up(random.Random(i), 0.1), 4096) for i in range(60))
    return [pairs(one)[0].ids for one in made]


@pytest.fixture(scope="module")
def prepared(tokenizer: Tokenizer, teacher: Teacher, rows: list[list[int]]) -> Llama:
    torch.manual_seed(0)
    made = Llama(SHAPE)
    layers.prepare(made, tokenizer, teacher, rows, 30)
    return made


@pytest.fixture
def model(prepared: Llama) -> Llama:
    """One that a test may write to."""
    torch.manual_seed(0)
    return copy.deepcopy(prepared)


def test_both_end_together_where_a_word_does(tokenizer: Tokenizer, teacher: Teacher) -> None:
    text = "<|user|>Who is Okonkwo?<|end|><|documents|>[1] Café Söhne\nOkonkwo’s, 417 £5.<|end|>"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    spelling = spelled(tokenizer)
    assert b"".join(spelling).isascii() is False
    found = read(teacher.wordpiece, spelling, ids)
    pairs = [
        (tokenizer.id_to_token(ids[ours]), teacher.wordpiece.id_to_token(found.ids[theirs]))
        for ours, theirs in zip(found.ours, found.theirs, strict=True)
    ]
    assert pairs[0] == ("<|user|>", "[CLS]")
    assert ("Ġis", "is") in pairs
    assert [theirs for ours, theirs in pairs if ours == "[1]"] == ["[SEP]"]
    assert pairs[-1] == ("<|end|>", "[SEP]")
    assert [theirs for _, theirs in pairs if theirs in ("cafe", "£5")] == ["cafe", "£5"]
    for ours, theirs in pairs:
        last = ours.removeprefix("Ġ")[-1].lower()
        assert theirs[-1] == last or not last.isascii() or theirs in ("[CLS]", "[SEP]")
    assert len(pairs) > 18


def test_the_teacher_is_minilm_reading_from_left_to_right(teacher: Teacher) -> None:
    ids = torch.tensor([[CLS, *range(2000, 2030), SEP]])
    tokens = ids.shape[1]
    mask = torch.full((tokens, tokens), -1e9).triu_(1)[None, None]
    with torch.no_grad():
        theirs = minilm.reader()[0](
            input_ids=ids, attention_mask=mask, output_hidden_states=True
        ).hidden_states
    said = teacher.layers(ids)
    for number in range(6):
        torch.testing.assert_close(said[number].read, theirs[number], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(said[5].out, unit(said[5].out), rtol=1e-3, atol=1e-3)
    assert teacher.layers(torch.full((1, 600), 2000))[-1].out.shape == (1, 600, minilm.WIDTH)


def test_a_fit_finds_the_map() -> None:
    torch.manual_seed(0)
    weight, bias, inputs = torch.randn(5, 8), torch.randn(5), torch.randn(400, 8)
    found, shift = fitted(inputs, inputs @ weight.T + bias)
    torch.testing.assert_close(found, weight, rtol=0, atol=0.02)
    torch.testing.assert_close(shift, bias, rtol=0, atol=0.02)
    few = fitted(inputs[:3], inputs[:3] @ weight.T, weight)[0]
    torch.testing.assert_close(few, weight)  # what nothing tells stays


def test_a_head_compares_what_it_compared() -> None:
    """Where few directions count, they fit into the pairs that turn slowly, and the scores stay."""
    torch.manual_seed(0)
    inputs = torch.randn(500, 40)
    query, key = torch.randn(32, 41), torch.randn(32, 40)
    query[20:], key[20:] = 0.001 * query[20:], 0.001 * key[20:]
    asked, told = compared(query, key, inputs)
    fast = [place for pair in range(layers.FAST) for place in (pair, pair + 16)]
    assert asked[fast].abs().max() == told[fast].abs().max() == 0
    ones = torch.cat((inputs, torch.ones(500, 1)), 1)
    before, after = (ones @ q.T @ (inputs @ k.T).T for q, k in ((query, key), (asked, told)))
    assert F.cosine_similarity(before.flatten(), after.flatten(), dim=0) > 0.999


def test_distances_become_biases() -> None:
    """What a head's biases alone score is the function of the distance, but for a constant."""
    model = Llama(SHAPE)
    attention = cast(Layer, model.model.layers[0]).self_attn
    back = torch.arange(FAR)
    wanted = 3 * (-back / 12).exp()
    with torch.no_grad():
        layers._distances(model, attention, 5, wanted)
    half = SHAPE.head_dim // 2
    q, k = (p.bias.detach()[attention.rows(5)] for p in (attention.q_proj, attention.k_proj))
    query, key = torch.complex(q[:half], q[half:]), torch.complex(k[:half], k[half:])
    turned = query[None] * torch.complex(model.cos[:FAR], model.sin[:FAR])
    found = (turned * key.conj()).real.sum(1) * SHAPE.head_dim**-0.5
    assert (found - found.mean() - wanted + wanted.mean()).abs()[:100].max() < 0.6


def test_first_weights_are_like_minilm(
    model: Llama, tokenizer: Tokenizer, teacher: Teacher, rows: list[list[int]]
) -> None:
    texts = Texts(teacher, spelled(tokenizer), rows[:8])
    said = teacher.layers(texts.theirs)
    with torch.no_grad():
        seen = model.reads(texts.ours, *range(1, 7))
    for mine, theirs in zip(seen, said, strict=True):
        mine, like = unit(mine[..., : minilm.WIDTH])[texts.at], theirs.out[texts.there]
        mine, like = mine - mine.mean(0), like - like.mean(0)
        assert F.cosine_similarity(mine, like, dim=-1).mean() > 0.75


def test_a_fresh_model_knows_the_token_before(model: Llama, rows: list[list[int]]) -> None:
    ids = torch.tensor([rows[0][:60]])
    with torch.no_grad():
        before = model.reads(ids, 1)[0][0, 1:, AT.before]
        codes = model.model.embed_tokens(ids)[0, :-1, AT.code]
    assert F.cosine_similarity(before, codes[:, : before.shape[1]], dim=-1).mean() > 0.9


def test_a_fresh_model_knows_the_place(model: Llama, tokenizer: Tokenizer) -> None:
    """At the thirtieth token half of what it is at the first."""
    ids = torch.randint(1000, 9000, (8, 60), generator=torch.Generator().manual_seed(0))
    ids[:, 0] = USER
    with torch.no_grad():
        place = model.reads(ids, 1)[0][:, :, PLACE].mean(0)
    assert (place.diff() < 0).all()
    assert place[30] / place[0] == pytest.approx(0.5, abs=0.1)


@pytest.fixture(scope="module")
def drawn(tokenizer: Tokenizer) -> Tensor:
    """(64, 52) three markers, 40 words, the first nine again."""
    return draws(tokenizer, 0)


def draws(tokenizer: Tokenizer, seed: int) -> Tensor:
    texts = spelled(tokenizer)
    ids = [i for i, text in enumerate(texts) if text[:1] == b" " and text[1:].isalpha()]
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))
    words = torch.tensor(ids)[order[: 64 * 40]].view(64, 40)
    mark = torch.tensor([[END, ASSISTANT, DOCUMENTS]]).expand(64, 3)
    return torch.cat((mark, words, words[:, :9]), 1)


@pytest.fixture(scope="module")
def written(prepared: Llama, drawn: Tensor) -> Llama:
    torch.manual_seed(0)
    made = copy.deepcopy(prepared)
    point(made, drawn, 0)
    return made


@pytest.fixture
def pointed(written: Llama) -> Llama:
    """One with copying heads, that a test may write to."""
    torch.manual_seed(0)
    return copy.deepcopy(written)


@pytest.fixture(scope="module")
def between(prepared: Llama, drawn: Tensor) -> Llama:
    """One with heads between."""
    torch.manual_seed(0)
    made = copy.deepcopy(prepared)
    own_heads.write(made, [drawn])
    return made


def looked(model: Llama, tokens: Tensor, head: int, layer: int = 6) -> Tensor:
    """(rows) where a head of a layer looks from the last token."""
    rows, width = tokens.shape
    aims = Aims.of([[(width - 1, [0])]] * rows, width)
    with torch.no_grad():
        return looks(model, layer, model.reads(tokens, layer)[0], aims, head).argmax(1)


def scores_back(model: Llama, tokens: Tensor, head: int) -> Tensor:
    """(rows, tokens) how much a head of the last layer looks at each but the last two."""
    rows, width = tokens.shape
    aims = Aims.of([[(width - 1, [0])]] * rows, width)
    with torch.no_grad():
        return looks(model, 6, model.reads(tokens, 6)[0], aims, head)[:, : width - 2]


def test_a_fresh_model_looks_where_a_token_stands_and_behind_it(
    pointed: Llama, drawn: Tensor
) -> None:
    assert (looked(pointed, drawn, GOES_ON) == 3 + 9).float().mean() > 0.7
    stands = looked(pointed, drawn, STANDS)
    assert ((stands == 3 + 8) | (stands == drawn.shape[1] - 1)).float().mean() > 0.7


def test_a_fresh_model_tells_pairs_of_tokens_apart(pointed: Llama, drawn: Tensor) -> None:
    """What the last token is stands twice before, once behind the same token as here."""
    twice = drawn.clone()
    twice[:, 30] = twice[:, 11]
    looks_at = looked(pointed, twice, REPEATS)
    assert (looks_at == 12).float().mean() > 0.9
    assert not (looks_at == 31).any()
    alone = drawn[:, :43].clone()
    alone[:, 42] = alone[:, 20]
    assert (looked(pointed, alone, REPEATS) == 1).float().mean() > 0.9, "it rests on the marker"


def test_a_pair_is_found_however_loud_its_place_is(model: Llama, drawn: Tensor) -> None:
    """Of two places behind a token like this one that which is louder has another one before."""
    louder = Llama(SHAPE)
    louder.load_state_dict(model.state_dict())
    twice = drawn.clone()
    twice[:, 30] = twice[:, 11]
    rows = louder.model.embed_tokens.weight.data
    rows[twice[:, 12].unique(), : AT.meaning.stop] *= 9  # of a larger stream codes are less
    with torch.no_grad():
        sizes = louder.reads(twice, 6)[0].square().mean(-1).sqrt()
    assert (sizes[:, 12] / sizes[:, 31]).mean() > 1.25
    point(louder, twice, 0)
    assert (looked(louder, twice, REPEATS) == 12).float().mean() > 0.9


def test_a_fresh_model_begins_behind_the_same_name(pointed: Llama, tokenizer: Tokenizer) -> None:
    """What stands two before here stands one or two before there; that it does so here, too, is to
    be learned.
    """
    many = torch.cat([draws(tokenizer, seed) for seed in range(12)])
    begins = scores_back(pointed, many, BEGINS).argmax(1)
    assert ((begins == 3 + 7) | (begins == 3 + 8)).float().mean() > 0.7


def test_what_tells_is_looked_for_behind_a_name_that_is_one_nearer(
    pointed: Llama, drawn: Tensor
) -> None:
    """It is asked before the quotation mark, behind which a value begins."""
    own_heads.look_at_what_tells(pointed, [drawn])
    scores = scores_back(pointed, drawn, own_heads.TELLS)
    more = scores.mean(0) - scores.mean()
    there = torch.zeros_like(more, dtype=torch.bool)
    there[[3 + 8, 3 + 9]] = True
    assert more[there].min() > 4
    assert more[~there].max() < 2, "not behind what stands two before, too"


@pytest.mark.parametrize("layer", own_heads.BETWEEN)
def test_heads_between_look_at_what_was_asked_and_behind_the_same(
    between: Llama, drawn: Tensor, layer: int
) -> None:
    assert (looked(between, drawn, own_heads.ASKED, layer) == 1).all()
    again = torch.cat((drawn[:, :40], drawn), 1)
    assert (looked(between, again, own_heads.ASKED, layer) == 41).all(), "the nearest"
    behind = looked(between, drawn, own_heads.FOLLOWED, layer)
    assert (behind == 3 + 9).float().mean() > 0.7


def test_heads_between_say_nothing_at_first_and_can_learn_to(model: Llama, drawn: Tensor) -> None:
    with torch.no_grad():
        said = model.hidden(drawn)
        for number in own_heads.BETWEEN:  # as a training before leaves them
            cast(Layer, model.model.layers[number]).self_attn.o_proj.weight[:, :64] += 0.1
    own_heads.write(model, [drawn])
    torch.testing.assert_close(model.hidden(drawn), said)
    model.reads(drawn[:12], 6)[0].square().sum().backward()
    for number in own_heads.BETWEEN:
        attention = cast(Layer, model.model.layers[number]).self_attn
        for head in (own_heads.ASKED, own_heads.FOLLOWED):
            moved = attention.o_proj.weight.grad
            assert moved is not None
            assert moved[: AT.meaning.stop, attention.rows(head)].abs().amax(0).all()


def test_what_tells_is_looked_for_as_where_answers_begin(pointed: Llama, drawn: Tensor) -> None:
    """It says nothing at first, and can learn to."""
    attention = cast(Layer, pointed.model.layers[6]).self_attn
    with torch.no_grad():  # as a training before leaves it
        attention.o_proj.weight[:, attention.rows(own_heads.TELLS)] = 0.1
    own_heads.look_at_what_tells(pointed, [drawn])
    asked = torch.cat((drawn, torch.tensor([[END, ASSISTANT]]).expand(64, 2)), 1)
    begins = looked(pointed, asked, BEGINS)
    assert begins.unique().numel() > 1
    assert (looked(pointed, asked, own_heads.TELLS) == begins).all()
    moved = attention.o_proj.weight
    assert not moved[:, attention.rows(own_heads.TELLS)].any()
    pointed.hidden(drawn[:12]).square().sum().backward()
    assert moved.grad is not None
    assert moved.grad[:, attention.rows(own_heads.TELLS)].abs().amax(0).all()


def test_an_assistant_marker_is_the_same_whatever_stands_before(
    pointed: Llama, drawn: Tensor
) -> None:
    """Heads rest there: what it has beside would be louder than a match."""
    asked = torch.cat((drawn, torch.tensor([[END, ASSISTANT]]).expand(64, 2)), 1)
    with torch.no_grad():
        read = pointed.reads(asked, 6)[0]
        key = cast(Layer, pointed.model.layers[6]).self_attn.k_proj
        normed = cast(Layer, pointed.model.layers[6]).input_layernorm(read)
    rows = cast(Layer, pointed.model.layers[6]).self_attn.rows(REPEATS)
    slow = slice(rows.start + FAST + 1, rows.start + SHAPE.head_dim // 2 - 1)
    keys = F.linear(normed, key.weight[slow], key.bias[slow])
    assert keys[:, -1].norm(dim=1).max() < 0.15 * keys[:, 10:40].norm(dim=2).mean()


def test_a_fresh_model_begins_where_the_reader_does(model: Llama, drawn: Tensor) -> None:
    """What it says is read off the stream by rows of weights; here it likes one kind of word."""
    tokens = torch.cat((drawn, torch.tensor([[END, ASSISTANT]]).expand(64, 2)), 1)
    liked = model.model.embed_tokens.weight[:, 3] > 0
    second = torch.ones_like(tokens, dtype=torch.bool)
    second[:, :3] = second[:, 43:] = False
    scores = torch.where(liked[tokens], 2.0, -6.0)
    inner, last = second & ~liked[tokens], second & liked[tokens]
    point(model, tokens, 0, Seen(tokens, second, scores, scores, inner, last))
    begins = looked(model, tokens, BEGINS)
    right = liked[tokens[torch.arange(64), begins]] & second[torch.arange(64), begins]
    assert right.float().mean() > 0.7


def test_what_codes_are_made_of_is_not_moved(pointed: Llama, drawn: Tensor) -> None:
    """Whatever gradients say: a lesson that is blind for them wears them out."""
    moved = Llama(SHAPE)
    moved.load_state_dict(pointed.state_dict())
    optimizer = torch.optim.AdamW(moved.parameters(), 1e-3, weight_decay=0.0)

    def codes() -> Tensor:
        """Of each token and of the one before it, as the last layer reads them."""
        with torch.no_grad():
            return moved.reads(drawn, 6)[0][..., AT.code.start :]

    before, row_before = codes(), moved.model.embed_tokens.weight[drawn[0, 3]].detach().clone()
    for _ in range(3):
        moved.reads(drawn[:12], 6)[0][..., : minilm.WIDTH].square().sum().backward()
        copying.keep_codes(moved)
        optimizer.step()
        optimizer.zero_grad()
    after, far = codes(), slice(AT.long_before.start, AT.long_before.stop)
    own = AT.code.start  # what stands far before is read behind a norm: its size may change
    near = [n for n in range(after.shape[2]) if n + own not in range(far.start, far.stop)]
    torch.testing.assert_close(after[..., near], before[..., near], rtol=0, atol=0.02)
    twice = [x[..., far.start - own : far.stop - own] for x in (after, before)]
    assert F.cosine_similarity(*(x[:, 3:] for x in twice), -1).min() > 0.99
    for x in twice:  # behind an assistant's marker is nothing, and stays nothing
        assert x[:, 2].norm(dim=-1).max() < 0.15 * x[:, 3:].norm(dim=-1).mean()
    assert not torch.equal(moved.model.embed_tokens.weight[drawn[0, 3]], row_before)

"""The start, the optimizer, the batches, the guides and the loop of the training."""

import copy
import random
from collections.abc import Iterator
from functools import cache
from itertools import count, islice, pairwise
from pathlib import Path
from typing import cast

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from models.recipe import batches, begin, corpus, lessons, minilm, train, vocabulary
from models.recipe import tokenizer as bpe
from models.recipe.batches import answer_mask, collate, row
from models.recipe.centred import Centred
from models.recipe.copying import Layout
from models.recipe.crew import Crew, Tally
from models.recipe.export import load, save
from models.recipe.files import state_of
from models.recipe.guides import Aims, Guide, looks, readings
from models.recipe.lessons import Answers, Draft, Lesson, Saying, Source
from models.recipe.model import QUERIES, Layer, Llama, RMSNorm, Shape, attend
from models.recipe.pointing import BEGINS, GOES_ON
from models.recipe.swaps import Swaps
from models.recipe.tokenizer import ASSISTANT, CITES, DOCUMENTS, END, PAD, USER
from models.recipe.train import Plan, Training

TINY = Shape(bpe.VOCABULARY, hidden=96, inner=64, layers=3, heads=4, head_dim=32, theta=1e9)
NO_SWAPS = Swaps({}, {}, {}, set(), set())


@pytest.fixture(scope="module", autouse=True)
def of_words_at_random() -> Iterator[None]:
    """Meanings drawn at random in place of MiniLM's, which take long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minilm, "encode", lambda texts: drawn(len(texts), minilm.WIDTH))
        patch.setattr(begin, "meanings", meanings)
        yield


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def meanings(tokenizer: Tokenizer, size: int) -> Tensor:
    """A meaning for each word, with and without a space."""
    words = [name.removeprefix("Ġ").lower() for name in vocabulary.texts(tokenizer)]
    known = {word: i for i, word in enumerate(dict.fromkeys(words))}
    return drawn(len(known), size)[[known[word] for word in words]]


@cache
def begun_once(tokenizer: Tokenizer) -> Llama:
    torch.manual_seed(0)
    model = Llama(TINY)
    begin.draft(model, source(tokenizer))
    return model


def fresh(tokenizer: Tokenizer) -> Llama:
    return copy.deepcopy(begun_once(tokenizer))


def words(tokenizer: Tokenizer, *shape: int) -> Tensor:
    """Whole words at random, each with a space before it."""
    names = vocabulary.texts(tokenizer)
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
    rows = fresh(tokenizer).model.embed_tokens.weight
    ids = [tokenizer.token_to_id(t) for t in ("garden", "Ġgarden", "window")]
    apart = [(rows[ids[0]] != rows[other]).nonzero().flatten().tolist() for other in ids[1:]]
    assert apart[0] == [Layout.of(TINY).space]
    assert len(apart[1]) > 10


def test_no_two_tokens_have_one_code(tokenizer: Tokenizer) -> None:
    """But with a space and without: halves of letters neither, or no name with one is copied."""
    codes = vocabulary.codes(tokenizer, 9)
    known: dict[bytes, bytes] = {}
    for said, code in zip(vocabulary.spelled(tokenizer), codes, strict=True):
        if said:
            assert known.setdefault(code.numpy().tobytes(), said.strip(b" ")) == said.strip(b" ")
    assert b"\xc3" in known.values()


def test_a_fresh_draft_looks_for_what_followed(tokenizer: Tokenizer) -> None:
    model = fresh(tokenizer)
    tokens = words(tokenizer, 32, 60)
    tokens = torch.cat((tokens, tokens[:, :11]), 1)
    aims = Aims.of([[(70, [0])]] * 32, 71)
    with torch.no_grad():
        read = model.reads(tokens, TINY.layers - 1)[0]
        found = looks(model, TINY.layers - 1, read, aims, GOES_ON).argmax(1)
    assert (found == 11).float().mean() > 0.8


def test_every_feature_of_fresh_heads_can_be_learned(tokenizer: Tokenizer) -> None:
    """Where a query's and a key's are nothing, gradients are, too."""
    attention = cast(Layer, fresh(tokenizer).model.layers[-1]).self_attn
    for project in (attention.q_proj, attention.k_proj):
        assert project.weight.any(1).all()


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
    ids = [USER, 50, END, ASSISTANT, 60, END, USER, 51, END]
    ids += [*[DOCUMENTS, 70, END] * 2, USER, 51, END]
    ids += [ASSISTANT, 61, END]
    assert [i for i, said in zip(ids, answer_mask(ids), strict=True) if said] == [61, END]


def examples(seed: str) -> Iterator[corpus.Conversation]:
    return (corpus.example(random.Random(f"{seed}/{i}"), 0.5) for i in count())


def looked_up(number: int) -> Iterator[corpus.Conversation]:
    source = examples("1")
    return islice((made for made in source if made.skill in ("passages", "not_told")), number)


def test_the_guides_say_what_the_answer_does(tokenizer: Tokenizer) -> None:
    told = 0
    for made in looked_up(60):
        one = row(tokenizer, made, 4096)
        shown = readings(one.ids)
        assert len(shown) == len(made.documents)
        ((at, begins),) = one.guide.begins
        assert one.ids[at] == ASSISTANT
        assert one.guide.sources == [(at, sorted(one.guide.inside) or begins)]
        if not made.tells:
            assert begins == [reading.second for reading in shown]
            assert not one.guide.follows
            continue
        second = {i for reading in shown for i in range(reading.second, reading.stop)}
        assert second >= {*begins, *one.guide.inside}
        if one.guide.follows:
            told += 1
            first = tokenizer.id_to_token(one.ids[at + 1])
            assert {first, "Ġ" + first} >= {tokenizer.id_to_token(one.ids[to]) for to in begins}
            *middle, _, (place, cited) = one.guide.follows
            assert all({one.ids[i + 1]} == {one.ids[to] for to in tos} for i, tos in middle)
            assert tokenizer.id_to_token(one.ids[place + 1]) in CITES
            assert {one.ids[place + 1]} == {one.ids[to] for to in cited}
    assert told > 20


def test_pairs_are_told_where_they_stand_and_else_the_marker(tokenizer: Tokenizer) -> None:
    told = rests = 0
    for made in looked_up(40):
        one = row(tokenizer, made, 4096)
        words = [tokenizer.id_to_token(token).removeprefix("Ġ") for token in one.ids]
        before = list(pairwise(words))
        for at, places in one.guide.pairs:
            if one.ids[places[0]] == ASSISTANT:
                rests += 1
                assert before[at - 1] not in before[: at - 1]
            else:
                told += 1
                assert {before[place - 2] for place in places} == {before[at - 1]}
                assert {words[place] for place in places} == {words[at + 1]}
    assert told > 40
    assert rests > 40


def test_a_passage_is_read_twice_at_once_with_the_question_before_it(tokenizer: Tokenizer) -> None:
    made = next(made for made in looked_up(60) if len(made.documents) > 1)
    ids = row(tokenizer, made, 4096).ids
    question = tokenizer.encode(made.messages[-2]["content"], add_special_tokens=False).ids
    for number, one in enumerate(readings(ids), 1):
        assert ids[one.question : one.first] == [USER, *question, END]
        assert ids[one.first : one.second] == ids[one.second : one.stop]
        assert ids[one.first + 1] == tokenizer.token_to_id(f"[{number}]")


def test_swapped_words_keep_the_answer_and_the_places(tokenizer: Tokenizer) -> None:
    names = {name: i for i, name in enumerate(vocabulary.texts(tokenizer))}
    pair = {word: (names[word], names["Ġ" + word]) for word in ("garden", "window", "castle")}
    stems = {spaced: plain for plain, spaced in pair.values()}
    near = {pair["garden"][0]: [pair["window"][0]]}
    rest = names["ing"]
    swaps = Swaps(near, stems, {plain: spaced for spaced, plain in stems.items()}, {rest}, {rest})
    garden, window, castle = (pair[word][1] for word in pair)
    question = [USER, 300, garden, END]
    passage = [DOCUMENTS, 301, garden, castle, garden, rest, END]
    ids = [*question, *passage, *passage, *question, ASSISTANT, castle, END]
    seen = {tuple(swaps.swapped(ids, {7, 14}, random.Random(seed))) for seed in range(40)}
    other = [window if token == garden else token for token in ids]
    other[8] = other[15] = garden  # of a longer word
    assert seen == {tuple(ids), tuple(other)}


def lesson(tokenizer: Tokenizer) -> Draft:
    return Draft(fresh(tokenizer), vocabulary.movable(tokenizer))


def source(tokenizer: Tokenizer) -> Source:
    return Source(tokenizer, NO_SWAPS, "0", 4096)


def test_two_threads_find_the_gradient_of_one(tokenizer: Tokenizer) -> None:
    rows = [row(tokenizer, one, 4096) for one in islice(examples("0"), 6)]
    found = []
    for threads in (1, 2):
        crew = Crew(lesson(tokenizer), threads, half=False)
        crew.learn(rows, Tally())
        found.append([p.grad for p in crew.replicas[0].parameters()])
    torch.testing.assert_close(found[0], found[1], rtol=0.02, atol=1e-4)


def test_parts_are_of_like_length_and_bounded(tokenizer: Tokenizer) -> None:
    rows = [row(tokenizer, one, 4096) for one in islice(examples("0"), 40)]
    one = lesson(tokenizer)
    parts = list(one.parts(rows))
    assert sorted(map(id, rows)) == sorted(id(row) for part in parts for row in part)
    assert all(len(p) == 1 or len(p) * len(p[-1].ids) <= one.micro for p in parts)
    assert len(parts) < len(rows)


def test_the_pointing_head_learns_where_to_look(tokenizer: Tokenizer) -> None:
    one = lesson(tokenizer)
    rows = [made for made in (row(tokenizer, c, 4096) for c in looked_up(9)) if made.guide.tells]
    batch = collate(rows)
    late = TINY.layers - 1
    read = one.llama.reads(batch.inputs, late)[0]
    aims = Aims.of([made.guide.begins for made in rows], batch.inputs.shape[1])
    aims.missed(looks(one.llama, late, read, aims, BEGINS)).sum().backward()
    attention = cast(Layer, one.llama.model.layers[late]).self_attn
    grad = attention.q_proj.weight.grad
    assert grad is not None
    assert grad[attention.rows(BEGINS)].abs().sum() > 0
    assert grad[attention.rows(GOES_ON)].abs().sum() == 0


def test_where_heads_look_is_exact_in_bfloat16_too(tokenizer: Tokenizer) -> None:
    """Else what they are told moves all layers elsewhere than it says: of a stream as training has
    it, in bfloat16, scores and gradients are those of float32.
    """
    one, late = lesson(tokenizer), TINY.layers - 1
    rows = [made for made in (row(tokenizer, c, 4096) for c in looked_up(9)) if made.guide.tells]
    batch = collate(rows)
    read = one.llama.reads(batch.inputs, late)[0].detach().bfloat16()
    aims = Aims.of([made.guide.begins for made in rows], batch.inputs.shape[1])
    found = []
    for half in (False, True):
        one.zero_grad()
        own = (read if half else read.float()).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            scores = looks(one.llama, late, own, aims, BEGINS)
        aims.missed(scores).sum().backward()  # type: ignore[no-untyped-call]
        attention = cast(Layer, one.llama.model.layers[late]).self_attn
        found.append([scores, attention.q_proj.weight.grad, attention.k_proj.weight.grad])
    for exact, rounded in zip(*found, strict=True):
        assert exact is not None
        assert rounded is not None
        torch.testing.assert_close(rounded, exact, rtol=1e-5, atol=1e-5)


def test_telling_heads_that_compare_codes_moves_no_layer_before(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of hundreds would make of a head that looks wrong a gradient of thousands there."""
    rows = [made for made in (row(tokenizer, c, 4096) for c in looked_up(9)) if made.guide.follows]
    for made in rows:
        made.guide.begins, made.guide.sources = [], []
    one, moved = lesson(tokenizer), []
    for weight in (0.0, 1.0):
        monkeypatch.setattr(lessons, "POINTING", weight)
        one.zero_grad()
        one.lose(rows, half=False)[0].backward()  # type: ignore[no-untyped-call]
        grads = {name: p.grad.clone() for name, p in one.named_parameters() if p.grad is not None}
        moved.append(grads)
    told = {name for name, grad in moved[0].items() if not torch.equal(grad, moved[1][name])}
    last = f"llama.model.layers.{TINY.layers - 1}."
    names = (
        "input_layernorm.weight",
        *(f"self_attn.{p}_proj.{part}" for p in "qk" for part in ("weight", "bias")),
    )
    assert told == {last + name for name in names}


def begun(tokenizer: Tokenizer, pools: int, one: Lesson | None = None) -> Training:
    plan = Plan(pools, 1e-3, 1e-3, (0.5, 0.5))
    return Training(one or lesson(tokenizer), plan, source(tokenizer), 1, half=False)


def test_the_last_layer_learns_alone(tokenizer: Tokenizer) -> None:
    """Whatever the lesson before moved, and left of gradients."""
    moves, model = vocabulary.movable(tokenizer), fresh(tokenizer)
    model.model.embed_tokens.weight.sum().backward()  # type: ignore[no-untyped-call]
    training = begun(tokenizer, 1, Saying(model, moves))
    assert all(p.grad is None for p in model.parameters())
    training.crew.learn([row(tokenizer, c, 4096) for c in looked_up(3)], Tally())
    moved = {name for name, p in model.named_parameters() if p.grad is not None}
    assert moved
    assert all(name.startswith(("model.layers.2.", "model.norm.")) for name in moved)
    begun(tokenizer, 1, Answers(model, moves))
    assert all(p.requires_grad for p in model.parameters()), "the next lesson moves all"


def test_words_keep_what_they_mean(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "POOL", 24)
    training = begun(tokenizer, 2)
    rows = cast(Draft, training.lesson).llama.model.embed_tokens.weight
    before = rows.detach().clone()
    training.learn()
    moved = {tokenizer.id_to_token(int(i)) for i in (rows != before).any(1).nonzero().flatten()}
    assert {"<|assistant|>", "[1]", "Ġ1"} <= moved
    assert not moved & {"garden", "Ġthe", "Ġmanager"}


def test_a_resumed_training_ends_as_an_uninterrupted_one(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "POOL", 24)
    through, before, after = (begun(tokenizer, 2) for _ in range(3))
    for _ in range(2):
        through.learn()
    before.learn()
    before.save(tmp_path / "last.pt")
    after.restore(tmp_path / "last.pt")
    after.learn()
    assert after.done == through.done
    for a, b in zip(after.lesson.parameters(), through.lesson.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="another plan"):
        begun(tokenizer, 3).restore(tmp_path / "last.pt")
    whole = (tmp_path / "last.pt").read_bytes()
    for rest in (b"", whole[: len(whole) // 2]):
        (tmp_path / "cut.pt").write_bytes(rest)
        with pytest.raises(
            ValueError, match=r"cut\.pt cannot be read .*: if it is cut off, remove it"
        ):
            begun(tokenizer, 2).restore(tmp_path / "cut.pt")


@pytest.mark.parametrize("half", [False, True])
def test_a_training_says_when_it_goes_on_less_or_more_exactly(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str], half: bool
) -> None:
    path = tmp_path / "last.pt"
    before, after = begun(tokenizer, 2), begun(tokenizer, 2)
    before.save(path)
    after.restore(path)
    assert capsys.readouterr().out == ""
    before.half, after.half = half, not half
    before.save(path)
    after.restore(path)
    now, until_now = ("float32", "bfloat16") if half else ("bfloat16", "float32")
    told = capsys.readouterr().out
    assert told == f"goes on in {now}, which is faster here; until now it was {until_now}\n"


def poisoned(training: Training, norms: list[float]) -> None:
    """Lets each step have gradients of such a norm."""
    rest = iter(norms)

    def learn(rows: list[batches.Row], tally: Tally) -> None:
        parameters = list(training.lesson.parameters())
        size = next(rest) / sum(p.numel() for p in parameters) ** 0.5
        for p in parameters:
            p.grad = torch.full_like(p, size)

    training.crew.learn = learn  # type: ignore[method-assign]


@pytest.mark.parametrize("norm", [float("nan"), float("inf")])
def test_a_gradient_that_is_no_number_moves_nothing(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, norm: float
) -> None:
    monkeypatch.setattr(train, "POOL", 4)
    training = begun(tokenizer, 2)
    before = copy.deepcopy(training.lesson)
    poisoned(training, [norm])
    with pytest.raises(ArithmeticError, match=r"pool 1, after step 0: .* (nan|inf); .* stands"):
        training.learn()
    assert training.done == train.Progress()
    for a, b in zip(training.lesson.parameters(), before.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_training_whose_gradients_grow_wild_keeps_its_checkpoint(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for a single step, nor for how large they are before they have settled, nor as they fall.
    The norms before are the checkpoint's, too: a training that goes on knows them.
    """
    monkeypatch.setattr(train, "POOL", 48)
    monkeypatch.setattr(train, "SAVE_EVERY", 1)
    path, start = tmp_path / "last.pt", Training.__init__
    norms = [[9.0] * 3, [900.0] * 3, [80.0] * 3, [77.0, 9000.0, 77.0], [96.0] * 3, [330.0] * 3]

    def begins(training: Training, *given: object) -> None:
        start(training, *given)  # type: ignore[arg-type]
        monkeypatch.setattr(training, "_drawn", lambda _: [easy] * 48)
        poisoned(training, [norm for pool in norms for norm in pool])

    easy = row(tokenizer, next(looked_up(1)), 4096)
    monkeypatch.setattr(Centred, "measure", lambda *_: None)
    monkeypatch.setattr(Training, "__init__", begins)
    given = lesson(tokenizer), Plan(9, 0.0, 0.0, (0.5, 0.5)), source(tokenizer), path, 1, False
    with pytest.raises(ArithmeticError, match=r"pool 6, after step 18: .* from 80 to 330; nothing"):
        train.train(*given)
    norms = norms[5:]
    with pytest.raises(ArithmeticError, match=r"pool 6, after step 18: .* from 80 to 330; nothing"):
        train.train(*given)
    assert state_of(path)["done"]["pool"] == 5


def test_a_checkpoint_is_whole_or_as_it_was(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, path = begun(tokenizer, 2), tmp_path / "last.pt"
    training.save(path)
    before = path.read_bytes()

    def dies(_: object, file: Path) -> None:
        file.write_bytes(before[: len(before) // 2])
        raise OSError("no space is left")

    monkeypatch.setattr(torch, "save", dies)
    with pytest.raises(OSError, match="no space"):
        training.save(path)
    assert path.read_bytes() == before
    begun(tokenizer, 2).restore(path)


def test_a_pool_that_holds_no_fitting_example_says_so(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "POOL", 4)
    plan = Plan(1, 1e-3, 1e-3, (0.5, 0.5), longest=5)
    training = Training(lesson(tokenizer), plan, source(tokenizer), 1, half=False)
    with pytest.raises(ValueError, match="no example fits Draft of 0 to 3: 5 tokens at most"):
        training.learn()


def test_what_knows_english_moves_by_a_part_of_a_step(tokenizer: Tokenizer) -> None:
    moves = vocabulary.movable(tokenizer)

    def moved(lesson: Answers) -> tuple[Llama, Llama]:
        before = copy.deepcopy(lesson.llama)
        with lesson.easing(), torch.no_grad():
            for p in lesson.parameters():
                p.add_(1)
        return before, lesson.llama

    def far(pair: tuple[Llama, Llama], name: str) -> Tensor:
        before, after = (model.get_parameter(f"model.{name}") for model in pair)
        return ((after - before) * 100).round() / 100

    whole = Shape(bpe.VOCABULARY, 96, 64, layers=7, heads=4, head_dim=32, theta=1e9)
    pair = moved(Answers(Llama(whole), moves))
    for layer in (0, 1, 3, 5):
        attention, own = f"layers.{layer}.self_attn", 64 if layer > 1 else 0
        rows, columns = (
            far(pair, f"{attention}.k_proj.weight"),
            far(pair, f"{attention}.o_proj.weight"),
        )
        for x in (rows, columns.T, far(pair, f"{attention}.v_proj.bias")[:, None]):
            assert (x[:own] == 1).all()
            assert (x[own:] == lessons.KNOWN).all()
        for name in ("mlp.up_proj.weight", "input_layernorm.weight", "self_attn.o_proj.bias"):
            assert (far(pair, f"layers.{layer}.{name}") == lessons.KNOWN).all()
    for name in ("layers.6.self_attn.q_proj.weight", "norm.weight", "embed_tokens.weight"):
        assert (far(pair, name) == 1).all()
    assert (far(moved(Draft(Llama(TINY), moves)), "layers.0.mlp.up_proj.weight") == 1).all()


def test_a_training_eases_its_steps(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "POOL", 24)
    monkeypatch.setattr(lessons, "KNOWN", 0.0)
    model = fresh(tokenizer)
    before = copy.deepcopy(model)
    begun(tokenizer, 1, Answers(model, vocabulary.movable(tokenizer))).learn()
    for name, p in before.named_parameters():
        if "mlp" in name and "weight" in name:
            assert torch.equal(p, model.get_parameter(name)), name
    assert not torch.equal(before.model.norm.weight, model.model.norm.weight)


def test_rates_warm_up_and_fall() -> None:
    plan = Plan(10, 1.0, 2.0, (0, 1), warm_up=10, decay_from=0.5)
    assert plan.rates(0, 0) == (0.1, 0.2)
    assert plan.rates(50, 0.5) == (1, 2)
    assert plan.rates(90, 0.75) == (0.5, 1)
    assert plan.rates(99, 1.0) == (0.05, 0.1)


@pytest.mark.parametrize(("tiles", "products", "half"), [(1, 0, True), (0, 1, True), (0, 0, False)])
def test_a_cpu_multiplies_halves_where_it_has_products_of_them(
    monkeypatch: pytest.MonkeyPatch, tiles: bool, products: bool, half: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: bool(tiles))
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bool(products))
    assert train.halves() is half


def test_what_is_exported_loads_again(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = Llama(TINY)
    save(model, tokenizer, tmp_path)
    loaded, same = load(tmp_path)
    assert loaded.shape == model.shape
    assert same.to_str() == tokenizer.to_str()
    for a, b in zip(model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a.bfloat16().float(), b)
    modes = {path.stat().st_mode & 0o444 for path in tmp_path.iterdir()}
    assert modes == {0o444}, "whoever serves it may read it"

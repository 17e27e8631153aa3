"""Trials of decision 0029: what a reader finds, and what of it a causal Llama keeps.

`python -m models.recipe.reader fit READER.pt [--both-ways] [--twice] [--steps 96]` puts two rows of
weights on MiniLM's own layers, over our tokens, and fits all of it to tell where answers begin and
end. Its layers look back only, unless `--both-ways`. `--twice`: the passages stand there twice, the
second time at the same places, so that each of their tokens has seen all of them.

`python -m models.recipe.reader follow READER.pt LLAMA.pt [--twice] [--steps 200]` tells the demo
model's layers what the fitted layers say at each token, by gradients, from its first weights or
from where LLAMA.pt is, and prints what the same two rows find on top of it.

Both print, for questions on held-out documents: how often the likeliest beginning is in a sentence
that tells, is the answer's, and the likeliest end is too. They run in one thread, in bfloat16.
"""

import argparse
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from models.recipe import corpus
from models.recipe.batches import Row, answer_start, row
from models.recipe.distil import Distiller
from models.recipe.guides import INSIDE
from models.recipe.make import SHAPES, made_tokenizer
from models.recipe.minilm import WIDTH
from models.recipe.model import Llama, attend
from models.recipe.skills import passages
from models.recipe.swaps import Swaps
from models.recipe.teacher import UNKNOWN, Teacher, marker, spelled, unit
from models.recipe.tokenizer import DOCUMENTS, END

ROWS = 16  # questions of a step
MICRO = 2000  # tokens that go through the model at once
LONGEST = 500  # tokens with the passages twice: MiniLM has 512 places
PROGRESS = 0.2  # of the corpus
TESTS = 240  # questions, each on two held-out documents
WARM_UP = 10  # steps


@dataclass
class Asked:
    """A question over passages, up to where its answer begins."""

    ids: list[int]
    block: tuple[int, int]  # of the passages: their marker, and what is behind their end
    inside: list[int]  # the passages' tokens
    firsts: list[int]  # where an answer begins; nowhere if it is not told
    lasts: list[int]
    sentences: list[tuple[int, int]]  # first token, last
    again: int = 0  # how far behind its first copy each token of the second is

    @classmethod
    def of(cls, made: Row) -> "Asked":
        ids, guide = made.ids, made.guide
        begin = ids.index(DOCUMENTS)
        return cls(
            ids[: answer_start(ids)],
            (begin, ids.index(END, begin) + 1),
            [at for at, output, _ in guide.guesses if output == INSIDE],
            guide.firsts[0][1] if guide.firsts else [],
            guide.lasts[0][1] if guide.lasts else [],
            guide.sentences[:-2],
        )

    def twice(self) -> "Asked":
        """With the passages a second time; all that is told is told of these."""
        begin, end = self.block
        n = end - begin
        return Asked(
            self.ids[:end] + self.ids[begin:],
            (end, end + n),
            [at + n for at in self.inside],
            [at + n for at in self.firsts],
            [at + n for at in self.lasts],
            [(first + n, last + n) for first, last in self.sentences],
            n,
        )


def questions(tokenizer: Tokenizer, swaps: Swaps) -> Iterator[Asked]:
    """Those of the training."""
    number = 0
    while True:
        made = corpus.looked_up(random.Random(f"reader/{number}"), PROGRESS)
        yield from _short(row(tokenizer, made, LONGEST, swaps))
        number += 1


def tests(tokenizer: Tokenizer) -> list[Asked]:
    """Held-out ones, all of them told."""
    found: list[Asked] = []
    number = 0
    while len(found) < TESTS:
        rng = random.Random(f"reader/held-out/{number}")
        made = passages.looked_up(rng, 2, True, held_out=True, relations=0)
        found += [one for one in _short(row(tokenizer, made, LONGEST)) if one.firsts]
        number += 1
    return found


def _short(made: Row) -> Iterator[Asked]:
    if made.guide.guesses:
        asked = Asked.of(made)
        if len(asked.twice().ids) <= LONGEST:
            yield asked


@dataclass
class Rows:
    """Some questions as tensors."""

    ids: Tensor  # (rows, tokens)
    places: Tensor  # … of MiniLM's
    real: Tensor  # … no padding
    open: Tensor  # (rows, 2, tokens) where an answer may begin and end, or the passages' marker
    aims: Tensor  # … and where it does: at the marker if it is not told

    @classmethod
    def of(cls, some: list[Asked]) -> "Rows":
        width = -(-max(len(one.ids) for one in some) // 16) * 16
        shape = len(some), 2, width
        made = cls(
            torch.zeros(len(some), width).long(),
            torch.arange(width).repeat(len(some), 1),
            torch.zeros(len(some), width).bool(),
            torch.zeros(shape).bool(),
            torch.zeros(shape).bool(),
        )
        for i, one in enumerate(some):
            n, mark = len(one.ids), one.block[0]
            made.ids[i, :n], made.real[i, :n] = torch.tensor(one.ids), True
            made.places[i, mark:] -= one.again
            made.open[i, :, [*one.inside, mark]] = True
            for edge, aims in enumerate((one.firsts, one.lasts)):
                made.aims[i, edge, aims or [mark]] = True
        return made


def micro(some: list[Asked]) -> Iterator[list[Asked]]:
    """Parts of up to about `MICRO` tokens, of like length."""
    part: list[Asked] = []
    for one in sorted(some, key=lambda one: len(one.ids)):
        if part and (len(part) + 1) * len(one.ids) > MICRO:
            yield part
            part = []
        part.append(one)
    yield part


class Exact(nn.Module):
    """MiniLM's layers over our tokens: norms behind each sum, a row for each place, GELU."""

    one: Tensor
    none: Tensor

    def __init__(self, tokenizer: Tokenizer, causal: bool = True) -> None:
        super().__init__()
        teacher = Teacher()
        self.causal = causal
        self.words = nn.Embedding.from_pretrained(rows_of(tokenizer, teacher))
        self.before = teacher.net.embeddings
        self.before.word_embeddings = None  # ours are in its place
        self.layers = teacher.net.encoder.layer
        self.edges = nn.Linear(WIDTH, 2)
        nn.init.normal_(self.edges.weight, std=0.02)
        for name, value in (("one", torch.ones(LONGEST + 16, 16)), ("none", torch.zeros(516, 16))):
            self.register_buffer(name, value, persistent=False)

    def said(self, rows: Rows) -> list[Tensor]:
        """What each layer makes: (rows, tokens, WIDTH), of unit variance, before the gain."""
        e, tokens = self.before, rows.ids.shape[1]
        places = e.position_embeddings.weight[rows.places.clamp(max=511)]
        x = e.LayerNorm(self.words(rows.ids) + places + e.token_type_embeddings.weight[0])
        found = []
        for layer in self.layers:
            a, out = layer.attention.self, layer.attention.output
            q, k, v = (p(x).unflatten(-1, (12, 32)) for p in (a.query, a.key, a.value))
            if self.causal:  # turned by nothing
                tables = self.one[:tokens].to(q.dtype), self.none[:tokens].to(q.dtype)
                brought = attend(q, k, v, *tables).flatten(2)
            else:
                scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 32**-0.5
                scores = scores.masked_fill(~rows.real[:, None, None], -1e4)
                brought = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1).to(v.dtype), v)
                brought = brought.flatten(2)
            x = out.LayerNorm((x + out.dense(brought)).float())
            found.append(
                unit((x + layer.output.dense(F.gelu(layer.intermediate.dense(x)))).float())
            )
            x = self._gained(found[-1], layer)
        return found

    def _gained(self, x: Tensor, layer: Any) -> Tensor:
        norm = layer.output.LayerNorm
        out: Tensor = x * norm.weight + norm.bias
        return out

    def found(self, last: Tensor) -> Tensor:
        """(rows, 2, tokens) scores of beginnings and ends, from what the last layer makes."""
        scores: Tensor = self.edges(unit(self._gained(last.float(), self.layers[-1])))
        return scores.transpose(1, 2)

    def forward(self, rows: Rows) -> Tensor:
        return self.found(self.said(rows)[-1])


def rows_of(tokenizer: Tokenizer, teacher: Teacher) -> Tensor:
    """(vocab, WIDTH) the mean of MiniLM's rows for the text of each of our tokens."""
    known, table = teacher.wordpiece.get_vocab(), teacher.net.embeddings.word_embeddings.weight
    made = []
    for token, name in enumerate(spelled(tokenizer)):
        word, mark = name.decode(errors="replace"), marker(token)
        ids = teacher.wordpiece.encode(word, add_special_tokens=False).ids
        blank = known["." if "\n" in word else ","]
        ids = [i for i in ids if i != UNKNOWN] or [blank if mark is None else mark]
        if mark is None and word.isalpha() and word.islower() and "##" + word in known:
            ids = [known["##" + word]]
        made.append(table[ids].mean(0))
    return torch.stack(made).detach()


def streams(model: Llama, ids: Tensor) -> list[Tensor]:
    """What the demo model's layers say where MiniLM's do: of unit variance."""
    seen = model.seen(ids, *range(1, model.shape.layers))[1:]
    return [unit(x[..., :WIDTH].float()) for x in seen]


def missed(scores: Tensor, rows: Rows) -> Tensor:
    """The sum of both edges' losses, the mean over rows."""
    scores = scores.masked_fill(~rows.open, -1e9)
    right = scores.masked_fill(~rows.aims, -1e9).logsumexp(-1)
    return (scores.logsumexp(-1) - right).sum(1).mean()


@torch.no_grad()
def measure(read: Callable[[Rows], Tensor], some: list[Asked]) -> str:
    """What a reader finds of questions that are told."""
    sentence = first = both = 0
    for part in micro(some):
        rows = Rows.of(part)
        with torch.autocast("cpu", torch.bfloat16):
            scores = read(rows).float().masked_fill(~rows.open, -1e9)
        for i, one in enumerate(part):
            scores[i, :, one.block[0]] = -1e9
            begin, end = scores[i].argmax(-1).tolist()
            here = [a for a, b in one.sentences if a <= begin <= b]
            there = [a for a, b in one.sentences for at in one.firsts if a <= at <= b]
            sentence += bool(set(here) & set(there))
            first += begin in one.firsts
            both += begin in one.firsts and end in one.lasts
    shares = (100 * n / len(some) for n in (sentence, first, both))
    return "sentence {:.1f} %, first token {:.1f} %, both ends {:.1f} %".format(*shares)


class Loop:
    """Steps of a fit."""

    def __init__(self, some: Iterator[Asked], parameters: list[nn.Parameter], rate: float) -> None:
        self.some, self.rate, self.parameters = some, rate, parameters
        self.optimizer = torch.optim.AdamW(parameters, rate, betas=(0.9, 0.98), weight_decay=0.0)

    def run(self, steps: int, loss: Callable[[Rows], Tensor]) -> None:
        began, tokens, lately = time.process_time(), 0, 0.0
        for step in range(steps):
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate * min(1.0, (step + 1) / WARM_UP)
            total = 0.0
            for part in micro([next(self.some) for _ in range(ROWS)]):
                rows = Rows.of(part)
                with torch.autocast("cpu", torch.bfloat16):
                    lost = loss(rows) * len(part) / ROWS
                lost.backward()
                total += lost.item()
                tokens += rows.ids.numel()
            nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            lately = 0.9 * lately + 0.1 * total if step else total
            if step % 16 == 15:
                speed = tokens / (time.process_time() - began)
                print(f"step {step + 1} loss {lately:.3f}, {speed:.0f} tokens/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["fit", "follow"])
    parser.add_argument("reader", type=Path)
    parser.add_argument("llama", type=Path, nargs="?", default=Path("build/model/followed.pt"))
    parser.add_argument("--both-ways", action="store_true")
    parser.add_argument("--twice", action="store_true")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--tokenizer", type=Path, default=Path("build/model/tokenizer.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = made_tokenizer(options.tokenizer)
    some, held_out = questions(tokenizer, Swaps.of(tokenizer)), tests(tokenizer)
    if options.twice:
        some, held_out = (one.twice() for one in some), [one.twice() for one in held_out]
    exact = Exact(tokenizer, not options.both_ways)
    if options.what == "fit":
        exact.words.requires_grad_(False)
        loop = Loop(some, [p for p in exact.parameters() if p.requires_grad], 2e-4)
        loop.run(options.steps or 96, lambda rows: missed(exact(rows), rows))
        print(measure(exact, held_out))
        torch.save(exact.state_dict(), options.reader)
        return
    exact.load_state_dict(torch.load(options.reader))
    model = Llama(SHAPES["demo"])
    if options.llama.exists():
        model.load_state_dict(torch.load(options.llama))
    else:
        Distiller.of(tokenizer).begin(model, tokenizer, 0)

    def unlike(rows: Rows) -> Tensor:
        with torch.no_grad():
            wanted = exact.said(rows)
        pairs = zip(streams(model, rows.ids), wanted, strict=True)
        alike = torch.stack([F.cosine_similarity(a, b, dim=-1)[rows.real].mean() for a, b in pairs])
        return (1 - alike).sum()

    inner = [p for layer in list(model.model.layers)[:-1] for p in layer.parameters()]
    Loop(some, inner, 1e-3).run(options.steps or 200, unlike)
    torch.save(model.state_dict(), options.llama)
    print("reader:", measure(exact, held_out))
    print("Llama: ", measure(lambda rows: exact.found(streams(model, rows.ids)[-1]), held_out))


if __name__ == "__main__":
    main()

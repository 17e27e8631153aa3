"""The training loop: warm-up, a stable stretch, a linear decay; resumable between pools.

The schedule is that of MiniCPM (Hu et al., 2024): rates stay high for most of the training, so that
a training may be made longer before they fall.
"""

import copy
import fcntl
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from models.recipe import start
from models.recipe.batches import Batch, pool, steps
from models.recipe.distil import Distiller
from models.recipe.guides import FINDING, GUESSING, POINTING, READING, Guides
from models.recipe.layers import keep_codes, point
from models.recipe.model import Llama, Shape
from models.recipe.optim import gentle, optimizers, set_rates
from models.recipe.swaps import Swaps

SAVE_EVERY = 2  # pools
MIXED = 0.5  # how far the corpus is (`corpus.py`) while layers are told: texts of all kinds


@dataclass(frozen=True)
class Plan:
    """How long and how fast."""

    pools: int  # of examples (see `batches.POOL`)
    seed: int = 0
    step_tokens: int = 4608  # of an optimizer step, about
    late_tokens: int = 8192  # the same once the rates decay
    micro_tokens: int = 1152  # that a thread takes through the model at once, about
    layer_rate: float = 0.0025  # Muon's; MiniLM's layers take AdamW's (`optim.gentle`)
    adam_rate: float = 1e-3
    warm_up: int = 40  # steps, of each lesson
    decay_from: float = 0.7  # share of the training
    distilled: int = 0  # pools at first in which the layers are told alone (`distil.py`)
    distilling_tokens: int = 2304  # of a step in these
    held: int = 3000  # steps for which the heads of the first weights stay as they are

    def progress(self, pool: int) -> float:
        """From 0 to 1: how far the training on answers is."""
        return max(0, pool - self.distilled) / (self.pools - self.distilled)

    def rates(self, step: int, progress: float) -> tuple[float, float]:
        """The rates of the layers' optimizer and of the others'."""
        late = max(0.0, progress - self.decay_from) / (1 - self.decay_from)
        factor = min(1.0, (step + 1) / self.warm_up) * max(0.02, 1 - late)
        return self.layer_rate * factor, self.adam_rate * factor


class Learner(nn.Module):
    """A model and what guides its training."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.llama = Llama(shape)
        self.guides = Guides(shape.hidden)

    def losses(
        self, batch: Batch, half: bool
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Of the answers' tokens, in order: losses and whether each was the likeliest; and the
        guides' losses. `half`: in bfloat16 where that is exact enough.
        """
        picked = batch.weights > 0
        with torch.autocast(batch.inputs.device.type, torch.bfloat16, enabled=half):
            states, before, read = self.llama.seen(
                batch.inputs, start.finds(self.llama.shape), start.points(self.llama.shape)
            )
            scores = self.llama.logits(states[picked]).float()
            zero = scores.new_zeros(())
            guided = (
                (zero, zero, zero, zero)
                if batch.guided.empty
                else self.guides.losses(self.llama, before, read, batch.guided)
            )
        targets = batch.targets[picked]
        losses = F.cross_entropy(scores, targets, reduction="none")
        return losses, scores.detach().argmax(-1) == targets, guided


class Tally:
    """Loss and share of exact examples, by skill, since the last report."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])
        self.guides = [0.0] * 5  # guesses, pointers, reader, finds; rows
        self.missed: list[Tensor] = []  # of the distillation, by layer
        self.lock = Lock()

    def add(self, batch: Batch, losses: Tensor, right: Tensor) -> None:
        """`losses` and `right` hold one entry for each weighted target, in order."""
        picked = batch.weights > 0
        rows = torch.arange(len(batch.skills))[:, None].expand_as(picked)[picked]
        for i, skill in enumerate(batch.skills):
            mine = rows == i
            sums = losses[mine].sum().item(), mine.sum().item(), right[mine].all().item(), 1
            with self.lock:
                self.sums[skill] = [a + b for a, b in zip(self.sums[skill], sums, strict=True)]

    def add_guides(self, batch: Batch, *losses: float) -> None:
        """`losses`: of the guesses, the pointers, the reader, the finds."""
        parts = *losses, len(batch.guided.rows.unique())
        with self.lock:
            self.guides = [a + b for a, b in zip(self.guides, parts, strict=True)]

    def __str__(self) -> str:
        if self.missed:
            likes = 1 - torch.stack(self.missed).mean(0)
            return "like MiniLM " + " ".join(f"{like:.3f}" for like in likes.tolist())
        parts = [
            f"{s} {e[0] / max(1, e[1]):.3f}/{100 * e[2] / e[3]:.0f}% of {e[3]:.0f}"
            for s, e in sorted(self.sums.items())
        ]
        guessing, pointing, reading, finding, rows = self.guides
        rows = max(1, rows)
        said = f"guesses {guessing / rows:.2f} finds {finding / rows:.2f}"
        said += f" pointers {pointing / rows:.2f} reads {reading / rows:.2f}"
        return f"{said} | " + ", ".join(parts)


class Crew:
    """Threads that share the weights of one model and do a step's micro-batches side by side.

    Each has gradients of its own, summed at the end of the step. On a CPU this beats handing
    every small operation to all cores, the more so when the machine has other work: the threads
    meet once a step.
    """

    def __init__(self, model: Learner, threads: int, half: bool) -> None:
        self.half = half
        self.replicas = [model, *(copy.deepcopy(model) for _ in range(threads - 1))]
        for replica in self.replicas[1:]:
            for mine, shared in zip(replica.parameters(), model.parameters(), strict=True):
                mine.data = shared.data
        # PyTorch's own number of threads is set thread by thread.
        self.threads = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))

    def learn(self, group: list[Batch], tally: Tally, distiller: Distiller | None = None) -> None:
        """Leaves the gradient of one step in the model's parameters. `distiller`: in the first
        stage, what tells.
        """
        weights = sum(batch.weights.sum().item() for batch in group)
        tokens = sum(batch.inputs.numel() for batch in group)
        shares = _dealt(group, len(self.replicas))

        def work(replica: Learner, share: list[Batch]) -> None:
            for batch in share:
                if distiller:
                    _follow(replica, batch, tokens, distiller, tally)
                else:
                    _learn(replica, batch, weights, self.half, tally)

        list(self.threads.map(work, self.replicas, shares))
        for replica in self.replicas[1:]:
            for shared, mine in zip(
                self.replicas[0].parameters(), replica.parameters(), strict=True
            ):
                if mine.grad is not None:
                    shared.grad = mine.grad if shared.grad is None else shared.grad.add_(mine.grad)
                    mine.grad = None


def _dealt(group: list[Batch], hands: int) -> list[list[Batch]]:
    """The micro-batches in `hands` shares of like size, the same each time."""
    shares: list[list[Batch]] = [[] for _ in range(hands)]
    for batch in sorted(group, key=lambda batch: -batch.inputs.numel()):
        min(shares, key=lambda share: sum(b.inputs.numel() for b in share)).append(batch)
    return shares


def _learn(learner: Learner, batch: Batch, total: float, half: bool, tally: Tally) -> None:
    """Adds a micro-batch's part of the gradient of a step of `total` weight."""
    moved = batch.to(next(learner.parameters()).device)
    losses, right, guided = learner.losses(moved, half)
    guessing, pointing, reading, finding = guided
    weighed = (losses * moved.weights[moved.weights > 0]).sum()
    guides = GUESSING * guessing + POINTING * pointing + READING * reading + FINDING * finding
    (weighed + guides).div(total).backward()
    tally.add(batch, losses.detach().cpu(), right.cpu())
    tally.add_guides(batch, *(loss.item() for loss in guided))


def _follow(
    learner: Learner, batch: Batch, total: float, distiller: Distiller, tally: Tally
) -> None:
    """Adds a micro-batch's part of the gradient of a distilling step of `total` tokens."""
    missed = distiller.missed(learner.llama, batch.inputs)
    (missed.sum() * batch.inputs.numel() / total).backward()
    with tally.lock:
        tally.missed.append(missed.detach())


@dataclass
class Progress:
    """How far a training is."""

    pool: int = 0
    step: int = 0
    tokens: int = 0  # read, padding included
    began: int = 0  # the step with which the present lesson began


def halves(device: str) -> bool:
    """Whether bfloat16 is faster there than float32: on a CPU only where it has products of it.
    With AVX-512 alone it takes 1.5 times as long, with AVX2 seven times; with AVX-512's own
    products half as long, those of attention a sixth.
    """
    cpu = torch.cpu
    return device != "cpu" or cpu._is_amx_tile_supported() or cpu._is_avx512_bf16_supported()


class Training:
    """A model, its optimizers and how far they are; kept in one file between pools."""

    def __init__(
        self,
        shape: Shape,
        plan: Plan,
        tokenizer: Tokenizer,
        swaps: Swaps,
        device: str,
        threads: int,
    ) -> None:
        """`begin` or `restore` comes next."""
        self.shape, self.plan, self.device = shape, plan, device
        self.tokenizer, self.swaps = tokenizer, swaps
        torch.manual_seed(plan.seed)
        self.learner = Learner(shape).to(device)
        self.crew = Crew(self.learner, threads, halves(device))
        rates = plan.layer_rate, plan.adam_rate
        self.optimizers = (
            gentle(self.learner, self.learner.llama.model.layers[:-1], *rates)
            if shape.biased
            else optimizers(self.learner, self.crew.threads, *rates, self.crew.half)
        )
        self.movable = start.movable(tokenizer).to(device).float()[:, None]
        self.distiller = Distiller.of(tokenizer) if shape.biased else None
        self.done = Progress()

    def begin(self) -> None:
        """Writes the first weights."""
        torch.manual_seed(self.plan.seed)
        fresh = Llama(self.shape)
        if self.distiller:
            self.distiller.begin(fresh, self.tokenizer, self.plan.seed)
        else:
            start.prepare(fresh, self.tokenizer)
        self.learner.llama.load_state_dict(fresh.state_dict())
        self._keep()

    def _keep(self) -> None:
        """Remembers the written heads."""
        heads = start.written(self.shape)
        self.kept = [
            weight.clone() for head in heads for weight in head.weights(self.learner.llama)
        ]

    def _hold(self) -> None:
        """Puts the written heads back as they were."""
        heads = start.written(self.shape)
        now = (weight for head in heads for weight in head.weights(self.learner.llama))
        for weight, before in zip(now, self.kept, strict=True):
            weight.copy_(before)

    def restore(self, path: Path) -> None:
        """Goes on from a file of `save`, whose plan may have been a shorter or a longer one.

        Raises ValueError if it is of another shape.
        """
        saved = torch.load(path, map_location=self.device, weights_only=True)
        if saved["shape"] != asdict(self.shape):
            raise ValueError(f"{path} is of another shape: remove it to begin anew")
        self.learner.load_state_dict(saved["model"])
        self._keep()
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.done = Progress(**saved["done"])

    def save(self, path: Path) -> None:
        """Writes a file that is whole or not there."""
        state: dict[str, Any] = {
            "shape": asdict(self.shape),
            "plan": asdict(self.plan),
            "model": self.learner.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "done": asdict(self.done),
        }
        partial = path.with_suffix(".tmp")
        torch.save(state, partial)
        partial.replace(path)

    def learn(self) -> Tally:
        """One pool of examples."""
        done, plan = self.done, self.plan
        distiller = self.distiller if done.pool < plan.distilled else None
        progress = plan.progress(done.pool)
        size = plan.step_tokens if progress < plan.decay_from else plan.late_tokens
        size = plan.distilling_tokens if distiller else size
        if done.pool == plan.distilled:  # another lesson: what moved by the last one stands still
            done.began = done.step
            for optimizer in self.optimizers:
                optimizer.state.clear()
        tally = Tally()
        batches = pool(
            self.tokenizer,
            self.swaps,
            plan.seed,
            done.pool,
            MIXED if distiller else progress,
            plan.micro_tokens,
            self.shape.context,
        )
        if self.distiller and done.pool == plan.distilled:  # the stream has grown by then
            point(self.learner.llama, batches[0].inputs)
        embedding = self.learner.llama.model.embed_tokens.weight
        for group in steps(batches, size):
            set_rates(self.optimizers, plan.rates(done.step - done.began, progress))
            self.crew.learn(group, tally, distiller)
            assert embedding.grad is not None
            if not distiller:
                embedding.grad.mul_(self.movable)  # words keep what they mean
            if self.distiller:
                keep_codes(self.learner.llama)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if done.step < plan.held:
                self._hold()
            done.step += 1
            done.tokens += sum(batch.inputs.numel() for batch in group)
        done.pool += 1
        return tally


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keeps a second training out of a run's folder. Raises BlockingIOError if one is there."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(f"another training runs in {folder}") from None
        yield


def train(
    shape: Shape, plan: Plan, tokenizer: Tokenizer, folder: Path, device: str, threads: int
) -> Llama:
    """Trains, or goes on from the checkpoint in `folder`; writes one there every few pools.

    The result depends on the arguments alone, but for the rounding of other hardware and of
    another number of threads. Raises ValueError if the checkpoint is of another shape,
    BlockingIOError if another training runs in the folder.
    """
    with alone(folder):
        path = folder / "last.pt"
        training = Training(shape, plan, tokenizer, Swaps.of(tokenizer), device, threads)
        if path.exists():
            training.restore(path)
        else:
            training.begin()
        done, model = training.done, training.learner.llama
        parameters = sum(p.numel() for p in model.parameters())
        print(f"{parameters:,} parameters, pool {done.pool} of {plan.pools}", flush=True)
        started, first = time.time(), done.tokens
        while done.pool < plan.pools:
            tally = training.learn()
            speed = (done.tokens - first) / (time.time() - started)
            print(
                f"{time.strftime('%H:%M:%S')} pool {done.pool}/{plan.pools} step {done.step} "
                f"{done.tokens / 1e6:.2f}M tokens {speed:.0f}/s | {tally}",
                flush=True,
            )
            if done.pool % SAVE_EVERY == 0 or done.pool == plan.pools:
                training.save(path)
        return model

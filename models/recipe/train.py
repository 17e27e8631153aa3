"""The training loop: warm-up, a stable stretch, a linear decay; resumable between pools.

The schedule is that of MiniCPM (Hu et al., 2024): rates stay high for most of the training.
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

from models.recipe import start
from models.recipe.batches import Batch, pool, steps
from models.recipe.model import Llama, Shape
from models.recipe.optim import optimizers, set_rates
from models.recipe.tokenizer import CITES, USER

SAVE_EVERY = 2  # pools


@dataclass(frozen=True)
class Plan:
    """How long and how fast."""

    pools: int  # of examples (see `batches.POOL`)
    seed: int = 0
    step_tokens: int = 4096  # of an optimizer step, about
    late_tokens: int = 8192  # the same once the rates decay
    micro_tokens: int = 2304  # that a thread takes through the model at once, about
    muon_rate: float = 0.007
    adam_rate: float = 1e-3
    warm_up: int = 40  # steps
    decay_from: float = 0.6  # share of the training

    def rates(self, step: int, progress: float) -> tuple[float, float]:
        """The rates of Muon and of AdamW."""
        late = max(0.0, progress - self.decay_from) / (1 - self.decay_from)
        factor = min(1.0, (step + 1) / self.warm_up) * max(0.02, 1 - late)
        return self.muon_rate * factor, self.adam_rate * factor


class Tally:
    """Loss and exactness of answers, by skill, since the last report."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        self.lock = Lock()

    def add(self, batch: Batch, losses: torch.Tensor, right: torch.Tensor) -> None:
        """`losses` and `right` hold one entry for each weighted target, in order."""
        rows = torch.arange(len(batch.skills))[:, None].expand_as(batch.weights)[batch.weights > 0]
        said = batch.answers[batch.weights > 0]
        for i, skill in enumerate(batch.skills):
            mine = said & (rows == i)
            sums = losses[mine].sum().item(), right[mine].sum().item(), mine.sum().item()
            with self.lock:
                self.sums[skill] = [a + b for a, b in zip(self.sums[skill], sums, strict=True)]

    def __str__(self) -> str:
        parts = [
            f"{s} {e[0] / e[2]:.3f}/{100 * e[1] / e[2]:.1f}%"
            for s, e in sorted(self.sums.items())
            if e[2]
        ]
        return " ".join(parts)


class Crew:
    """Threads that share the weights of one model and do a step's micro-batches side by side.

    Each has gradients of its own, summed at the end of the step. On a CPU this beats handing
    every small operation to all cores, the more so when the machine has other work: the threads
    meet once a step.
    """

    def __init__(self, model: Llama, threads: int, half: bool) -> None:
        """`half`: in bfloat16 where that is exact enough."""
        self.half = half
        self.replicas = [model, *(copy.deepcopy(model) for _ in range(threads - 1))]
        for replica in self.replicas[1:]:
            for mine, shared in zip(replica.parameters(), model.parameters(), strict=True):
                mine.data = shared.data
        # PyTorch's own number of threads is set thread by thread.
        self.threads = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))

    def learn(self, group: list[Batch], tally: Tally) -> None:
        """Leaves the gradient of one step in the model's parameters."""
        total = sum(batch.weights.sum().item() for batch in group)
        shares = _dealt(group, len(self.replicas))
        list(
            self.threads.map(
                lambda replica, share: _work(replica, share, total, self.half, tally),
                self.replicas,
                shares,
            )
        )
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


def _work(model: Llama, share: list[Batch], total: float, half: bool, tally: Tally) -> None:
    """Adds the micro-batches' part of the gradient of the step's mean loss."""
    device = next(model.parameters()).device
    for batch in share:
        picked = (batch.weights > 0).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            states = model.hidden(batch.inputs.to(device))[picked]
            scores = model.logits(states).float()
        targets = batch.targets.to(device)[picked]
        losses = F.cross_entropy(scores, targets, reduction="none")
        (losses * batch.weights.to(device)[picked]).sum().div(total).backward()
        tally.add(batch, losses.detach().cpu(), (scores.detach().argmax(-1) == targets).cpu())


def halves(device: str) -> bool:
    """Whether bfloat16 is faster there than float32: on a CPU only where it has tiles for it. With
    AVX-512 alone it takes 1.25 times as long, with AVX2 seven times.
    """
    return device != "cpu" or torch.cpu._is_amx_tile_supported()


@dataclass
class Progress:
    """How far a training is."""

    pool: int = 0
    step: int = 0
    tokens: int = 0  # read, padding included


class Training:
    """A model, its optimizers and how far they are; kept in one file between pools."""

    def __init__(
        self, shape: Shape, plan: Plan, marks: list[int], device: str, threads: int
    ) -> None:
        """`marks` are the tokens that begin a part of the text (see `start.prepare`)."""
        torch.manual_seed(plan.seed)
        self.shape, self.plan, self.device = shape, plan, device
        self.model = Llama(shape)
        start.prepare(self.model, marks)
        self.model.to(device)
        half = halves(device)
        self.crew = Crew(self.model, threads, half)
        rates = plan.muon_rate, plan.adam_rate
        self.optimizers = optimizers(self.model, self.crew.threads, *rates, half)
        self.done = Progress()

    def restore(self, path: Path) -> None:
        """Goes on from a file of `save`. Raises ValueError if that is of another shape or plan."""
        saved = torch.load(path, map_location=self.device, weights_only=True)
        if (saved["shape"], saved["plan"]) != (asdict(self.shape), asdict(self.plan)):
            raise ValueError(f"{path} is of another shape or plan: remove it to begin anew")
        self.model.load_state_dict(saved["model"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.done = Progress(**saved["done"])

    def save(self, path: Path) -> None:
        """Writes a file that is whole or not there."""
        state: dict[str, Any] = {
            "shape": asdict(self.shape),
            "plan": asdict(self.plan),
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "done": asdict(self.done),
        }
        partial = path.with_suffix(".tmp")
        torch.save(state, partial)
        partial.replace(path)

    def learn(self, tokenizer: Tokenizer) -> Tally:
        """One pool of examples."""
        done, plan = self.done, self.plan
        progress = done.pool / plan.pools
        size = plan.step_tokens if progress < plan.decay_from else plan.late_tokens
        tally = Tally()
        batches = pool(
            tokenizer, plan.seed, done.pool, progress, plan.micro_tokens, self.shape.context
        )
        for group in steps(batches, size):
            set_rates(self.optimizers, plan.rates(done.step, progress))
            self.crew.learn(group, tally)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
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
    another number of threads. Raises ValueError if the checkpoint is of another shape or plan,
    BlockingIOError if another training runs in the folder.
    """
    with alone(folder):
        return _train(shape, plan, tokenizer, folder / "last.pt", device, threads)


def _train(
    shape: Shape, plan: Plan, tokenizer: Tokenizer, path: Path, device: str, threads: int
) -> Llama:
    marks = [USER, *tokenizer.encode("".join(CITES)).ids]
    training = Training(shape, plan, marks, device, threads)
    if path.exists():
        training.restore(path)
    done, model = training.done, training.model
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters, pool {done.pool} of {plan.pools}", flush=True)
    started, first = time.time(), done.tokens
    while done.pool < plan.pools:
        tally = training.learn(tokenizer)
        speed = (done.tokens - first) / (time.time() - started)
        print(
            f"{time.strftime('%H:%M:%S')} pool {done.pool}/{plan.pools} step {done.step} "
            f"{done.tokens / 1e6:.2f}M tokens {speed:.0f}/s | {tally}",
            flush=True,
        )
        if done.pool % SAVE_EVERY == 0 or done.pool == plan.pools:
            training.save(path)
    return model

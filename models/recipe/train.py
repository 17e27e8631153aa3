"""The training loop: warm-up, a stable stretch, a linear decay; resumable between pools."""

import copy
import time
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Plan:
    """How long and how fast. `pools` counts pools of examples (see `batches.POOL`)."""

    pools: int
    seed: int = 0
    step_tokens: int = 4096
    late_tokens: int = 8192
    micro_tokens: int = 2304
    muon_rate: float = 0.01
    adam_rate: float = 1e-3
    warm_up: int = 40  # steps
    decay_from: float = 0.7  # share of the training

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
    """Threads that share the weights of one model and work off a step's micro-batches side by side.

    Each has gradients of its own, summed at the end of the step. On a CPU this beats handing
    every small operation to all cores, the more so when the machine has other work: the threads
    meet once a step.
    """

    def __init__(self, model: Llama, threads: int) -> None:
        self.replicas = [model, *(copy.deepcopy(model) for _ in range(threads - 1))]
        for replica in self.replicas[1:]:
            for mine, shared in zip(replica.parameters(), model.parameters(), strict=True):
                mine.data = shared.data
        self.pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))

    def learn(self, group: list[Batch], tally: Tally) -> None:
        """Leaves the gradient of one step in the model's parameters."""
        total = sum(batch.weights.sum().item() for batch in group)
        waiting = deque(sorted(group, key=lambda batch: -batch.inputs.numel()))
        list(self.pool.map(lambda replica: _work(replica, waiting, total, tally), self.replicas))
        for replica in self.replicas[1:]:
            for shared, mine in zip(
                self.replicas[0].parameters(), replica.parameters(), strict=True
            ):
                if mine.grad is not None:
                    shared.grad = mine.grad if shared.grad is None else shared.grad.add_(mine.grad)
                    mine.grad = None


def _work(model: Llama, waiting: deque[Batch], total: float, tally: Tally) -> None:
    """Takes micro-batches until none is left; adds their part of the mean loss's gradient."""
    device = next(model.parameters()).device
    while True:
        try:
            batch = waiting.popleft()
        except IndexError:
            return
        picked = (batch.weights > 0).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            states = model.hidden(batch.inputs.to(device))[picked]
            scores = model.logits(states).float()
        targets = batch.targets.to(device)[picked]
        losses = F.cross_entropy(scores, targets, reduction="none")
        (losses * batch.weights.to(device)[picked]).sum().div(total).backward()
        tally.add(batch, losses.detach().cpu(), (scores.detach().argmax(-1) == targets).cpu())


def train(
    shape: Shape, plan: Plan, tokenizer: Tokenizer, folder: Path, device: str, threads: int
) -> Llama:
    """Trains, or goes on from the checkpoint in `folder`; writes one there every few pools."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(plan.seed)
    model = Llama(shape)
    start.prepare(model)
    model.to(device)
    crew = Crew(model, threads)
    made = optimizers(model, crew.pool, plan.muon_rate, plan.adam_rate)
    done: dict[str, Any] = {"pool": 0, "step": 0, "tokens": 0}
    path = folder / "last.pt"
    if path.exists():
        saved = torch.load(path, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(made, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        done = saved["done"]
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters, pool {done['pool']} of {plan.pools}", flush=True)
    started, first = time.time(), done["tokens"]
    while done["pool"] < plan.pools:
        progress = done["pool"] / plan.pools
        size = plan.step_tokens if progress < plan.decay_from else plan.late_tokens
        tally = Tally()
        for group in steps(
            pool(tokenizer, plan.seed, done["pool"], progress, plan.micro_tokens, shape.context),
            size,
        ):
            set_rates(made, plan.rates(done["step"], progress))
            crew.learn(group, tally)
            for optimizer in made:
                optimizer.step()
                optimizer.zero_grad()
            done["step"] += 1
            done["tokens"] += sum(batch.inputs.numel() for batch in group)
        done["pool"] += 1
        speed = (done["tokens"] - first) / (time.time() - started)
        print(
            f"{time.strftime('%H:%M:%S')} pool {done['pool']}/{plan.pools} step {done['step']} "
            f"{done['tokens'] / 1e6:.2f}M tokens {speed:.0f}/s | {tally}",
            flush=True,
        )
        if done["pool"] % 2 == 0 or done["pool"] == plan.pools:
            partial = path.with_suffix(".tmp")
            torch.save(
                {
                    "model": model.state_dict(),
                    "optimizers": [o.state_dict() for o in made],
                    "done": done,
                },
                partial,
            )
            partial.replace(path)
    return model

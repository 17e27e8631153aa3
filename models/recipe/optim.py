"""Muon for the matrices inside the layers, AdamW for the embedding and the norms.

Muon (Jordan et al., 2024) takes the momentum of a weight matrix and replaces it by the nearest
orthogonal matrix, so that all directions of the weight learn at the same speed. The nearest
matrix is approached by a quintic Newton-Schulz iteration, here over stacks of equal shape at
once.
"""

from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import Executor
from typing import Any

import torch
from torch import Tensor, nn

STACK = 6  # matrices of one shape that a thread takes at once


def orthogonalise(matrices: Tensor, steps: int = 5, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Approximates U V^T of each matrix of a stack (count, rows, columns)."""
    x: Tensor = matrices.to(dtype)
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        mix = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, mix, x, beta=3.4445)
    if tall:
        x = x.mT
    return x.to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised; with Nesterov's look-ahead and decoupled weight decay."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        threads: Executor,
        lr: float,
        momentum: float = 0.95,
        decay: float = 0.0,
        half: bool = True,
    ) -> None:
        """`half`: the iteration is done in bfloat16."""
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})
        self.threads = threads
        self.dtype = torch.bfloat16 if half else torch.float32

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            stacks: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    stacks[p.shape].append(p)
            parts = [
                stack[i : i + STACK]
                for stack in stacks.values()
                for i in range(0, len(stack), STACK)
            ]
            list(self.threads.map(lambda part, group=group: self._move(part, group), parts))

    @torch.no_grad()
    def _move(self, params: list[nn.Parameter], group: dict[str, Any]) -> None:
        """One step of some matrices of equal shape."""
        updates = []
        for p in params:
            assert p.grad is not None
            state = self.state[p]
            if not state:
                state["momentum"] = torch.zeros_like(p)
            state["momentum"].lerp_(p.grad, 1 - group["momentum"])
            updates.append(p.grad.lerp(state["momentum"], group["momentum"]))
        rows, columns = params[0].shape
        scale = group["lr"] * max(1.0, rows / columns) ** 0.5
        flat = orthogonalise(torch.stack(updates), dtype=self.dtype)
        for p, update in zip(params, flat, strict=True):
            p.mul_(1 - group["lr"] * group["decay"]).add_(update, alpha=-scale)


def optimizers(
    model: nn.Module, threads: Executor, muon_lr: float, adam_lr: float, half: bool
) -> list[torch.optim.Optimizer]:
    """Both optimizers over all of a model's parameters."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    made: list[torch.optim.Optimizer] = [
        Muon(matrices, threads, lr=muon_lr, decay=0.01, half=half),
        torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    return made


def set_rates(made: list[torch.optim.Optimizer], rates: tuple[float, float]) -> None:
    """Sets the rates of Muon and of AdamW."""
    for optimizer, rate in zip(made, rates, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate

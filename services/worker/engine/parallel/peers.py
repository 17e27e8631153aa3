"""What ranks tell one another while they compute a step: torch.distributed, over gloo on CPUs and
NCCL on GPUs (which never ran). All of them call the same in the same order."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from kernels.heads import QkNorm
from services.worker.engine.parallel.shard import After, Shard


@dataclass(frozen=True, slots=True)
class Peers:
    """One rank's. Where it is alone all is as it was."""

    shard: Shard
    group: "dist.ProcessGroup | None" = None
    """None: it is alone."""

    def whole(self, y: Tensor, after: After) -> Tensor:
        """Of what each rank's part of a linear gave: y, whose memory may be used."""
        if after == "sum":
            self.sum(y)
        return self._gathered(y) if after == "gather" else y

    def embed(self, rows: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
        """Rows of a table that is cut by its rows; one rank has each, so the sum is exact. `rows`
        gives those of the rank's own part."""
        if self.group is None:
            return rows(ids)
        own = self.shard.vocabulary
        places, inside = ids - own.start, (ids >= own.start) & (ids < own.stop)
        found = rows(places.clamp(0, len(own) - 1)) * inside[:, None]
        self.sum(found)
        return found

    def norm_all(self, qkv: Tensor, norm: QkNorm) -> Tensor:
        """Norms queries and keys of [T, (H + 2 G) D], those of all ranks' heads together."""
        model, queries, keys = self.shard.model, len(norm.q), len(norm.k)
        q, k, v = qkv.split([queries, keys, keys], dim=1)
        squares = torch.stack([part.float().square().sum(-1) for part in (q, k)])
        squares[1] /= self.shard.copies
        self.sum(squares)
        sizes = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        parts = [
            _scaled(part, torch.rsqrt(total / size + norm.epsilon), weight)
            for part, total, size, weight in zip(
                (q, k), squares, sizes, (norm.q, norm.k), strict=True
            )
        ]
        return torch.cat([*parts, v], dim=1)

    @property
    def norms_all(self) -> bool:
        """Whether queries and keys are normed over more heads than a rank has."""
        return self.group is not None and self.shard.model.qk_norm == "all"

    def sum(self, x: Tensor) -> None:
        """In place. Every rank has the same, to the bit, and of two ranks nothing depends on an
        order; of more, the order of a row's additions depends on where it lies among the others."""
        assert self.group is not None
        self.group.allreduce([x]).wait()

    def _gathered(self, y: Tensor) -> Tensor:
        """[R, vocab] of each rank's part; every rank has the same, to the bit."""
        width = self.shard.vocabulary_width
        own = F.pad(y, (0, width - y.shape[1])).contiguous()
        parts = [torch.empty_like(own) for _ in range(self.shard.ranks)]
        assert self.group is not None
        self.group.allgather([parts], [own]).wait()
        return torch.cat(parts, dim=1)[:, : self.shard.model.vocab_size].contiguous()


def _scaled(x: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    """As `reference.rms_norm` does it."""
    return (weight * (x.float() * scale[:, None]).to(weight.dtype)).to(x.dtype)

"""Adapters where the GPU's kernels find them.

An adapter's matrices are one piece of the device's memory, as large as they are, and a table that
stays where it is says where in it each is; so a step needs the place of each row's adapter alone,
and a captured graph may be replayed whatever is loaded. All is queued on the stream of the steps,
memory that is given up is taken again on that stream alone: what was launched before reads what was
there, what is launched behind reads what is there now. Loading waits for the copy.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.triton.deltas import FIELDS, PARTS, Deltas, Rows, add_deltas, aligned
from services.worker.engine.adapters import Adapter, is_adapted
from services.worker.engine.adapters.adapter import Floats
from services.worker.engine.weights.triton_weights import AnyLinear


class TritonAdapters:
    """By place. A and B are of the model's dtype."""

    def __init__(
        self,
        linears: Mapping[int, Mapping[str, int]],
        dtype: torch.dtype,
        device: torch.device,
        *,
        places: int,
        at_once: int,
        most_ranks: int,
    ) -> None:
        """`linears`: output sizes of layers, by name, of each matrix, by its id; `at_once`:
        different adapters of a step, at most."""
        self._dtype, self._device = dtype, device
        adapted = {m: layers for m, layers in linears.items() if any(map(is_adapted, layers))}
        shape = places, len(adapted), PARTS, FIELDS
        self._tables = torch.zeros(shape, dtype=torch.int64, device=device)
        self._layers = [*adapted.values()]
        self._deltas = {
            matrix: Deltas(self._tables[:, index], tuple(layers.values()), most_ranks, at_once)
            for index, (matrix, layers) in enumerate(adapted.items())
        }
        self._memory: dict[int, Tensor] = {}
        """What the tables name, by place."""

    def put(self, place: int, adapter: Adapter | None) -> None:
        """Raises MemoryError where the device has no room; nothing is at the place then."""
        self._tables[place].zero_()
        self._memory.pop(place, None)
        if adapter is None:
            return
        entries = torch.zeros(self._tables.shape[1:], dtype=torch.int64)
        pieces: list[Tensor] = []
        end = 0
        for matrix, layers in enumerate(self._layers):
            for layer, name in enumerate(layers):
                if lora := adapter.modules.get(name):
                    down, up = self._laid(lora.down), self._laid(lora.up)
                    starts = end, end + len(down)
                    entries[matrix, layer, :3] = torch.tensor((*starts, len(lora.up)))
                    pieces += [down, up]
                    end = starts[1] + len(up)
        content = torch.cat(pieces)
        try:
            memory = content.to(self._device)
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"the adapter takes {content.nbytes} bytes: {error}") from error
        entries[..., :2] = memory.data_ptr() + entries[..., :2] * memory.itemsize
        self._tables[place].copy_(entries)
        self._memory[place] = memory

    def _laid(self, values: Floats) -> Tensor:
        """As `Deltas` has A or B."""
        rows = torch.from_numpy(values).to(self._dtype)
        width = rows.shape[1]
        return F.pad(rows, (0, aligned(width) - width)).reshape(-1)

    def add(self, y: Tensor, x: Tensor, weights: AnyLinear, rows: Rows) -> None:
        """To y = x W^T + b, in place."""
        if deltas := self._deltas.get(id(weights.weights)):
            add_deltas(y, x, rows, deltas)

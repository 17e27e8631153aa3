"""How many replicas GPUs make, how many requests those hold at once, and how fast they are."""

import math
from dataclasses import dataclass

from services.cli.planning.costs import Costs
from services.cli.planning.devices import GIB, Device

WIDTHS = (1, 2, 4, 8)
"""GPUs of a replica."""
_USED, _RESERVE = 0.9, 1 * GIB
"""Of a GPU's memory: a tenth stays free, and Python and torch have their part (operations.md)."""


@dataclass(frozen=True, slots=True)
class Load:
    """Each request: tokens of its prompt, of its answer."""

    prompt: int
    output: int

    @property
    def tokens(self) -> int:
        return self.prompt + self.output


@dataclass(frozen=True, slots=True)
class Speed:
    """Of a replica of which `sequences` are answered at once, always: where one ends another one
    begins."""

    ttft_s: float
    """Of a prompt that waits for nothing."""
    itl_s: float
    """Mean, with the prompts that are computed in between."""
    requests_per_s: float
    output_tok_per_s: float


@dataclass(frozen=True, slots=True)
class Replica:
    """A model on `width` GPUs, of which each holds its share of the weights and of the KV heads."""

    costs: Costs
    device: Device
    width: int

    @property
    def kv_room(self) -> float:
        """Bytes that are left for keys and values; below 0: the weights have no room."""
        usable = self.device.memory_bytes * _USED - _RESERVE
        return usable * self.width - self.costs.weight_bytes

    def sequences(self, tokens: int) -> int:
        """Of that length, that it holds at once."""
        return max(0, int(self.kv_room // self.costs.kv_bytes(tokens)))

    def speed(self, load: Load, sequences: int, efficiency: float) -> Speed:
        """`efficiency`: of the device's rates, what is reached."""
        costs = self.costs
        context = load.prompt + load.output / 2
        step_s = self._seconds(
            costs.step_flop(sequences, context), costs.step_bytes(sequences, context), efficiency
        )
        prompt_s = self._seconds(
            costs.prompt_flop(load.prompt), costs.read_bytes(load.prompt), efficiency
        )
        # While one answer is given, each of the others' places has a prompt computed once.
        itl_s = step_s + sequences * prompt_s / load.output
        requests_per_s = sequences / (load.output * itl_s)
        return Speed(prompt_s, itl_s, requests_per_s, requests_per_s * load.output)

    def _seconds(self, flop: float, read: float, efficiency: float) -> float:
        """Operations and bytes go on at once: the longer of the two."""
        longer = max(flop / self.device.flop_per_s, read / self.device.bytes_per_s)
        return longer / (self.width * efficiency)


def narrowest(costs: Costs, device: Device, load: Load) -> Replica | None:
    """That of the fewest GPUs which holds the model and a request; None: not even eight do."""
    heads = costs.model.num_heads
    for width in WIDTHS:
        found = Replica(costs, device, width)
        if heads % width == 0 and found.sequences(load.tokens):
            return found
    return None


def replicas_for(requests_per_s: float, speed: Speed) -> int:
    return math.ceil(requests_per_s / speed.requests_per_s)

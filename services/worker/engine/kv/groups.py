"""Which layers' keys and values lie together in a block (decision 0071).

A block holds the keys and values of `block_size` tokens in as many layers as a group has. Each
group has a block table of its own for each sequence, and all take their blocks from one arena.
Layers that look back a window only give blocks back once the window has passed them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from services.worker.engine.models.config import ModelConfig

MOST_GROUPS = 16
"""Of a model: what planning a step costs grows with them."""


@dataclass(frozen=True, slots=True)
class KvGroup:
    layers: tuple[int, ...] = ()
    """Of the model; the first of them is the first of a block's, and so on."""
    window: int = 0
    """Tokens that each of them sees, itself included; 0: all before it."""

    def first_seen(self, position: int, block_size: int) -> int:
        """The first block that the token at `position` looks at, or one behind it does."""
        return max(0, position + 1 - self.window) // block_size if self.window else 0

    def most_held(self, tokens: int, block_size: int) -> float:
        """Blocks of a sequence at most, of which as many as `tokens` are computed at once."""
        return -(-(self.window - 1 + tokens) // block_size) + 1 if self.window else inf


WHOLE = (KvGroup(),)
"""All layers, which see all."""


def kv_groups(model: ModelConfig) -> tuple[KvGroup, ...]:
    """All of as many layers, but for what the last of a window lacks; those that see furthest come
    first. Of the ways to cut them the one that leaves least of the blocks empty, in fewest."""
    by_window: dict[int, list[int]] = {}
    for index, layer in enumerate(model.layers):
        window = layer.window if layer.window < model.context else 0
        by_window.setdefault(window, []).append(index)
    width = _width([len(layers) for layers in by_window.values()])
    return tuple(
        KvGroup(tuple(layers[first : first + width]), window)
        for window, layers in sorted(by_window.items(), key=lambda one: one[0] or inf, reverse=True)
        for first in range(0, len(layers), width)
    )


def whole(model: ModelConfig) -> tuple[KvGroup, ...]:
    """One group, which keeps everything."""
    return (KvGroup(tuple(range(model.num_layers))),)


def keeping_all(groups: Sequence[KvGroup]) -> tuple[KvGroup, ...]:
    """As a sequence holds them where a draft model's blocks have the numbers of the first table,
    which looks at all."""
    return (replace(groups[0], window=0), *groups[1:])


def block_layers(groups: Sequence[KvGroup]) -> int:
    """That a block has room for."""
    return len(groups[0].layers)


def places(groups: Sequence[KvGroup]) -> dict[int, tuple[int, int]]:
    """Of each layer: its group's number, and its place in a block."""
    return {
        layer: (number, place)
        for number, group in enumerate(groups)
        for place, layer in enumerate(group.layers)
    }


def blocks_of(groups: Sequence[KvGroup], tokens: int, block_size: int, at_once: int) -> int:
    """That a sequence of `tokens` holds at most while it grows, by `at_once` in a step."""
    blocks = -(-tokens // block_size)
    return sum(int(min(blocks, group.most_held(at_once, block_size))) for group in groups)


def most_tokens(
    groups: Sequence[KvGroup], blocks: int, block_size: int, at_once: int, most: int
) -> int:
    """Tokens of a sequence that so many blocks hold, `most` at most."""
    low, high = 0, -(-most // block_size)
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_of(groups, middle * block_size, block_size, at_once) <= blocks:
            low = middle
        else:
            high = middle - 1
    return min(most, low * block_size)


def _width(counts: Sequence[int]) -> int:
    def cost(width: int) -> tuple[bool, int, int]:
        groups = sum(-(-count // width) for count in counts)
        return groups > max(MOST_GROUPS, len(counts)), groups * width, groups

    return min(range(1, max(counts) + 1), key=cost)

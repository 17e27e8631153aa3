"""Processors with a known speed, for what learns it."""

import random
from collections.abc import Callable

from services.worker.engine.scheduling.cost_model import CostModel, StepShape, looked_back

Machine = Callable[[StepShape], float]
"""Seconds of a step."""


def additive(shape: StepShape) -> float:
    """Every part of a step takes its own time."""
    return (
        5e-3
        + 4e-4 * shape.prompt_tokens
        + 1e-7 * shape.prompt_context
        + 4e-4 * shape.decodes
        + 4e-7 * shape.decode_context
    )


def roofline(shape: StepShape) -> float:
    """Few rows wait for the weights, many for the arithmetic."""
    rows = shape.prompt_tokens + shape.decodes
    return max(5e-3, 1e-3 + 4e-4 * rows) + 4e-7 * shape.decode_context + 1e-7 * shape.prompt_context


def noisy(machine: Machine, seed: int = 0) -> Machine:
    """One step in ten is held up by something else, by up to a fifth of a second."""
    rng = random.Random(seed)
    return lambda shape: (
        machine(shape) * rng.uniform(1, 1.1) + (rng.random() < 0.1) * rng.uniform(0, 0.2)
    )


def prompt(count: int, start: int = 0, decodes: int = 0, context: int = 0) -> StepShape:
    return StepShape(count, looked_back(start, count), decodes, decodes * context)


def decodes(count: int, context: int) -> StepShape:
    return StepShape(decodes=count, decode_context=count * context)


def warmed(machine: Machine) -> CostModel:
    """A model that has seen what a warm-up shows."""
    cost = CostModel()
    warm = [
        decodes(1, 1),
        decodes(1, 1),
        *[decodes(32, 1)] * 3,
        *map(prompt, (16, 32, 64, 128, 256)),
    ]
    for shape in warm:
        cost.learn(shape, machine(shape))
    return cost

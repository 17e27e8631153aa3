"""The C++ sampler against the one in torch that says what sampling is."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kernels.cpu.library import Library, supported
from kernels.cpu.program import Geometry, Limits, Program
from kernels.cpu.recorder import Recorder
from kernels.sampling import SAMPLING
from services.worker.engine.messages import Sampling
from services.worker.engine.sampler import SamplingBatch, sample
from tests.support.programs import compute, packed
from tests.support.samplings import as_rows, rows_of_logits

VOCAB, ROWS = 1003, 64


class Rig:
    """A model whose logits after token i are row i of what it is given."""

    def __init__(self, instruction_set: str, logits: torch.Tensor) -> None:
        library, recorder = Library(instruction_set), Recorder()
        x = recorder.sampled(recorder.embed(packed(library, np.eye(ROWS, dtype=np.float32))))
        head = recorder.linear(x, packed(library, logits.T.contiguous().numpy()))
        angles = np.zeros((64, 8), np.float32)
        self.program = Program(
            library,
            recorder,
            head,
            Geometry(1, 1, 16, 1, 16),
            Limits(tokens=ROWS, sampled=ROWS, context=64),
            (angles, angles),
            "float32",
            4,
            2,
        )

    def sample(self, samplings: list[Sampling], positions: list[int]) -> list[int]:
        rows = as_rows(samplings, positions)
        count = np.arange(len(samplings), dtype=np.int32)
        ends = np.array([0, len(samplings)], np.int32)
        table = np.zeros((1, 4), np.int32)
        ids = compute(self.program, count, count, ends, ends[1:], table, count, rows)
        return ids.tolist()


@pytest.fixture(scope="module", params=supported())
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    logits = rows_of_logits(ROWS, VOCAB)
    logits[7].clamp_(min=-1e30)  # which the rig's product of zeros would make NaN
    rig = Rig(request.param, logits)
    yield rig
    rig.program.close()


@pytest.mark.parametrize(
    "of",
    [
        Sampling(1, temperature=1.0),
        Sampling(1, temperature=0.3),
        Sampling(1, temperature=3.0, top_k=5),
        Sampling(1, temperature=1.0, top_k=700),
        Sampling(1, temperature=1.0, top_k=5000, top_p=0.5),
        Sampling(1, temperature=1.0, top_p=0.9),
        Sampling(1, temperature=2.0, top_p=0.999),
        Sampling(1, temperature=1.0, top_p=1e-9),
        Sampling(1, temperature=1.0, top_k=40, top_p=0.8),
        Sampling(1, temperature=1e-30, top_k=3),
    ],
    ids=str,
)
def test_the_same_tokens_as_in_torch(rig: Rig, of: Sampling) -> None:
    logits = rows_of_logits(ROWS, VOCAB)
    generator = np.random.default_rng(2)
    differ = total = 0
    for _ in range(6):
        seeds = generator.integers(0, 2**64, ROWS, np.uint64).tolist()
        positions = generator.integers(0, 2**31 - 1, ROWS).tolist()
        samplings = [Sampling(1, of.temperature, of.top_k, of.top_p, seed=seed) for seed in seeds]
        batch = SamplingBatch.of(as_rows(samplings, positions), torch.device("cpu"))
        want = sample(logits, batch).tolist()
        got = rig.sample(samplings, positions)
        differ += sum(a != b for a, b in zip(got, want, strict=True))
        total += ROWS
    # Two logarithms rounded otherwise may turn a draw between two that are all but equal.
    assert differ <= total // 200, f"{differ} of {total}"


def test_greedy_takes_the_first_of_the_best(rig: Rig) -> None:
    want = rows_of_logits(ROWS, VOCAB).argmax(-1).tolist()
    for greedy in (Sampling(1, temperature=0.0), Sampling(1, temperature=1.0, top_k=1, seed=9)):
        assert rig.sample([greedy] * ROWS, [5] * ROWS) == want


def test_a_row_does_not_depend_on_its_neighbours(rig: Rig) -> None:
    generator = np.random.default_rng(3)
    samplings = [
        Sampling(1, float(t), int(k), float(p), int(s))
        for t, k, p, s in zip(
            generator.choice([0, 0.5, 1, 2], ROWS),
            generator.choice([0, 1, 7, 900], ROWS),
            generator.choice([0.3, 0.95, 1], ROWS),
            generator.integers(0, 2**63, ROWS),
            strict=True,
        )
    ]
    together = rig.sample(samplings, list(range(ROWS)))
    for index in (1, 20, 63):
        alone = [samplings[index]] * (index + 1)  # the rig's row is its place
        assert rig.sample(alone, [index] * (index + 1))[index] == together[index]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("instruction_set", supported())
def test_logits_that_are_not_finite_are_told(
    instruction_set: str, temperature: float, bad: float
) -> None:
    for place in (0, 500, VOCAB - 1):
        assert _sample_with(instruction_set, place, bad, temperature) == [-1] * 3
    assert _sample_with(instruction_set, 500, -torch.inf, temperature) != [-1] * 3


def _sample_with(instruction_set: str, place: int, value: float, temperature: float) -> list[int]:
    library, recorder = Library(instruction_set), Recorder()
    x = recorder.sampled(recorder.embed(packed(library, np.ones((4, 16), np.float32))))
    bias = np.zeros(VOCAB, np.float32)
    bias[place] = value
    head = recorder.linear(x, packed(library, np.ones((VOCAB, 16), np.float32), bias))
    angles = np.zeros((64, 8), np.float32)
    program = Program(
        library,
        recorder,
        head,
        Geometry(1, 1, 16, 1, 16),
        Limits(3, 3, 64),
        (angles, angles),
        "float32",
        4,
        1,
    )
    try:
        rows = np.array([(temperature, 0, 1.0, 1, 1)] * 3, SAMPLING)
        count = np.arange(3, dtype=np.int32)
        ends = np.array([0, 3], np.int32)
        return compute(
            program, count, count, ends, ends[1:], np.zeros((1, 1), np.int32), count, rows
        ).tolist()
    finally:
        program.close()

"""The C++ sampler against the one in torch that says what sampling is."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kernels.cpu.library import Library, supported
from kernels.cpu.program import Geometry, Launched, Limits, Program
from kernels.cpu.recorder import Recorder
from kernels.sampling import EDIT, NO_EDITS, NONE_LEFT, NOT_FINITE
from services.worker.engine.logits import LogitEdits, gathered
from services.worker.engine.messages import Sampling
from services.worker.engine.runners.sampler import SamplingBatch, edit, sample, top_of
from tests.support.plain_sampling import adjusted, chi_square, probabilities
from tests.support.programs import compute, launch, packed
from tests.support.samplings import as_rows, rows_of_logits

VOCAB, ROWS = 1003, 64


class Rig:
    """A model whose logits after token i are row i of what it is given."""

    def __init__(self, instruction_set: str, logits: torch.Tensor) -> None:
        library, recorder = Library(instruction_set), Recorder()
        x = recorder.wanted(recorder.embed(packed(library, np.eye(ROWS, dtype=np.float32))))
        head = recorder.linear(x, packed(library, logits.T.contiguous().numpy()))
        self.program = Program(
            library,
            recorder,
            head,
            Geometry(1, 1, 16, 1, 16),
            Limits(tokens=ROWS, sampled=ROWS, context=64),
            [],
            "float32",
            4,
            2,
        )

    def sample(self, samplings: list[Sampling], positions: list[int]) -> list[int]:
        return self.launch(as_rows(samplings, positions)).sampled_ids.tolist()

    def launch(
        self, rows: NDArray[np.void], edits: NDArray[np.void] = NO_EDITS, of: int | None = None
    ) -> Launched:
        """Of the first rows of logits, or of one of them for all; ended."""
        count = np.arange(len(rows), dtype=np.int32)
        ids = count if of is None else np.full(len(rows), of, np.int32)
        ends = np.array([0, len(rows)], np.int32)
        table = np.zeros((1, 4), np.int32)
        step = (ids, count, ends, ends[1:], table, count, rows)
        launched = launch(self.program, *step, edits=edits)
        self.program.collect(launched)
        return launched


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


@pytest.mark.parametrize(
    "of",
    [
        Sampling(1, temperature=0.7, min_p=0.05),
        Sampling(1, min_p=0.2, top_k=9, top_p=0.9),
        Sampling(1, repetition_penalty=1.7, frequency_penalty=0.4, presence_penalty=-0.6),
        Sampling(1, logit_bias=((3, 2.5), (900, -100.0)), bad_words=((7,), (1, 2), (5, 9, 11))),
        Sampling(1, top_p=0.8, min_tokens=9, stop_token_ids=(4, 5), frequency_penalty=-1.0),
    ],
    ids=str,
)
def test_draws_are_distributed_as_the_definitions_say(rig: Rig, of: Sampling) -> None:
    """Many draws of one row, against probabilities computed plainly."""
    row, prompt, output = 24, [1, 2, 3, 500, 2], [7, 7, 500, 8, 5, 9]
    logits = rows_of_logits(ROWS, VOCAB)[row].numpy()
    edits = LogitEdits.of(of, prompt, output, of.stop_token_ids)
    rows = as_rows([of], [len(prompt) + len(output)])
    pieces = gathered([(edits, ())], rows)
    want = probabilities(adjusted(logits, of, prompt, output), of)
    rows, draws = np.repeat(rows, ROWS), 100 * ROWS
    counts = np.zeros(VOCAB, np.int64)
    for first in range(0, draws, ROWS):
        rows["position"] = first + np.arange(ROWS)
        counts += np.bincount(rig.launch(rows, pieces, of=row).sampled_ids, minlength=VOCAB)
    statistic, freedom = chi_square(counts, want * draws)
    # Wilson and Hilferty's normal approximation: one in a million would be further out.
    bound = freedom * (1 - 2 / (9 * freedom) + 4.75 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert statistic < bound, f"{statistic} with {freedom} degrees of freedom"


def test_edits_and_logprobs_are_those_of_torch(rig: Rig) -> None:
    logits = rows_of_logits(ROWS, VOCAB)
    logits[7].clamp_(min=-1e30)
    generator = np.random.default_rng(5)
    rows = as_rows([Sampling(1, temperature=0.0)] * ROWS, [5] * ROWS)
    edits = np.zeros(ROWS * 7, EDIT)
    edits["token"] = generator.integers(0, VOCAB, len(edits))
    edits["token"][1::7] = edits["token"][::7]  # one is changed twice
    edits["factor"], edits["add"] = generator.uniform(0.5, 2, (2, len(edits)))
    edits["add"][3::7] = -np.inf
    rows["first_edit"], rows["num_edits"] = np.arange(ROWS) * 7, generator.integers(0, 8, ROWS)
    rows["logprobs"] = generator.integers(0, 22, ROWS)
    rows["given"][::3] = 1 + generator.integers(0, VOCAB, len(rows[::3]))
    rows["logprobs"][::3] = 3
    got = rig.launch(rows, edits)

    raw = logits.clone()
    edit(logits, rows, edits)
    tokens = sample(logits, SamplingBatch.of(rows, torch.device("cpu")))
    given = torch.from_numpy(rows["given"].astype(np.int64))
    tokens = torch.where(given > 0, given - 1, tokens)
    want = top_of(raw, tokens, rows)
    assert got.sampled_ids.tolist() == tokens.tolist()
    for row, count in enumerate(rows["logprobs"].tolist()):
        assert got.top.ids[row, :count].tolist() == want.ids[row, :count].tolist()
        assert got.top.logprobs[row, :count] == pytest.approx(
            want.logprobs[row, :count], rel=1e-5, abs=1e-4
        )


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("instruction_set", supported())
def test_logits_that_are_not_finite_are_told(
    instruction_set: str, temperature: float, bad: float
) -> None:
    for place in (0, 500, VOCAB - 1):
        assert _sample_with(instruction_set, place, bad, temperature) == [NOT_FINITE] * 3
    assert min(_sample_with(instruction_set, 500, -torch.inf, temperature)) >= 0
    assert _sample_with(instruction_set, slice(None), -torch.inf, temperature) == [NONE_LEFT] * 3


def _sample_with(
    instruction_set: str, place: int | slice, value: float, temperature: float
) -> list[int]:
    library, recorder = Library(instruction_set), Recorder()
    x = recorder.wanted(recorder.embed(packed(library, np.ones((4, 16), np.float32))))
    bias = np.zeros(VOCAB, np.float32)
    bias[place] = value
    head = recorder.linear(x, packed(library, np.ones((VOCAB, 16), np.float32), bias))
    program = Program(
        library,
        recorder,
        head,
        Geometry(1, 1, 16, 1, 16),
        Limits(3, 3, 64),
        [],
        "float32",
        4,
        1,
    )
    try:
        rows = as_rows([Sampling(1, temperature)] * 3, [1] * 3)
        count = np.arange(3, dtype=np.int32)
        ends = np.array([0, 3], np.int32)
        return compute(
            program, count, count, ends, ends[1:], np.zeros((1, 1), np.int32), count, rows
        ).tolist()
    finally:
        program.close()

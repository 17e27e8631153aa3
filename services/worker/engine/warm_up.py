"""The first steps of an engine, before anybody asks: so that no request meets a cold path, and the
cost model knows this machine.

They compute throw-away sequences, whose KV lies in blocks that nobody holds and is wiped in the
end: nothing of them is scheduled, published or counted.

A GPU's kernels are compiled as they first run, which takes seconds, and for several numbers of rows
anew (kernels/triton/linear.py): so steps of all these numbers come first, whatever they take.
"""

from collections.abc import Callable
from time import perf_counter

from services.worker.engine.config import SCORED_ROWS
from services.worker.engine.layout import plan_step
from services.worker.engine.messages import Pooling, Request, Sampling
from services.worker.engine.runners.runner import Runner
from services.worker.engine.scheduling.chunks import Chunk
from services.worker.engine.scheduling.cost_model import CostModel, StepShape, looked_back
from services.worker.engine.sequence import Sequence

ENOUGH_S = 0.1
"""Of a step: longer ones are not tried."""
LIMIT_S = 1.0
"""For decodes, and for prompts, from the end of the first step: after this no other one begins."""
_FIRST_PROMPT = 16
_LONG_CONTEXT = 1024
_GUESSES = 4
"""Of a sequence alone."""
_SAMPLING, _SCORED = Sampling(max_tokens=1), Sampling(max_tokens=1, prompt_logprobs=0)

Ran = tuple[StepShape, float]
"""And how many seconds it took."""


def warm_up(
    runner: Runner,
    cost: CostModel,
    max_running: int,
    max_batched_tokens: int,
    guesses: int = 0,
) -> None:
    """On a GPU first all that is compiled. Runs growing batches of decodes up to a full one, that
    one again with much to look back on, one and a full batch with some of as many `guesses` as
    there may be, and prompts of doubling lengths up to a whole step; each up to a step that takes
    ENOUGH_S, and as long as there is time. Raises what the runner raises."""
    info = runner.info
    groups = len(info.kv_groups)
    used: set[int] = set()
    pooling = None if info.generates else Pooling("last")

    def sequence(
        number: int,
        tokens: int,
        count: int,
        guesses: int = 0,
        place: int = -1,
        sampling: Sampling = _SAMPLING,
    ) -> Sequence:
        """Its last `count` tokens are to be computed, and so many guesses behind them."""
        request = Request(f"warm-up {number}", [0] * tokens, sampling, pooling=pooling)
        made = Sequence(
            request,
            number,
            info.block_size,
            frozenset(),
            info.max_model_len,
            0,
            place,
            num_groups=groups,
        )
        blocks = -(-(tokens + guesses) // info.block_size)
        first = number * groups * blocks
        made.hold(
            *(
                [(first + group * blocks + index) % info.num_blocks for index in range(blocks)]
                for group in range(groups)
            )
        )
        for table in made.tables:
            used.update(table[(tokens - count) // info.block_size :])
        made.num_computed = made.num_launched = tokens - count
        return made

    def decode(rows: int, context: int = 1) -> Ran:
        chunks = [Chunk.of(sequence(number, context, 1), 1) for number in range(rows)]
        return run(chunks, StepShape(decodes=rows, decode_context=rows * context))

    def guess(rows: int, most: int) -> Ran:
        count = min(most, info.max_model_len - 1, max_batched_tokens // rows - 1)
        guesses = (0,) * count
        chunks = [Chunk.of(sequence(i, 1, 1, count), 1, guesses) for i in range(rows)]
        shape = StepShape(decodes=rows, decode_context=rows, drafts=rows * count)
        return run(chunks, shape)

    def prompt(tokens: int) -> Ran:
        shape = StepShape(prompt_tokens=tokens, prompt_context=looked_back(0, tokens))
        return run([Chunk.of(sequence(0, tokens, tokens), tokens)], shape)

    def prompts(tokens: int, place: int = -1, sampling: Sampling = _SAMPLING) -> None:
        """Together."""
        whole, rest = divmod(tokens, info.max_model_len)
        lengths = [rest] * (rest > 0) + [info.max_model_len] * whole
        chunks = [
            Chunk.of(sequence(number, length, length, place=place, sampling=sampling), length)
            for number, length in enumerate(lengths)
        ]
        run(chunks, StepShape())

    def compile_all() -> None:
        """Prompts have all numbers of rows. Those that are scored have them of logits, too, which
        are float32 then, as none are that a graph samples from."""
        from kernels.triton.linear import heights

        most = min(max_batched_tokens, max_running * info.max_model_len)
        for tokens in heights(most):
            prompts(tokens, place=0 if info.max_adapters else -1)
        if info.generates:
            for tokens in heights(min(most, max_running + SCORED_ROWS + guesses)):
                prompts(tokens, sampling=_SCORED)

    def run(chunks: list[Chunk], shape: StepShape) -> Ran:
        collected = runner.collect(runner.launch(plan_step(chunks, {})))
        return shape, collected.seconds

    if info.kernels == "triton" and info.device != "cpu":
        compile_all()
    rows = _grow(cost, decode, 1, 8, max_running)
    room = info.num_blocks // (rows * groups) * info.block_size
    cost.learn(*decode(rows, max(1, min(_LONG_CONTEXT, info.max_model_len, room))))
    if guesses:
        for each in (1, rows):
            most = min(_GUESSES, guesses // each)
            guess(each, most)  # as below: something may be cold
            cost.learn(*guess(each, most))
    longest = min(max_batched_tokens, info.max_model_len)
    _grow(cost, prompt, min(_FIRST_PROMPT, longest), 2, longest)
    nothing = bytes(info.kv_bytes_per_block)
    for block in used:
        runner.cache.write([block], nothing)


def _grow(cost: CostModel, run: Callable[[int], Ran], size: int, factor: int, most: int) -> int:
    """Learns from steps of growing sizes; gives the last one's. The first is run twice, and one
    that took long again: something was compiled, or brought into memory."""
    run(size)
    end = perf_counter() + LIMIT_S
    while True:
        shape, took = run(size)
        while took > ENOUGH_S and perf_counter() < end:
            shape, took = run(size)
        cost.learn(shape, took)
        if took > ENOUGH_S or perf_counter() >= end or size == most:
            return size
        size = min(factor * size, most)

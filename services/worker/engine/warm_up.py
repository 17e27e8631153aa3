"""The first steps of an engine, before anybody asks: so that no request meets a cold path, and the
cost model knows this machine.

They compute throw-away sequences, whose KV lies in blocks that nobody holds and is wiped in the
end: nothing of them is scheduled, published or counted.
"""

from time import perf_counter

from services.worker.engine.cost_model import CostModel, StepShape, looked_back
from services.worker.engine.messages import Request, Sampling
from services.worker.engine.plan import plan_step
from services.worker.engine.runner import Runner
from services.worker.engine.scheduler import Chunk
from services.worker.engine.sequence import Sequence

ENOUGH_S = 0.1
"""Of a step: longer prompts are not tried."""
LIMIT_S = 1.0
"""After this, nothing is run again that took long: what was compiled, or brought into memory."""
_FIRST_PROMPT = 16


def warm_up(runner: Runner, cost: CostModel, max_running: int, max_batched_tokens: int) -> None:
    """Runs one decode, a full batch of them, and prompts of doubling lengths, up to a whole step or
    one that takes ENOUGH_S. Raises what the runner raises."""
    info = runner.info
    used: set[int] = set()
    started = perf_counter()

    def timed(chunks: list[Chunk], shape: StepShape) -> float:
        before = perf_counter()
        runner.collect(runner.launch(plan_step(chunks, info.block_size, {})))
        now = perf_counter()
        cost.learn(shape, now - before)
        if now - before > ENOUGH_S and now - started < LIMIT_S:
            return timed(chunks, shape)
        return now - before

    def sequence(number: int, tokens: int) -> Sequence:
        request = Request(f"warm-up {number}", [0] * tokens, Sampling(max_tokens=1))
        made = Sequence(request, number, info.block_size, frozenset(), info.max_model_len, 0)
        blocks = -(-tokens // info.block_size)
        made.hold([(number + index) % info.num_blocks for index in range(blocks)])
        used.update(made.blocks)
        return made

    for rows in (1, 1, max_running, max_running, max_running):
        decodes = [Chunk.of(sequence(number, 1), 1) for number in range(rows)]
        timed(decodes, StepShape(decodes=rows, decode_context=rows))
    longest = min(max_batched_tokens, info.max_model_len)
    tokens = min(_FIRST_PROMPT, longest)
    shape = StepShape(prompt_tokens=tokens, prompt_context=looked_back(0, tokens))
    while timed([Chunk.of(sequence(0, tokens), tokens)], shape) < ENOUGH_S and tokens < longest:
        tokens = min(2 * tokens, longest)
        shape = StepShape(prompt_tokens=tokens, prompt_context=looked_back(0, tokens))
    nothing = bytes(info.kv_bytes_per_block)
    for block in used:
        runner.cache.write([block], nothing)

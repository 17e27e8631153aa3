"""The engine: it turns prompts into tokens on one device.

    messages.py    what goes in: Request, ...; outputs.py: what comes out: StepOutput, ...
    engine.py      Engine, the whole in one object: add, cancel, step
    scheduler.py   decides a step (chunks.py); pure Python, touches no tensor
    waiting.py     who waits, in which order; prompt_room.py: what a step has left for prompts
    tables.py      how sequences come by blocks (coming.py, preemption.py)
    speculation.py who guesses tokens ahead, and how many pay (acceptance.py); proposer.py guesses
    cost_model.py  how long a step takes, learned; load_meter.py tells it; warm_up.py begins it
    sequence.py    one request's state
    block_pool.py  who owns which KV block, prefix hashes, eviction
    plan.py        a step as plain arrays
    steps.py       runs them, and finds whose fault it is when one fails
    runner.py      a device: cpu_runner.py on the C++ kernels, torch_runner.py
    executor.py    where that is: this process, or ranks in others (parallel/)
    grammar/       structured output: what may be sampled next
    pooling.py     numbers in place of tokens: embeddings, scores
    models/        the model families, each said once for all runners
    weights.py     a checkpoint's tensors, checked by their headers; checkpoint.py reads them
    kv_transfer.py blocks that go to another engine or come from one; kv_payload.py their bytes
    process.py     the engine loop as a process of its own
    client.py      EngineClient, the asyncio end of that process

In-process use:

    engine = Engine(EngineConfig(model="path/to/checkpoint"))      # engine.py
    engine.add(Request("a", [1, 2, 3], Sampling(max_tokens=8, temperature=0)))
    while engine.has_work:
        for output in engine.step().outputs: ...
    engine.close()

From asyncio, in a process of its own:

    client = EngineClient(EngineConfig(...), on_step=handle)       # no torch in this process
    info = await client.start()
    client.add(request); client.cancel(request_id); ...
    await client.stop()

A prompt computed on engine P and decoded on engine D:

    D.add(Request(id, prompt, ..., remote_prefill=True))  → StepOutput.kv_reserved: cached_blocks
    P.add(Request(id, prompt, ..., prefill_only=True, export_kv="shared",
                  export_from_block=cached_blocks))
    P → StepOutput.kv_exports, while it computes          → D.write_kv(blocks)
    P → the first token and PREFILL_DONE                  → D.start_decode(id, first_token)
    D → StepOutput.outputs from the second token on, as if it had computed the prompt itself

P begins after D has reserved, never before: a computed prompt would hold blocks of P while it waits
for room in D, whose blocks may all be held by prompts that wait for room in P. What D has reserved
still waits for room in P, so whoever pairs engines must let no circle of such waits come about.

This package's top level imports no torch.
"""

from services.worker.engine.client import EngineClient, EngineDied, EngineLoadError
from services.worker.engine.config import EngineConfig
from services.worker.engine.messages import (
    Constraint,
    KvBlocks,
    Pooling,
    Request,
    Sampling,
    SharedRef,
)
from services.worker.engine.outputs import (
    FinishReason,
    KvEvents,
    KvReserved,
    Load,
    ModelInfo,
    PrefillChunk,
    RequestError,
    RequestOutput,
    StepOutput,
    TierCounts,
    Timeline,
    Usage,
)

__all__ = [
    "Constraint",
    "EngineClient",
    "EngineConfig",
    "EngineDied",
    "EngineLoadError",
    "FinishReason",
    "KvBlocks",
    "KvEvents",
    "KvReserved",
    "Load",
    "ModelInfo",
    "Pooling",
    "PrefillChunk",
    "Request",
    "RequestError",
    "RequestOutput",
    "Sampling",
    "SharedRef",
    "StepOutput",
    "TierCounts",
    "Timeline",
    "Usage",
]

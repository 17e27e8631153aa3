"""The engine: it turns prompts into tokens on one device.

    messages.py    what goes in: Request, ...; outputs.py: what comes out: StepOutput, ...
    engine.py      Engine, the whole in one object: add, cancel, step; sequence.py: one request
    scheduling/    who gets a place, what a step computes, how long it is expected to take; pure
                   Python, touches no tensor
    plan.py        a step as plain arrays; layout.py makes it of what was scheduled
    steps.py       runs steps, and finds whose fault it is when one fails; warm_up.py: the first
    executor.py    where a model is: in this process, or cut over ranks in others (parallel/)
    sizes.py       what a model takes and gives room for: types, KV blocks, lengths
    runners/       what computes: the C++ kernels, PyTorch, Triton; the sampler
    models/        the model families, each said once for all runners
    weights/       a checkpoint's tensors; formats/: those of few bits; adapters/: LoRA
    kv/            blocks: who holds which, their bytes, hand-over, groups, tiers on disk
    speculation/   who guesses tokens ahead, and how many pay
    grammar/       structured output: what may be sampled next
    pooling.py     numbers in place of tokens: embeddings, scores
    process/       the engine as a process of its own; client.py: EngineClient, its asyncio end

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
from services.worker.engine.process.client import EngineClient, EngineDied, EngineLoadError

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

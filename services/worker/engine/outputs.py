"""What comes out of the engine: what each step made and told, and what was loaded.

Plain data, as what goes in (messages.py). Times are Unix nanoseconds taken from one monotonic clock
(`clock.py`), so differences are exact.
"""

from dataclasses import dataclass, field, fields
from enum import StrEnum
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from services.worker.engine.kv.groups import WHOLE, KvGroup
from services.worker.engine.messages import KvBlocks


class FinishReason(StrEnum):
    STOP = "stop"
    """An end-of-text or stop token, which is the last of the new tokens."""
    LENGTH = "length"
    """`max_tokens` reached, or the model's context is full."""
    PREFILL_DONE = "prefill_done"
    """A `prefill_only` request: first token sampled and every KV block exported."""
    CANCELLED = "cancelled"
    ERROR = "error"
    """See `RequestOutput.error`."""


@dataclass(frozen=True, slots=True)
class RequestError:
    """Why one request failed. The others are not affected.

    code: `invalid_request`, `context_length_exceeded`, `no_adapter` (it was dropped meanwhile),
    `kv_transfer` or `internal`.
    param: the request's field at fault, or "".
    """

    code: str
    message: str
    param: str = ""


LEAST_LOGPROB = -9999.0
"""Told of a token that cannot come, in place of minus infinity, which JSON has no number for."""


class Logprobs(NamedTuple):
    """Natural logarithms of a token's probability and of the best ones', as the model gives them:
    before penalties, temperature and filters."""

    logprob: float
    top_ids: tuple[int, ...]
    """Best first; the first of equals."""
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a finished request, earlier output counted where it belongs."""

    prompt_tokens: int
    """The prompt without `generated_prefix`."""
    cached_tokens: int
    """Of the prompt: found in this engine's prefix cache."""
    completion_tokens: int
    """`generated_prefix` and all tokens since, the one given to `start_decode` included."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Part of a prompt that one step computed."""

    start_ns: int
    end_ns: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """What happened to a request before its first token."""

    queued_ns: int
    scheduled_ns: int
    """First given room; `remote_prefill`: when its blocks were reserved. 0: never."""
    chunks: tuple[PrefillChunk, ...]


@dataclass(slots=True)
class RequestOutput:
    """What one step made for one request. `finish_reason` set: the last word on it."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    error: RequestError | None = None
    num_cached_tokens: int = 0
    """Leading tokens whose KV came from the prefix cache when it was first scheduled."""
    timeline: Timeline | None = None
    """Set once: with the first token, or with the end of a request that got none."""
    usage: Usage | None = None
    """Set with `finish_reason`, unless the request was refused."""
    logprobs: list[Logprobs] | None = None
    """Of each new token, if asked for."""
    prompt_logprobs: list[Logprobs] | None = None
    """With the first new token, if asked for."""
    draft_tokens: int = 0
    """Guesses of them that were computed (speculation.py)."""
    accepted_tokens: int = 0
    """Of the guesses, those that were right."""
    pooled: bytes | None = None
    """Of `Request.pooling`, with `finish_reason` STOP: little-endian float32."""


@dataclass(frozen=True, slots=True)
class KvReserved:
    """Room for a `remote_prefill` request's prompt is held; its first `cached_blocks` blocks are in
    the cache already and need not be written."""

    request_id: str
    cached_blocks: int


@dataclass(frozen=True, slots=True)
class KvEvents:
    """Prefix blocks that became findable (`stored`) or stopped being so, by hash."""

    stored: bool
    hashes: list[bytes]


class Load(NamedTuple):
    """The engine's state after a step; the fields of `penstock.v1.Load`."""

    waiting: int
    """Sequences not scheduled, the preempted included."""
    running: int
    """Sequences that hold a place: computing, or reserved for a remote prefill."""
    max_running: int
    free_blocks: int
    """Reusable at once, cached content included; see `ModelInfo.token_blocks`."""
    total_blocks: int
    block_size: int
    queued_prefill_tokens: int
    """Prompt tokens not yet computed, over all sequences that compute here."""
    prefill_tokens_per_s: float
    """Of whole chunks with no decodes beside them; 0: not yet known."""
    decode_step_ms: float
    """A token of each of those that decode now, or did last, with no prompts beside them; a step,
    where none is guessed. 0: not yet known."""
    prompt_share: float
    """Of the time, what prompts get beside those that decode now: 1 if nobody does."""
    load_tokens_per_s: float = 0.0
    """Of blocks that come from below the device; 0: not yet known."""
    load_delay_s: float = 0.0
    """Before they do."""


@dataclass(slots=True)
class TierCounts:
    """Of KV blocks below the device (kv_tiers/), since the engine began."""

    loaded: int = 0
    missed: int = 0
    """Were to be there and could not be had: removed, torn, failing, or too late."""
    passed: int = 0
    """Could have been loaded, and were computed, which was expected to be sooner."""
    stored: int = 0
    dropped: int = 0
    """Not stored, as those before them were not written yet."""
    failed: int = 0
    """Not stored, as they could not be written."""
    evicted: int = 0
    """Files, of whichever engine, that this one removed to make room."""
    held_bytes: int = 0
    """Of the files of all engines."""


@dataclass(slots=True)
class StepOutput:
    """One engine step. `step` grows by one each, at least once a second while `pending` > 0."""

    step: int
    started_ns: int
    duration_ns: int
    load: Load
    pending: int
    """Requests that the engine itself must move on: queued or computing. Not counted: those that
    wait for the other side of a split (`start_decode`)."""
    prefill_tokens: int = 0
    """Tokens of prompts (or of recomputation) that this step computed."""
    decode_tokens: int = 0
    """Made by sequences that have their first one."""
    draft_tokens: int = 0
    """Guesses that it computed, and of them those that were right."""
    accepted_tokens: int = 0
    outputs: list[RequestOutput] = field(default_factory=list)
    kv_reserved: list[KvReserved] = field(default_factory=list)
    kv_exports: list[KvBlocks] = field(default_factory=list)
    kv_events: list[KvEvents] = field(default_factory=list)
    """In the order in which they happened."""
    preempted: list[str] = field(default_factory=list)
    """Requests whose blocks were taken; they wait to be recomputed."""
    tier_events: list[KvEvents] = field(default_factory=list)
    """The same as `kv_events`, of blocks on disk."""
    tier: TierCounts | None = None
    """None: there is none."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles its outputs as rows of their fields: of all that a step tells there are many of
        these alone, and a pickled object costs several times as much as a tuple."""
        told = list(_FIELDS(self))
        told[_OUTPUTS] = [_OUTPUT_FIELDS(output) for output in self.outputs]
        return _step_output, tuple(told)


def _step_output(*told: Any) -> StepOutput:
    step = StepOutput(*told)
    step.outputs = [RequestOutput(*output) for output in told[_OUTPUTS]]
    return step


_NAMES = [one.name for one in fields(StepOutput)]
_FIELDS = attrgetter(*_NAMES)
_OUTPUTS = _NAMES.index("outputs")
_OUTPUT_FIELDS = attrgetter(*(one.name for one in fields(RequestOutput)))


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the engine loaded."""

    architecture: str
    vocab_size: int
    max_model_len: int
    """Tokens of prompt and output together, at most."""
    eos_token_ids: tuple[int, ...]
    dtype: Literal["float32", "bfloat16"]
    device: str
    kernels: str
    """Which implementation runs: an instruction set of kernels/cpu, "triton" or "reference"."""
    threads: int
    """Of a CPU: that compute a step."""
    num_parameters: int
    parameter_bytes: int
    weights: str
    """Where they lie: in the file that engines of the host share, in "memory", or on the device."""
    huge_bytes: int
    """Of the weights: in huge pages."""
    workspace_bytes: int | None
    """Of memory besides weights and KV blocks, which does not grow. None: PyTorch takes and keeps
    it as steps and captured graphs need it: known only by running (torch.cuda.memory_stats).
    """
    num_blocks: int
    block_size: int
    kv_bytes_per_block: int
    """Bytes of one block, of as many layers as a KV group has."""
    kv_shape_per_block: tuple[int, int, int, int, int]
    """layers, 2 (K, V), kv_heads, block_size, head_dim."""
    kv_format: str
    """Element type of the blocks, and the order of a head's tokens and dims: KV of another format
    is not this engine's."""
    hidden_size: int = 0
    """Features of a state."""
    num_logits: int = 0
    """That can be asked for of one: tokens, or classes."""
    generates: bool = True
    max_adapters: int = 0
    """Loaded at once."""
    kv_groups: tuple[KvGroup, ...] = WHOLE
    """Of its layers, by which table their blocks are in."""

    @property
    def token_blocks(self) -> int:
        """Blocks, counted as one for the same tokens in all groups: what all hold, if no window
        gives any back."""
        return self.num_blocks // len(self.kv_groups)

    @property
    def kv_bytes(self) -> int:
        """Of all blocks. On a CPU their memory is taken as they are first written."""
        return self.num_blocks * self.kv_bytes_per_block

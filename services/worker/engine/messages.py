"""What goes into the engine and what comes out of it.

Plain data, standard library only: the replica's process, which talks to the engine process
through `EngineClient`, holds these without importing torch.

Times are Unix nanoseconds taken from one monotonic clock (`clock.py`), so differences are exact.
"""

from dataclasses import dataclass, field, fields
from enum import StrEnum
from operator import attrgetter
from pickle import PickleBuffer
from typing import Any, Literal, NamedTuple


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

    code: `invalid_request`, `context_length_exceeded`, `kv_transfer` or `internal`.
    param: the request's field at fault, or "".
    """

    code: str
    message: str
    param: str = ""


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the output must match, from its first token to its last: then it ends."""

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar"]
    text: str = ""
    """The schema as JSON; the regular expression; a JSON list of texts; a grammar, in Lark's
    notation or llama.cpp's (GBNF)."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. Values outside the stated ranges are refused by `Engine.add`."""

    max_tokens: int
    """> 0. New tokens of this request at most; `Request.generated_prefix` does not count."""
    temperature: float = 1.0
    """In [0, 100]; 0 is greedy."""
    top_k: int = 0
    """>= 0; 0: off."""
    top_p: float = 1.0
    """In (0, 1]; 1: off."""
    seed: int = 0
    """In [0, 2**64). With the absolute position it decides a sampled token."""
    ignore_eos: bool = False
    """Go on after an end-of-text token. `stop_token_ids` still end the request."""
    stop_token_ids: tuple[int, ...] = ()
    min_p: float = 0.0
    """In [0, 1]: tokens of less probability than so much of the best one's are out; 0: off."""
    repetition_penalty: float = 1.0
    """> 0; 1: off. See logits.py, and so for those that follow."""
    frequency_penalty: float = 0.0
    """In [-2, 2]; 0: off."""
    presence_penalty: float = 0.0
    """In [-2, 2]; 0: off."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, bias), the bias in [-100, 100]; at most MAX_BIAS, each token once."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """At most MAX_BAD_WORDS, of 1 to MAX_WORD tokens each."""
    min_tokens: int = 0
    """>= 0; `Request.generated_prefix` counts. Before so many no end-of-text or stop token is
    drawn; with `ignore_eos` only stop tokens are meant."""
    logprobs: int | None = None
    """At most MAX_LOGPROBS: of each new token, and of so many best ones; None: none."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens but the first; with the first new token, of a request without
    `generated_prefix`."""
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class Pooling:
    """What is wanted of a prompt in place of tokens: numbers, made of its tokens' states behind the
    model's last norm."""

    kind: Literal["last", "mean", "logits"]
    """The last token's state, or the mean of all tokens', at unit length; or logits of the last."""
    dimensions: int = 0
    """Of a state: the first so many, at unit length again; 0: all."""
    logits_of: tuple[int, ...] = ()
    """Tokens, or classes of a model that tells classes; at most MAX_POOLED_LOGITS."""


MAX_POOLED_LOGITS = 1024
MAX_BIAS = 300
MAX_BAD_WORDS = 256
MAX_WORD = 32
MAX_STOP_IDS = 256
MAX_LOGPROBS = 20
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
class Request:
    """One sequence to run.

    At most one of `prefill_only` and `remote_prefill` is set; both unset is the unsplit case.

    prefill_only: compute the prompt, sample the first token and end with `PREFILL_DONE` (or `STOP`
        or `LENGTH` when that token is the last one, and then not every block may be exported).
    remote_prefill: hold room for the prompt, report `KvReserved`, and wait for `write_kv` and
        `start_decode`. The engine sets no deadline on that wait: the caller cancels.
    """

    request_id: str
    """Unique among the engine's unfinished requests."""
    prompt_token_ids: list[int]
    """Not empty. Earlier output that is to be continued comes last (see `generated_prefix`)."""
    sampling: Sampling
    salt: bytes = b""
    """Prefix blocks are shared only between requests of equal salt."""
    priority: int = 0
    """Lower runs first; first come, first served among equals."""
    generated_prefix: int = 0
    """How many of the last prompt ids are earlier output. Positions are absolute, and penalties and
    `min_tokens` count them as output: a seeded request continues as it would have."""
    prefill_only: bool = False
    remote_prefill: bool = False
    export_kv: Literal["inline", "shared"] | None = None
    """With `prefill_only`: in which form `StepOutput.kv_exports` carries the blocks, if at all."""
    export_from_block: int = 0
    """First block to export: those before it, the decode engine holds already."""
    pooling: Pooling | None = None
    """It gets numbers, and no token: nothing of `sampling` counts."""


@dataclass(frozen=True, slots=True)
class SharedRef:
    """KV data in shared memory: `size` bytes at `offset` of segment `name` (see kv_payload.py)."""

    name: str
    offset: int
    size: int


KvData = bytes | bytearray | memoryview | SharedRef


@dataclass(frozen=True, slots=True)
class KvBlocks:
    """Blocks [first_block, first_block + num_blocks) of a prompt, on the way from one engine to
    another: `StepOutput.kv_exports` of the one, `write_kv` of the other.

    data: [num_blocks, layers, 2 (K, V), kv_heads, block_size, head_dim], a head's tokens and dims
    in the order of the engine's `ModelInfo.kv_format`. The last block may be partly filled; the
    rest of it is unspecified. Exports of a request come in order and without gaps. Who owns a
    `SharedRef`'s segment: see kv_payload.py.
    """

    request_id: str
    first_block: int
    num_blocks: int
    data: KvData

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles (protocol 5) with the block data out of band, so that it is not copied twice."""
        data = self.data if isinstance(self.data, SharedRef) else PickleBuffer(self.data)
        return KvBlocks, (self.request_id, self.first_block, self.num_blocks, data)


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
class Load:
    """The engine's state after a step; the fields of `penstock.v1.Load`."""

    waiting: int
    """Sequences not scheduled, the preempted included."""
    running: int
    """Sequences that hold a place: computing, or reserved for a remote prefill."""
    max_running: int
    free_blocks: int
    """Reusable at once, cached content included."""
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
    """Bytes of one block over all layers: the size of one block in `KvBlocks.data`."""
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

    @property
    def kv_bytes(self) -> int:
        """Of all blocks. On a CPU their memory is taken as they are first written."""
        return self.num_blocks * self.kv_bytes_per_block

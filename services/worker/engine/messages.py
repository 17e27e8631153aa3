"""What goes into the engine; outputs.py: what comes out of it.

Plain data, standard library only: the replica's process, which talks to the engine process
through `EngineClient`, holds these without importing torch.
"""

from dataclasses import dataclass
from pickle import PickleBuffer
from typing import Any, Literal


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
    adapter: str = ""
    """Id of the adapter that it is computed with; empty: none. Prefix blocks are shared only
    between requests of one."""


@dataclass(frozen=True, slots=True)
class SharedRef:
    """KV data in shared memory: `size` bytes at `offset` of segment `name` (see kv/payload.py)."""

    name: str
    offset: int
    size: int


KvData = bytes | bytearray | memoryview | SharedRef


@dataclass(frozen=True, slots=True)
class KvBlocks:
    """Blocks [first_block, first_block + num_blocks) of a prompt, on the way from one engine to
    another: `StepOutput.kv_exports` of the one, `write_kv` of the other.

    data: [num_blocks, groups, layers, 2 (K, V), kv_heads, block_size, head_dim] without the blocks
    of KV groups that no token behind the prompt looks at (kv/groups.py), a head's tokens and dims
    in the order of the engine's `ModelInfo.kv_format`. The last block may be partly filled; the
    rest of it is unspecified. Exports of a request come in order and without gaps. Who owns a
    `SharedRef`'s segment: see kv/payload.py.
    """

    request_id: str
    first_block: int
    num_blocks: int
    data: KvData

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles (protocol 5) with the block data out of band, so that it is not copied twice."""
        data = self.data if isinstance(self.data, SharedRef) else PickleBuffer(self.data)
        return KvBlocks, (self.request_id, self.first_block, self.num_blocks, data)

"""One request on its way through the engine."""

from array import array
from enum import Enum, auto

import numpy as np

from kernels.sampling import SAMPLING
from services.common.block_hash import extend_hash, root_hash
from services.worker.engine.grammar.matcher import Matcher
from services.worker.engine.kv.tiers.loading import Loading
from services.worker.engine.logits import LogitEdits
from services.worker.engine.messages import Request, Sampling
from services.worker.engine.outputs import FinishReason, Logprobs, PrefillChunk, Usage
from services.worker.engine.pooling import Pool
from services.worker.engine.speculation.acceptance import Acceptance
from services.worker.engine.speculation.drafted import Drafted
from services.worker.engine.speculation.lookup import Lookup


class Status(Enum):
    WAITING = auto()
    """In the queue; holds no blocks."""
    RUNNING = auto()
    """Holds blocks for all its tokens and takes part in steps."""
    AWAITING_KV = auto()
    """Holds blocks for its prompt, which another engine computes (`remote_prefill`), or blocks that
    are being loaded from below the device (kv_tiers/)."""
    FINISHED = auto()


class Sequence:
    """State of a request: the scheduler changes it, others read.

    tokens          prompt and output; a token's index is its position
    length          of `tokens`, once all that runs has been collected
    num_computed    leading tokens whose KV is in `blocks`
    num_launched    the same, once all that runs has been collected
    blocks          the block table: position p lies in blocks[p // block_size]
    more            those of the model's other KV groups (kv/groups.py), if it has several
    passed          of each table, leading blocks that it holds no more: no token looks at them
    begins          of each table, those of them that it never held
    room            tokens that the tables hold, those passed included
    hashes          hashes of the leading full blocks of `tokens`, as far as needed yet
    num_published   leading blocks whose hash was offered to the pool
    """

    # What each decode asks for lies together, in few lines of the cache: more than thirty
    # attributes without slots would be a table of their own for each sequence.
    __slots__ = (
        *("tokens", "length", "num_launched", "num_computed", "in_flight", "status", "room"),
        *("num_prompt", "_last", "_stop_ids", "matcher", "edits", "pool", "scores", "reported"),
        *("id", "num_cached", "blocks", "sampling_row", "is_special", "_waits", "request"),
        *("_block_size", "_max_len", "_root", "acceptances", "arrival", "chunks", "drafted"),
        *("export_next", "hashes", "lookup", "num_published", "num_received", "order"),
        *("more", "passed", "begins", "queued_ns", "queued_tokens", "remote", "place"),
        *("scheduled_ns", "was_admitted", "loading", "loads"),
    )

    def __init__(
        self,
        request: Request,
        arrival: int,
        block_size: int,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        queued_ns: int,
        place: int = -1,
        num_groups: int = 1,
    ) -> None:
        self.request = request
        self.id = request.request_id
        self.arrival = arrival
        self.order = (request.priority, 0.0, arrival)
        """Smaller goes first: by priority, by when its prompt is due, by arrival. The scheduler
        sets it when it takes the sequence; kept through preemption."""
        self.queued_tokens = 0
        """WAITING: tokens to compute here, as far as they were not in the prefix cache when it
        was queued."""
        self.status = Status.WAITING
        self.place = place
        """Where its adapter is; -1: it has none."""
        self.remote = request.remote_prefill
        """The prompt is still to come from another engine; False once `start_decode` was given."""

        self.matcher: Matcher | None = None
        """Where its output stands in the grammar of its constraint, if it has one."""
        self.tokens = list(request.prompt_token_ids)
        self.num_prompt = len(self.tokens)
        self.length = self.num_prompt
        self.num_computed = self.num_launched = 0
        self.in_flight = 0
        """Chunks that were launched and have not come back."""
        self.blocks = array("i")
        self.more = tuple(array("i") for _ in range(num_groups - 1))
        self.passed, self.begins = [0] * num_groups, [0] * num_groups
        self.room = 0
        self.hashes: list[bytes] = []
        self.num_published = 0
        self.was_admitted = False
        self.num_cached = 0
        """Leading tokens found in the prefix cache at the first admission."""
        self.num_received = 0
        """AWAITING_KV, remote: leading blocks whose KV is there."""
        self.loading: Loading | None = None
        """AWAITING_KV, not remote: what it waits for."""
        self.loads = True
        """It may wait for that: it has not waited in vain."""
        self.export_next = request.export_from_block
        """Next block to export."""

        self.queued_ns = queued_ns
        self.scheduled_ns = 0
        self.chunks: list[PrefillChunk] = []
        self.reported = False
        """Its timeline was sent."""

        self.acceptances: list[Acceptance] = []
        """Of each proposer's guesses (speculation.py), once one was asked."""
        self.lookup: Lookup | None = None
        """Its proposer's (proposer.py), once it has looked."""
        self.drafted: Drafted | None = None
        """How far a draft model is with it (draft_model.py), if that has begun."""

        self._block_size = block_size
        self._root = root_hash(request.salt, request.adapter)
        self._max_len = min(self.num_prompt + request.sampling.max_tokens, max_model_len)
        self.pool = None if request.pooling is None else Pool(request.pooling)
        """What it gets in place of tokens."""
        ends_with_prompt = request.prefill_only or request.pooling is not None
        self._last = self.num_prompt + 1 if ends_with_prompt else self._max_len
        """`length` with the last token here, if no stop token comes before."""
        self.sampling_row = _sampling_row(request.sampling)
        """Of SAMPLING, but for the position: as every step's plan has it."""
        self._stop_ids = frozenset(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            self._stop_ids |= eos_token_ids
        earlier = self.num_prompt - request.generated_prefix
        self.edits = LogitEdits.of(
            request.sampling, self.tokens[:earlier], self.tokens[earlier:], self._stop_ids
        )
        """What its parameters do to logits; None: nothing."""
        wanted = request.sampling.prompt_logprobs is not None
        self.scores: list[Logprobs] | None = None
        """Of prompt tokens 1, 2, ... if those are wanted and no token has come yet."""
        if wanted and not request.generated_prefix and not request.remote_prefill:
            self.scores = []
        self.is_special = (
            any(one is not None for one in (self.edits, self.scores, self.pool))
            or request.sampling.constraint is not None
            or place >= 0
        )
        """More is to be said of it in a plan than which tokens are computed and sampled."""
        self._waits = self.edits is not None and self.edits.waits

    @property
    def tables(self) -> tuple["array[int]", ...]:
        """Of each KV group its block table."""
        return self.blocks, *self.more

    @property
    def held(self) -> list["array[int]"]:
        """Of each table the blocks that it still holds."""
        return [table[gone:] for table, gone in zip(self.tables, self.passed, strict=True)]

    def hold(self, *blocks: list[int]) -> None:
        """Adds blocks to the tables' ends."""
        self.blocks.extend(blocks[0])
        self.room = len(self.blocks) * self._block_size
        for table, added in zip(self.more, blocks[1:], strict=True):
            table.extend(added)
            self.room = min(self.room, len(table) * self._block_size)

    def pass_by(self, group: int, count: int) -> list[int]:
        """Takes out of the group's table, and gives, those of its first `count` blocks that it
        still holds; what is left there is no block's number."""
        table, gone = self.tables[group], self.passed[group]
        blocks = table[gone:count].tolist()
        table[gone:count] = array("i", bytes(4 * len(blocks)))
        self.passed[group] = count
        return blocks

    def let_go(self) -> list[int]:
        """Takes off the tables, and gives, blocks beyond those that its tokens need."""
        needed, spare = self.blocks_needed, []
        for table in self.tables:
            spare += table[needed:].tolist()
            del table[needed:]
        if spare:
            self.room = min(map(len, self.tables)) * self._block_size
            if self.drafted is not None:
                self.drafted.clip(self.room)
        return spare

    @property
    def num_left(self) -> int:
        """Tokens that may still come, but for a stop token."""
        return self._last - len(self.tokens)

    def ends_with(self, token: int) -> bool:
        """Whether `token` would be its last, wherever it comes."""
        return token in self._stop_ids

    @property
    def num_remaining(self) -> int:
        """Tokens to launch before the next one can be sampled; 0 where there will be no next one,
        which is known before that which comes before it: all but a stop token. And 0 while the one
        before it is not known, if its logits depend on that (logits.py)."""
        if self.length >= self._last or (self._waits and self.length > len(self.tokens)):
            return 0
        return self.length - self.num_launched

    @property
    def is_decoding(self) -> bool:
        """All that is left to launch is the token that it sampled last. A prompt's last token is
        none that it sampled."""
        return self.num_launched == self.length - 1 >= self.num_prompt

    @property
    def blocks_needed(self) -> int:
        """Length of a block table that holds all tokens."""
        return -(-self.length // self._block_size)

    def hash_blocks(self, count: int) -> list[bytes]:
        """Hashes of the first `count` blocks, which must be full."""
        while len(self.hashes) < count:
            start = len(self.hashes) * self._block_size
            parent = self.hashes[-1] if self.hashes else self._root
            self.hashes.append(extend_hash(parent, self.tokens[start : start + self._block_size]))
        return self.hashes[:count]

    def extend(self, tokens: list[int]) -> FinishReason | None:
        """Adds output tokens up to the last one, if that is among them, and takes those behind it
        off the list; says whether it is there, and why. Its grammar has taken them in."""
        whole = self.matcher is not None and self.matcher.ended
        reason = FinishReason.STOP if whole else None
        for index, token in enumerate(tokens, 1):
            self.tokens.append(token)
            if self.edits is not None:
                self.edits.append(token)
            count = len(self.tokens)
            if token in self._stop_ids:
                ends = FinishReason.STOP
            elif count < self._last:
                continue
            else:
                ends = FinishReason.LENGTH if count >= self._max_len else FinishReason.PREFILL_DONE
            if not (whole and index == len(tokens)):
                del tokens[index:]
                reason = ends
                break
        if len(self.tokens) > self.length:
            self.length = len(self.tokens)
        return reason

    def launch(self, end: int, samples: bool) -> None:
        """The tokens before `end` will be computed, and one sampled there."""
        self.num_launched = end
        self.length = end + 1 if samples else self.length
        self.in_flight += 1

    def forget(self) -> None:
        """What was launched and has not come back is worth nothing."""
        self.num_launched, self.length = self.num_computed, len(self.tokens)

    def give_back(self) -> None:
        """It holds nothing any more: all is to be computed again."""
        self.blocks, self.room = array("i"), 0
        self.more = tuple(array("i") for _ in self.more)
        self.passed, self.begins = [0] * len(self.passed), [0] * len(self.passed)
        self.drafted = None
        self.num_computed = self.num_published = 0
        if self.pool is not None:
            self.pool.clear()
        self.forget()

    def usage(self) -> Usage:
        prompt = self.num_prompt - self.request.generated_prefix
        return Usage(
            prompt_tokens=prompt,
            cached_tokens=min(self.num_cached, prompt),
            completion_tokens=len(self.tokens) - prompt,
        )


def _sampling_row(sampling: Sampling) -> bytes:
    s = sampling
    row = np.zeros((), SAMPLING)
    for name in ("temperature", "top_k", "top_p", "seed", "min_p"):
        row[name] = getattr(s, name)
    row["logprobs"] = 0 if s.logprobs is None else 1 + s.logprobs
    return row.tobytes()

"""A smaller model that guesses what the served one will say.

It has a KV cache of its own, whose blocks have the numbers of the served model's: a sequence's
block table, the first where KV groups have several (kv/groups.py), is for both, and keeps all. Of
each sequence it computes what it has not computed yet, in the step in which it is to guess, so it
costs nothing where nobody guesses; what others computed of a prefix that the cache shares is known
by the blocks' hashes.

Its steps go one behind the other without the interpreter: each goes on after what the one before
sampled. It draws as the request asks, with the noise of the position, which is the served model's
own: where the two models think alike, they draw alike (M. Daliri, C. Musco, A. T. Suresh, "Coupling
without communication and drafter-invariant speculative decoding", arXiv 2408.07978).
"""

import json
import logging
from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np

from services.worker.engine.config import EngineConfig
from services.worker.engine.kv.cache import block_bytes
from services.worker.engine.kv.groups import block_layers, kv_groups
from services.worker.engine.layout import one_further, plan_step, sampling_rows
from services.worker.engine.models.config import ModelConfig, UnsupportedModel
from services.worker.engine.models.registry import read_config
from services.worker.engine.outputs import ModelInfo
from services.worker.engine.parallel.shard import Shard
from services.worker.engine.plan import StepPlan
from services.worker.engine.runners.making import make_runner
from services.worker.engine.runners.runner import Runner, Ticket
from services.worker.engine.scheduling.chunks import Chunk
from services.worker.engine.scheduling.cost_model import CostModel, StepShape, looked_back
from services.worker.engine.scheduling.prompt_room import PromptRoom
from services.worker.engine.sequence import Sequence
from services.worker.engine.speculation.drafted import Drafted
from services.worker.engine.speculation.proposer import Wanted
from services.worker.engine.warm_up import warm_up

log = logging.getLogger(__name__)

_NONE = np.zeros(0, np.int32)


def with_room(config: EngineConfig) -> EngineConfig:
    """The served model's, which leaves the draft model its part of the memory for KV blocks. Raises
    ValueError where the two do not go together."""
    if config.draft_model is None:
        return config
    own = read_config(config.model)
    try:
        drafts = read_config(config.draft_model)
    except UnsupportedModel as error:
        raise ValueError(f"draft_model: {error}") from None
    for folder, model in ((config.model, own), (config.draft_model, drafts)):
        if model.head != "tokens":
            raise ValueError(f"draft_model guesses tokens, and {folder!r} makes none")
    _check_vocabulary(config.model, own, config.draft_model, drafts)
    # Where both are stored as they are computed, the ratio is one of elements.
    stored = "bfloat16" if config.kv_format == "auto" else config.kv_format
    own = Shard(own, 0, config.tensor_parallel).config  # the memory is one rank's
    layers = block_layers(kv_groups(own)), drafts.num_layers
    ours, its = (
        block_bytes(model, config.block_size, stored, count)
        for model, count in zip((own, drafts), layers, strict=True)
    )
    return replace(config, kv_cache_bytes=int(config.kv_cache_bytes * ours / (ours + its)))


def _check_vocabulary(folder: str, own: ModelConfig, draft_folder: str, draft: ModelConfig) -> None:
    if own.vocab_size != draft.vocab_size:
        raise ValueError(
            f"draft_model {draft_folder!r} has a vocabulary of {draft.vocab_size} tokens, the "
            f"model one of {own.vocab_size}: it cannot guess for it"
        )
    ours, theirs = (Path(one) / "tokenizer.json" for one in (folder, draft_folder))
    if not (ours.exists() and theirs.exists()) or ours.read_bytes() == theirs.read_bytes():
        return
    known = [json.loads(path.read_text()).get("model", {}).get("vocab") for path in (ours, theirs)]
    if known[0] != known[1]:
        raise ValueError(
            f"draft_model {draft_folder!r} has another vocabulary than the model: the same ids "
            "are other tokens (tokenizer.json)"
        )


class _Row(NamedTuple):
    """Of a sequence tokens [start, end) are computed, and so many guessed behind them."""

    sequence: Sequence
    start: int
    end: int
    guesses: int

    def chunk(self, depth: int) -> Chunk:
        """Of the step that makes guess `depth`: 0, with all that comes before it, or a token."""
        start = self.start if depth == 0 else self.end + depth - 1
        return Chunk(self.sequence, start, self.end + depth, self.guesses > depth)


class DraftProposer:
    """As `Proposer`. Should its model fail, nobody guesses any more; the engine goes on."""

    def __init__(self, config: EngineConfig, info: ModelInfo) -> None:
        """`info`: of the served model. Raises UnsupportedModel, and ValueError."""
        assert config.draft_model is not None
        context = read_config(config.draft_model).context
        config = replace(
            config,
            model=config.draft_model,
            draft_model=None,
            speculation="off",
            tensor_parallel=1,
            spread=None,
            ranks_beside=1,
            max_adapters=0,
            keeps_all=True,
            num_blocks=info.num_blocks,
            max_model_len=min(info.max_model_len, context),
        )
        try:
            self._runner: Runner | None = make_runner(config)
        except ValueError as error:
            raise ValueError(f"draft_model: {error}") from error
        self._context = self._runner.info.max_model_len
        self._block_size, self._most = config.block_size, config.max_batched_tokens
        self._shares = config.prefix_caching
        self._cost = CostModel()
        warm_up(self._runner, self._cost, config.max_running, config.max_batched_tokens)
        self._near = config.num_speculative_tokens + 1
        """Tokens behind, of one that guessed in the step before, at most."""
        self._hashes: dict[int, bytes] = {}
        """Of full blocks that it has computed."""

    def look_s(self, sequence: Sequence) -> float:
        return 0.0

    def begin_s(self, sequence: Sequence) -> float:
        drafted, count = sequence.drafted, len(sequence.tokens)
        if drafted is not None and count - drafted.computed <= self._near:
            return 0.0
        start = self._computed(sequence)
        return self._cost.chunk_s(start, count - start)

    def offers(self, sequence: Sequence, most: int) -> int:
        if self._runner is None:
            return 0
        return max(0, min(most, self._context - len(sequence.tokens)))

    def depth_s(self, rows: int, context: int) -> float:
        return self._cost.step_s(StepShape(decodes=rows, decode_context=context))

    def propose(self, wanted: Wanted, seconds: float) -> list[list[int]]:
        if self._runner is None or not wanted:
            return [[] for _ in wanted]
        try:
            guesses = self._propose(self._runner, self._rows(wanted, seconds))
        except Exception:
            log.exception("the draft model failed: no tokens are guessed from now on")
            self._runner = None
            return [[] for _ in wanted]
        return [guesses.get(sequence.id, []) for sequence, _ in wanted]

    def _rows(self, wanted: Wanted, seconds: float) -> list[_Row]:
        """What it has not computed of them yet, as much as a step has tokens for: of those that are
        near all, of those that are far behind as much as takes the `seconds`, as of prompts. Who is
        not caught up then does not guess. Rows of one token come first."""
        rows: list[_Row] = []
        far: list[tuple[Sequence, int, int]] = []
        tokens = self._most
        for sequence, guesses in wanted:
            start, end = self._computed(sequence), len(sequence.tokens)
            if end - start > self._near:
                far.append((sequence, guesses, start))
            elif end - start <= tokens:
                tokens -= end - start
                rows.append(_Row(sequence, start, end, guesses))
        room = PromptRoom(self._cost, tokens, seconds)
        for sequence, guesses, start in far:
            if not room.left:
                break
            end = start + room.take(start, len(sequence.tokens) - start)
            rows.append(_Row(sequence, start, end, guesses * (end == len(sequence.tokens))))
        return sorted(rows, key=lambda row: row.end - row.start > 1)

    def _computed(self, sequence: Sequence) -> int:
        """Its leading tokens that are, but for the last one, whose logits are wanted."""
        if sequence.drafted is None:
            sequence.drafted = Drafted(self._shared(sequence))
        return min(sequence.drafted.catch_up(sequence.tokens), len(sequence.tokens) - 1)

    def _shared(self, sequence: Sequence) -> int:
        """Leading tokens in blocks that were computed for others."""
        if not self._shares:
            return 0
        hashes = sequence.hash_blocks((len(sequence.tokens) - 1) // self._block_size)
        for index, (block, block_hash) in enumerate(zip(sequence.blocks, hashes, strict=False)):
            if self._hashes.get(block) != block_hash:
                return index * self._block_size
        return len(hashes) * self._block_size

    def _propose(self, runner: Runner, rows: list[_Row]) -> dict[str, list[int]]:
        """The steps one behind the other, and then what they sampled."""
        if not rows:
            return {}
        began = perf_counter()
        chunks = [row.chunk(0) for row in rows]
        plan = _plan(chunks, {})
        steps = [(rows, runner.launch(plan))]
        for depth in range(1, max((row.guesses for row in rows), default=1)):
            deeper = [row for row in rows if row.guesses > depth]
            if depth > 1 and len(deeper) == len(chunks):
                plan = one_further(plan)
            else:
                before, chunks = chunks, [row.chunk(depth) for row in deeper]
                plan = _plan(chunks, sampling_rows(before))
            steps.append((deeper, runner.launch(plan)))
        guesses: dict[str, list[int]] = {row.sequence.id: [] for row in rows}
        seconds: list[float] = []
        for depth, (those, ticket) in enumerate(steps):
            collected = runner.collect(ticket)
            seconds.append(collected.seconds)
            for row, result in zip(those, collected.results, strict=True):
                if len(guesses[row.sequence.id]) == depth:  # all before it were numbers
                    guesses[row.sequence.id] += result.tokens
        for row in rows:
            self._note(row, guesses[row.sequence.id])
        self._learn(steps, seconds, perf_counter() - began)
        return guesses

    def _note(self, row: _Row, guesses: list[int]) -> None:
        """What is computed of the sequence now."""
        drafted, size = row.sequence.drafted, self._block_size
        assert drafted is not None
        drafted.computed, drafted.fed = row.end, guesses[:-1]
        if not self._shares:
            return
        full, last = row.end // size, (row.end + len(drafted.fed) - 1) // size
        hashes = row.sequence.hash_blocks(full)
        for index in range(row.start // size, last + 1):
            block = row.sequence.blocks[index]
            if index < full:
                self._hashes[block] = hashes[index]
            else:
                self._hashes.pop(block, None)

    def _learn(
        self, steps: list[tuple[list[_Row], Ticket]], seconds: list[float], took_s: float
    ) -> None:
        """What a step took, and the host for each of them."""
        host_s = max(0.0, took_s - sum(seconds)) / len(steps)
        for depth, ((rows, _), step_s) in enumerate(zip(steps, seconds, strict=True)):
            decodes = [row for row in rows if depth or row.end - row.start == 1]
            prompts = [row for row in rows if not depth and row.end - row.start > 1]
            shape = StepShape(
                sum(row.end - row.start for row in prompts),
                sum(looked_back(row.start, row.end - row.start) for row in prompts),
                len(decodes),
                sum(row.end + depth for row in decodes),
            )
            self._cost.learn(shape, step_s + host_s)


def _plan(chunks: Seq[Chunk], before: Mapping[str, int]) -> StepPlan:
    """Of guesses: nobody asks for their logprobs, no grammar is asked what they may be, the model
    has no adapters, and behind other guesses edits would be others. It is near enough."""
    plan = plan_step(chunks, before)
    plan.samplings["logprobs"] = 0
    first = plan.tables[: len(plan.tables) // plan.groups]
    none = array("i")
    return replace(plan, constrained=none, adapters=none, tables=first, groups=1)

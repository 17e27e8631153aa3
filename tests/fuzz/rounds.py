"""A round: an engine of random settings, its requests, and what must hold behind them."""

import json
import re
import threading
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from random import Random
from time import monotonic, sleep, thread_time
from typing import Any
from unittest import mock

import jsonschema

from protos.common_pb2 import FINISH_STOP
from protos.worker_pb2 import TokenDelta
from services.tokenizer.answers.output import Output
from services.tokenizer.prompts.constraint import shape_of
from services.worker.engine import EngineConfig, FinishReason, KvBlocks, RequestOutput, StepOutput
from services.worker.engine.engine import Engine
from services.worker.engine.grammar.compiler import Compiler, grammar_of
from services.worker.engine.kv import payload as kv_payload
from services.worker.engine.messages import Constraint
from services.worker.engine.speculation import guess_rules
from tests.fuzz.faults import Faults, no_room
from tests.fuzz.replay import compare, plain
from tests.fuzz.requests import DEMO, DRAFT, EOS, HIDDEN, PROMPT, VOCAB, WINDOW, Asked, demo, drawn

_STEPS = 200  # in which the requests of a round come
_MOST = 20_000
_ENDS_S = 30.0  # for threads
_STEP_S = 1.0
"""Of the engine's thread, for a step: the most that it computes itself and fills of masks takes a
third of that. Whatever goes on beside it, on other processors or on this one, does not count."""


@dataclass
class Following:
    """One request, from the engine to its client's text."""

    asked: Asked
    output: Output
    began: int
    tokens: list[int] = field(default_factory=list)
    logprobs: int = 0
    last: RequestOutput | None = None
    cancelled: bool = False
    answers_at: int | None = None


def config(rng: Random) -> EngineConfig:
    speculation = rng.choice(("off", "off", "ngram", "draft"))
    return EngineConfig(
        model=str(DEMO),
        num_blocks=rng.choice((WINDOW // 16 + 1, 40, 200)),
        max_model_len=WINDOW,
        max_running=rng.choice((2, 8, 16)),
        max_batched_tokens=rng.choice((32, 64, 512)),
        prefix_caching=rng.random() < 0.8,
        overlap=False if speculation != "off" else rng.random() < 0.5,
        speculation=speculation,
        draft_model=str(DRAFT) if speculation == "draft" else None,
        num_speculative_tokens=rng.choice((1, 5)),
        threads=rng.choice((1, 1, 2, 3, 4)),
        target_itl_ms=1e6,
    )


def play(seed: int, count: int, again: float = 0.1) -> Counter[str]:
    """Gives what was met, and how often: faults by the round. Raises AssertionError for
    whatever does not hold. `again`: of the requests, those that are tried again alone."""
    rng, before = Random(seed), {*threading.enumerate()}
    engine = Engine(settings := config(rng))
    faults = Faults(rng, engine, often=rng.choice((0.0, 0.02, 0.1)))
    margin = rng.choice((guess_rules.MARGIN, 0.0))  # as far as guesses pay, or always
    try:
        with (
            mock.patch.object(kv_payload, "share", no_room(faults)),
            mock.patch.object(guess_rules, "MARGIN", margin),
        ):
            a_round = _Round(engine, rng, faults, count)
            a_round.run()
    except AssertionError as error:
        error.add_note(f"{settings}")
        raise
    finally:
        engine.close()
    a_round.replay(again)
    until = monotonic() + _ENDS_S
    while left := {*threading.enumerate()} - before:
        assert monotonic() < until, f"threads are left: {left}"
        sleep(0.01)
    return a_round.met + Counter(faults.seen)


class _Round:
    def __init__(self, engine: Engine, rng: Random, faults: Faults, count: int) -> None:
        self._engine, self._faults, self._rng = engine, faults, rng
        coming: list[Asked] = []
        while len(coming) < count:
            coming += drawn(rng, _STEPS)
        self._coming = sorted(coming[:count], key=lambda asked: -asked.at_step)
        self._all: dict[str, Following] = {}
        self._open: dict[str, Following] = {}
        self.met: Counter[str] = Counter()

    def run(self) -> None:
        now = 0
        while self._coming or self._open:
            assert now < _MOST, f"they do not come to an end: {[*self._open]}"
            while self._coming and self._coming[-1].at_step <= now:
                self._add(self._coming.pop(), now)
            self._command(now)
            if self._engine.has_work:
                began = thread_time()
                step = self._engine.step()
                took_s = thread_time() - began
                assert took_s < _STEP_S, f"step {now} took {took_s:.2f} s of the processor"
                self._take(step, now)
                if step.prefill_tokens or step.decode_tokens:  # else nothing went well
                    self._faults.step()
            self._engine.check()
            now += 1
        while self._engine.has_work:
            self._take(self._engine.step(), now)
        self._at_the_end()

    def replay(self, again: float) -> None:
        """Of those that nothing was wrong with, and whose first token was made here."""
        engine = plain()
        try:
            for one in self._all.values():
                asked, last = one.asked, one.last
                assert last is not None
                told = last.finish_reason is not FinishReason.ERROR
                elsewhere = asked.more.get("remote_prefill")
                if told and not elsewhere and self._rng.random() < again:
                    compare(engine, asked, one.tokens, last)
                    self.met["replayed"] += 1
        finally:
            engine.close()

    def _add(self, asked: Asked, now: int) -> None:
        name = str(len(self._all))
        detokenizer = demo().with_calls() if asked.chat.chat.tools else demo().detokenizer()
        shape = shape_of(asked.chat, demo(), PROMPT) if asked.chat.HasField("chat") else None
        output = Output(detokenizer, asked.stops, PROMPT, shape)
        self._all[name] = self._open[name] = Following(asked, output, now)
        self._engine.add(asked.request(name))

    def _command(self, now: int) -> None:
        for name, one in [*self._open.items()]:
            after = one.asked.cancel_after
            if after is not None and now >= one.began + after and not one.cancelled:
                self._cancel(name)
            elif one.answers_at is not None and now >= one.answers_at and not one.cancelled:
                one.answers_at = None
                self._answer(name, one.asked.prompt)

    def _cancel(self, name: str) -> None:
        self._open[name].cancelled = True
        self._engine.cancel(name)

    def _answer(self, name: str, prompt: list[int]) -> None:
        info = self._engine.info
        count = -(-len(prompt) // info.block_size)
        self._engine.write_kv(KvBlocks(name, 0, count, bytes(count * info.kv_bytes_per_block)))
        self._engine.start_decode(name, self._rng.randrange(3, VOCAB))

    def _take(self, step: StepOutput, now: int) -> None:
        for reserved in step.kv_reserved:
            one = self._all[reserved.request_id]
            if one.asked.answers_after is not None:
                one.answers_at = now + one.asked.answers_after
        for export in step.kv_exports:
            kv_payload.discard(export.data)
        for told in step.outputs:
            self._told(told)
        self.met["right guesses"] += step.accepted_tokens
        self.met["preempted"] += len(step.preempted)

    def _told(self, told: RequestOutput) -> None:
        one = self._all[told.request_id]
        assert one.last is None, f"{told.request_id}: something came behind the end"
        one.tokens += told.new_token_ids
        one.logprobs += len(told.logprobs or ())
        if told.prompt_logprobs is not None:
            assert len(told.prompt_logprobs) == len(one.asked.prompt) - 1
        ends = told.finish_reason is FinishReason.STOP
        if not one.output.finish:
            one.output.push(
                TokenDelta(token_ids=told.new_token_ids, finish=FINISH_STOP if ends else 0)
            )
        if told.finish_reason is not None:
            one.last = told
            self.met["pooled"] += told.pooled is not None
            self.met[f"hostile: {told.finish_reason}"] += one.asked.hostile
            del self._open[told.request_id]
            _judge(one, self._faults)
        elif one.output.stop is not None and not one.cancelled:
            self._cancel(told.request_id)  # as the tokenizer does

    def _at_the_end(self) -> None:
        engine = self._engine
        assert all(one.last is not None for one in self._all.values())
        assert not engine.scheduler.sequences
        assert not engine.aside.sequences
        assert not self._faults.launched
        assert engine.pool.num_free == engine.pool.num_blocks
        engine.check()
        load = engine.load()
        assert (load.waiting, load.running, load.queued_prefill_tokens) == (0, 0, 0)


def _judge(one: Following, faults: Faults) -> None:
    asked, last = one.asked, one.last
    assert last is not None
    sampling = asked.request("").sampling
    assert len(one.tokens) <= max(0, sampling.max_tokens)
    if sampling.logprobs is not None and not asked.wrong:
        assert one.logprobs == len(one.tokens)
    pooling = asked.more.get("pooling")
    if pooling is not None and last.finish_reason is FinishReason.STOP:
        count = len(pooling.logits_of) or pooling.dimensions or HIDDEN
        assert last.pooled is not None
        assert len(last.pooled) == 4 * count
        assert not one.tokens
        return
    known = not (asked.wrong or asked.hostile or asked.more.get("remote_prefill"))
    if sampling.constraint and known:
        ended = one.tokens and one.tokens[-1] in sampling.stop_token_ids
        written = one.tokens[:-1] if ended else one.tokens
        matcher = _compiler().matcher(_grammar(sampling.constraint))
        matcher.give(written)
        matcher.take(len(written))
        assert not matcher.num_given
    match last.finish_reason:
        case FinishReason.ERROR:
            assert last.error is not None
            bare = sampling.constraint or sampling.logit_bias or sampling.bad_words
            assert asked.wrong or faults.seen or bare, last.error
            assert last.error.message
        case FinishReason.CANCELLED:
            assert one.cancelled
        case FinishReason.LENGTH:
            full = len(asked.prompt) + len(one.tokens) + (asked.answers_after is not None)
            assert len(one.tokens) >= sampling.max_tokens - 1 or full >= WINDOW
        case FinishReason.STOP:
            assert not asked.wrong
            _judge_form(one, sampling)
        case FinishReason.PREFILL_DONE:
            assert asked.more.get("prefill_only")
            assert len(one.tokens) == 1


@cache
def _compiler() -> Compiler:
    return Compiler(str(DEMO), VOCAB, [EOS])


@cache
def _grammar(constraint: Constraint) -> str:
    return grammar_of(constraint)


def _judge_form(one: Following, sampling: Any) -> None:
    """Of an answer that has ended: who has a form, has it whole."""
    constraint, tokens = sampling.constraint, one.tokens
    stops = {*sampling.stop_token_ids}
    if constraint is None:
        if tokens:  # or one that began elsewhere
            assert tokens[-1] in stops | {EOS}
            assert len(tokens) >= sampling.min_tokens or one.asked.more
        return
    if one.asked.more.get("remote_prefill") or (tokens and tokens[-1] in stops):
        return  # its first token was nobody's choice; a stop token ends what is not whole
    if one.asked.hostile:
        return
    text = demo().decode([token for token in tokens if token != EOS])
    match constraint.kind:
        case "json_object":
            assert isinstance(json.loads(text, strict=False), dict)
        case "json_schema":
            jsonschema.validate(json.loads(text), json.loads(constraint.text))
        case "regex":
            assert re.fullmatch(constraint.text, text)
        case "choice":
            assert text in json.loads(constraint.text)

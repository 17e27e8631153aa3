"""The engine in one object: requests in, steps out. Single-threaded; the caller drives it."""

import itertools
import logging
from collections.abc import Callable
from dataclasses import replace

from services.worker.engine.adapters import Adapter, Adapters, AdaptersFull, PlaceInUse
from services.worker.engine.clock import now_ns
from services.worker.engine.config import EngineConfig
from services.worker.engine.executor import make_executor
from services.worker.engine.grammar.aside import Aside
from services.worker.engine.kv import payload as kv_payload
from services.worker.engine.kv.block_pool import BlockPool
from services.worker.engine.kv.tiers.loader import Loader, make_tier
from services.worker.engine.kv.transfer import KvTransfer, KvTransferError
from services.worker.engine.limits import find_error
from services.worker.engine.messages import KvBlocks, Request
from services.worker.engine.outputs import (
    FinishReason,
    Load,
    ModelInfo,
    RequestError,
    StepOutput,
)
from services.worker.engine.report import Report
from services.worker.engine.runners.runner import RunnerLost
from services.worker.engine.scheduling.cost_model import CostModel, StepShape
from services.worker.engine.scheduling.load_meter import LoadMeter
from services.worker.engine.scheduling.scheduler import Scheduler
from services.worker.engine.sequence import Sequence, Status
from services.worker.engine.speculation.draft_model import DraftProposer, with_room
from services.worker.engine.speculation.proposer import NgramProposer, Proposer
from services.worker.engine.speculation.speculation import Speculation
from services.worker.engine.steps import LATE, Running, Steps
from services.worker.engine.warm_up import warm_up

log = logging.getLogger(__name__)

LONG_STEP_S = 1.0


class Engine:
    """Commands take effect at once; what they bring about is told by the next `step`.

    No command raises because of what a request asks for: a refused or failed one ends with a
    RequestOutput that carries the error. Commands for unknown ids are ignored, for a request may
    have ended while the command was on its way.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Loads the model and warms up. Raises UnsupportedModel or ValueError."""
        self.config = config
        self.executor = make_executor(with_room(config))
        self._runner = self.executor.runner
        self.info: ModelInfo = self._runner.info
        groups = self.info.kv_groups
        self.pool = BlockPool(self.info.num_blocks, self.info.block_size, len(groups))
        self._cost = CostModel()
        warm_up(
            self._runner,
            self._cost,
            config.max_running,
            config.max_batched_tokens,
            config.guessed_rows if self.info.generates else 0,
        )
        tier = make_tier(config, self.info)
        self._meter = LoadMeter(self._cost, config.max_batched_tokens)
        self.scheduler = Scheduler(
            self.pool,
            self._cost,
            config.max_batched_tokens,
            config.max_running,
            config.prefix_caching,
            None if config.target_itl_ms is None else config.target_itl_ms / 1000,
            self._speculation(config),
            config.max_step_adapters,
            groups,
            keeps_all=config.draft_model is not None,
            overlaps=config.overlaps,
            tier=tier,
        )
        self.loader: Loader | None = None
        """Where there is a tier below the device."""
        if tier is not None:
            places, size = self.scheduler.places, self.info.block_size
            self.loader = Loader(tier, places, self._runner.cache, self._cost, size)
        self.adapters = Adapters(self._runner.adapt, self.info.max_adapters)
        self._eos_token_ids = frozenset(self.info.eos_token_ids)
        self._arrivals = itertools.count()
        self.on_long_step: Callable[[float], None] = lambda expected_s: None
        """Called before a step that is expected to take LONG_STEP_S or more."""
        self._transfer = KvTransfer(self._runner.cache, self.info)
        self._steps = Steps(self._runner)
        self._running: Running | None = None
        """Where steps overlap: the one that was launched behind the last one collected."""
        self.aside = Aside(config.model, self.info)
        self.stuck = False
        """The last step computed and told nothing, and the next will not before a command."""
        self._step_count = 0
        self._report = Report(self.scheduler, self._transfer, self._runner, self.load())

    def _speculation(self, config: EngineConfig) -> Speculation | None:
        if config.speculation == "off" or not self.info.generates:
            return None
        proposers: list[Proposer] = [
            NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
        ]
        if config.draft_model is not None:
            proposers.append(DraftProposer(config, self.info))
        depth, rows = config.num_speculative_tokens, config.guessed_rows
        return Speculation(proposers, self._cost, depth, rows)

    @property
    def news(self) -> list[int]:
        """File descriptors, of which one is readable when a step would find more, until `hear`."""
        return [self.aside.news, *([self.loader.tier.news] if self.loader else [])]

    def hear(self) -> None:
        """`news` were polled."""
        self.aside.hear()
        if self.loader:
            self.loader.tier.hear()

    @property
    def has_work(self) -> bool:
        """`step` would compute or report something, unless all blocks are held for others."""
        told = self._running or not self._report.is_empty
        told = told or (self.loader is not None and self.loader.tier.has_events)
        return bool(self.scheduler.num_pending or self.aside.sequences or told)

    def add(self, request: Request) -> None:
        """Queues a request. Raises ValueError if an unfinished one has its id."""
        name = request.request_id
        if name in self.scheduler.sequences or name in self.aside.sequences:
            raise ValueError(f"request id {name!r} is in use")
        error = find_error(request, self.info)
        if error is not None:
            self._report.refuse(request.request_id, error)
            return
        place = self.adapters.place(request.adapter) if request.adapter else -1
        if place is None:
            words = f"The adapter {request.adapter} is not loaded"
            self._report.refuse(request.request_id, RequestError("no_adapter", words, "adapter"))
            return
        sequence = Sequence(
            request,
            next(self._arrivals),
            self.info.block_size,
            self._eos_token_ids,
            self.info.max_model_len,
            now_ns(),
            place,
            len(self.info.kv_groups),
        )
        if request.sampling.constraint:
            self.aside.add(sequence)
        else:
            self.scheduler.add(sequence)

    def load_adapter(self, adapter: Adapter) -> str:
        """Requests may name it from now on. Gives why not, or nothing. Raises PlaceInUse and
        RunnerLost."""
        try:
            self.adapters.load(adapter)
        except (PlaceInUse, RunnerLost):
            raise
        except AdaptersFull as error:
            return str(error)
        except Exception as error:  # those of other requests go on
            log.exception("an adapter was not taken in")
            return f"the engine could not take it in: {type(error).__name__}"
        return ""

    def drop_adapter(self, id: str) -> None:
        """Requests may not name it from now on; it goes with the last of those that did."""
        self.adapters.drop(id)
        self._sweep_adapters()

    def _sweep_adapters(self) -> None:
        if self.adapters.leaving:
            waiting = self.aside.sequences.values()
            self.adapters.sweep({one.place for one in (*self.scheduler.present, *waiting)})

    def cancel(self, request_id: str) -> None:
        """Ends a request and frees its blocks."""
        if sequence := self.scheduler.sequences.get(request_id):
            self._report.finish(sequence, FinishReason.CANCELLED)
        elif sequence := self.aside.leave(request_id):
            self._report.leave(sequence, FinishReason.CANCELLED)

    def write_kv(self, blocks: KvBlocks) -> None:
        """Fills blocks of a reserved request, in order and without gaps; those that it holds
        already are skipped. A `SharedRef` is removed in any case."""
        sequence = self.scheduler.sequences.get(blocks.request_id)
        if sequence is None:
            kv_payload.discard(blocks.data)
            return
        try:
            self._transfer.write(sequence, blocks)
        except (OSError, ValueError, KvTransferError) as error:
            self._report.fail(sequence, RequestError("kv_transfer", str(error)))

    def start_decode(self, request_id: str, first_token: int) -> None:
        """Lets a reserved request go on after `first_token`, once all its blocks are written."""
        sequence = self.scheduler.sequences.get(request_id)
        if sequence is None:
            return
        awaited = sequence.status is Status.AWAITING_KV and sequence.remote
        if not awaited or not 0 <= first_token < self.info.vocab_size:
            self._report.fail(sequence, RequestError("kv_transfer", "start_decode out of place"))
        elif sequence.num_received < sequence.blocks_needed:
            message = f"{sequence.num_received} of {sequence.blocks_needed} KV blocks came"
            self._report.fail(sequence, RequestError("kv_transfer", message))
        elif reason := self.scheduler.start_decode(sequence, first_token):
            self._report.finish(sequence, reason)

    def step(self) -> StepOutput:
        """Computes one step, if there is anything to compute, and reports all since the last.
        Where steps overlap, the next one is launched before this one is waited for.

        Raises EngineBroken.
        """
        if running := self._running:
            self._announce(running.shape)
        else:
            running = self._launch()
            self._steps.constrain(running)
        self._running = self._launch_behind(running) if self.config.overlaps else None
        return self._collect(running, self._running)

    def _launch(self, before: Running | None = None) -> Running:
        started = now_ns()
        self._come_back()
        if self.loader:
            self.loader.come_back(idle=self.stuck and not before)
        step = self.scheduler.schedule()
        evicted = self.pool.take_evicted()
        if self.loader:
            self.loader.copy_out(evicted)
        self._report.schedule(step, started)
        if not before:
            self._announce(step.shape)
        running = Running(step.chunks, step.shape, started)
        self._steps.launch(running, before)
        return running

    def _come_back(self) -> None:
        """Queues those whose grammars are there."""
        if not self.aside.sequences:
            return
        back = list(self.aside.take())
        waits = self.scheduler.num_pending or self._running or not self._report.is_empty
        if not (back or waits):
            self.aside.wait()
            back += self.aside.take()
        for sequence, error in back:
            if error is not None:
                self._report.leave(sequence, FinishReason.ERROR, error)
            elif sequence.matcher and sequence.matcher.ended:  # by what was generated elsewhere
                self._report.leave(sequence, FinishReason.STOP)
            else:
                self.scheduler.add(sequence)

    def _launch_behind(self, running: Running) -> Running | None:
        """The next step, while one runs; None if nothing can be computed before that has ended."""
        if running.failed or not running.chunks:
            return None
        behind = self._launch(running)
        return behind if behind.chunks else None

    def _collect(self, running: Running, behind: Running | None) -> StepOutput:
        results = self._steps.collect(running, behind)
        ended = now_ns()
        for chunk, result in zip(running.chunks, results, strict=True):
            if chunk.sequence.status is Status.FINISHED or result is LATE:
                self.scheduler.drop(chunk)
            else:
                self._report.complete(chunk, result, running.started_ns, ended)
        if behind:
            self._go_on_with(behind, ended)
        duration_ns = ended - running.started_ns
        output = self._report.take()
        if running.computed_s is not None:
            self._learn(running.shape, running.computed_s, duration_ns, output.decode_tokens)
        self._sweep_adapters()
        self._step_count += 1
        output.step, output.started_ns = self._step_count, running.started_ns
        output.duration_ns = duration_ns
        output.kv_events = self.pool.take_events()
        if self.loader:
            output.tier_events = self.loader.tier.take_events()
            output.tier = replace(self.loader.tier.counts)
        output.pending = self.scheduler.num_pending + len(self.aside.sequences)
        output.load = self.load()
        # A chunk that was for nothing brings blocks back, as who was preempted does.
        told = output.outputs or output.kv_reserved or output.preempted
        self.stuck = not (running.chunks or told)
        return output

    def _go_on_with(self, behind: Running, began_ns: int) -> None:
        """The step behind is the one that runs, or was in vain."""
        behind.started_ns = max(behind.started_ns, began_ns)
        if not behind.in_vain:
            self._steps.constrain(behind)
            return
        for chunk in behind.chunks:
            self.scheduler.drop(chunk)
        self._running = None

    def _learn(
        self, shape: StepShape, computed_s: float, duration_ns: int, decode_tokens: int
    ) -> None:
        """What a step took, of which its device computed for `computed_s`."""
        self._meter.add(shape, computed_s, decode_tokens)
        if self.scheduler.speculation:
            self.scheduler.speculation.settle(shape, duration_ns / 1e9 - computed_s)

    def load(self) -> Load:
        scheduler, pool, meter = self.scheduler, self.pool, self._meter
        return Load(
            waiting=scheduler.num_waiting + len(self.aside.sequences),
            running=scheduler.num_running,
            max_running=scheduler.max_running,
            free_blocks=pool.num_free // len(self.info.kv_groups),
            total_blocks=self.info.token_blocks,
            block_size=pool.block_size,
            queued_prefill_tokens=scheduler.queued_prefill_tokens,
            prefill_tokens_per_s=meter.prefill_tokens_per_s,
            decode_step_ms=meter.decode_step_ms,
            prompt_share=scheduler.prompt_share,
            load_tokens_per_s=self.loader.tokens_per_s if self.loader else 0.0,
            load_delay_s=self.loader.tier.pace.delay_s if self.loader else 0.0,
        )

    def snapshot(self) -> list[bytes]:
        """Hashes of all prefix blocks that are held. Events of the steps after may be applied on
        top: some may be contained already, and repeating them leads to the same state."""
        return self.pool.snapshot()

    def check(self) -> None:
        """Raises IntegrityError if a block leaked. For idle moments: it looks at every block."""
        self.scheduler.check()

    def close(self) -> None:
        """Ends what runs beside it: for a process that goes on without it."""
        if self.loader:
            self.loader.tier.close()
        self.aside.close()
        self._steps.close(self._running)
        self._running = None
        self.executor.close()

    def _announce(self, shape: StepShape) -> None:
        expected_s = self._cost.step_s(shape)
        if expected_s >= LONG_STEP_S:
            self.on_long_step(expected_s)

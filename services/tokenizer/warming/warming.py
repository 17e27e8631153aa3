"""What is known of a chat's next prompt is computed while nobody waits (decision 0059).

It begins when an answer is whole and has left: nothing here is on a request's way. Looking is done
for one chat at a time, in a thread of its own, and not again soon where it found nothing to gain or
no worker with nothing else to do.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Coroutine
from functools import partial
from typing import Any, NamedTuple

from protos.common_pb2 import FINISH_LENGTH, FINISH_STOP, PRIORITY_LOW, Sampling, Usage
from protos.router_pb2 import GenerateRequest
from protos.tokenizer_pb2 import PromptRequest
from protos.worker_pb2 import TokenDelta
from services.common.config import TokenizerSettings
from services.common.errors import PenstockError
from services.common.fairness.fair_threads import FairThreads
from services.common.packed_ids import pack
from services.common.peers import Peers
from services.common.redis import Redis, RedisAway
from services.common.telemetry.spans import Remote, Span
from services.common.telemetry.telemetry import Telemetry, remote_parent, traceparent
from services.tokenizer import metrics
from services.tokenizer.answers.output import Output
from services.tokenizer.checkpoints.models import ServedModel
from services.tokenizer.prompts.context import Prompt
from services.tokenizer.warming.known import Known, known
from services.tokenizer.warming.payoff import Payoff, conversation

log = logging.getLogger(__name__)

_LEAST = 32  # tokens: two blocks, as most engines have them
_IN_VAIN = 8  # looks at chats of a kind that gained nothing, until only some are looked at
_SOME = 32  # one of so many
_PAUSE_S = 1.0  # after a router had no worker with nothing to do
_LONG_PAUSE_S = 600.0  # after a worker was lost, or anything else failed
_TIME_S = 30.0  # for a prompt's computation


class _Kind(NamedTuple):
    """What decides whether a template writes the history otherwise next time."""

    checkpoint: str
    reasoned: bool
    searched: bool


class Warming:
    def __init__(
        self,
        settings: TokenizerSettings,
        redis: Redis,
        namespace: str,
        routers: Peers,
        telemetry: Telemetry,
    ) -> None:
        self.is_on = settings.warm_tokens_per_minute > 0
        self._routers, self._telemetry = routers, telemetry
        self._payoff = Payoff(
            redis, namespace, settings.warm_tokens_per_minute, settings.warm_least_hits
        )
        self._threads = FairThreads(1, "warming")
        self._tasks: set[asyncio.Task[None]] = set()
        self._looks = False  # for one chat at a time
        self._in_vain: Counter[_Kind] = Counter()
        self._pauses: dict[str, float] = {}  # by model, until when; monotonic

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._threads.stop()

    def wants(self, request: PromptRequest) -> bool:
        """Whether what is answered should be kept until the answer is whole: a chat's that
        somebody waits for."""
        alone = request.choices <= 1 and not request.HasField("resume")
        waited_for = request.caller.priority != PRIORITY_LOW
        return self.is_on and alone and waited_for and request.HasField("chat")

    def answered(
        self,
        model: ServedModel,
        request: PromptRequest,
        prompt: Prompt,
        output: Output,
        trace: str,
    ) -> None:
        """One that is wanted was answered. Returns at once."""
        works = []
        if before := conversation(request):
            tenant = request.caller.tenant
            works.append(self._payoff.next_turn(tenant, model.name, before, output.usage()))
        if not self._looks and self._may(model, request, prompt, output):
            self._looks = True
            works.append(self._warm(model, request, prompt, output, remote_parent(trace)))
        for work in works:
            task = asyncio.create_task(self._quietly(model.name, work), name="warm a next turn")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _quietly(self, model: str, work: Coroutine[Any, Any, None]) -> None:
        """Nothing of it is owed to anybody."""
        try:
            await work
        except RedisAway:
            return
        except PenstockError as error:
            self._pauses[model] = time.monotonic() + _LONG_PAUSE_S
            log.info("prompts of %s are not warmed for now: %s", model, error.message)
        except Exception:
            self._pauses[model] = time.monotonic() + _LONG_PAUSE_S
            log.exception("a prompt of %s could not be warmed", model)

    def _may(
        self, model: ServedModel, request: PromptRequest, prompt: Prompt, output: Output
    ) -> bool:
        """A call, or what a rule ended, is followed by no question."""
        if output.finish not in (FINISH_STOP, FINISH_LENGTH) or prompt.was_cut:
            return False
        if time.monotonic() < self._pauses.get(model.name, 0.0):
            return False
        if not self._payoff.pays(request.caller.tenant, model.name):
            metrics.UNWARMED.labels("unpaid").inc()
            return False
        kind = _kind(model, request, output)
        if self._in_vain[kind] < _IN_VAIN:
            return True
        self._in_vain[kind] += 1
        return self._in_vain[kind] % _SOME == 0

    async def _warm(
        self,
        model: ServedModel,
        request: PromptRequest,
        prompt: Prompt,
        output: Output,
        parent: Remote,
    ) -> None:
        try:
            with self._telemetry.lone_span("warm", parent) as span:
                await self._warm_known(model, request, prompt, output, span)
        finally:
            self._looks = False

    async def _warm_known(
        self,
        model: ServedModel,
        request: PromptRequest,
        prompt: Prompt,
        output: Output,
        span: Span,
    ) -> None:
        tenant, kind = request.caller.tenant, _kind(model, request, output)
        answer = "".join(output.told)
        computed = prompt.token_ids, output.token_ids
        work = partial(known, model, request.chat, answer, *computed)
        found = await self._threads.run(tenant, work)
        span.set_attribute("tokens", 0 if found is None else found.gain)
        if found is None or found.gain < _LEAST:
            self._in_vain[kind] += 1
            return
        self._in_vain[kind] = 0
        if not await self._payoff.take(tenant, found.gain):
            metrics.UNWARMED.labels("budget").inc()
            return
        ahead = 0
        try:
            usage, took_s = await self._computed(model, request, found, span)
            ahead = usage.prompt_tokens - usage.cached_tokens
        finally:
            await self._payoff.settle(tenant, found.gain, ahead)
        span.set_attribute("warmed_tokens", ahead)
        if not ahead:
            self._pauses[model.name] = time.monotonic() + _PAUSE_S
            return
        key = conversation(request, answer)
        tokens = usage.prompt_tokens
        await self._payoff.warmed(tenant, model.name, key, tokens, ahead, took_s)

    async def _computed(
        self, model: ServedModel, request: PromptRequest, found: Known, span: Span
    ) -> tuple[Usage, float]:
        """What of it is in the cache now and was before, and seconds. Raises PenstockError."""
        wanted = GenerateRequest(
            caller=request.caller,
            model=model.routed_as,
            checkpoint=model.checkpoint,
            prompt_token_ids=pack(found.token_ids),
            sampling=Sampling(max_tokens=1),
            warm=True,
        )
        wanted.caller.priority = PRIORITY_LOW
        usage, began = Usage(), time.monotonic()

        def take(payload: bytes) -> None:
            usage.CopyFrom(TokenDelta.FromString(payload).usage)

        router = await self._routers.pick_least_loaded()
        asked = router.link.open(
            wanted.SerializeToString(),
            deadline=began + _TIME_S,
            traceparent=traceparent(span),
            on_item=take,
        )
        try:
            end = await asked.ended()
        finally:
            asked.cancel()
        if end.status.code:
            raise PenstockError.from_status(end.status)
        return usage, time.monotonic() - began


def _kind(model: ServedModel, request: PromptRequest, output: Output) -> _Kind:
    searched = any(passage.source_id for passage in request.chat.passages)
    return _Kind(model.checkpoint, output.reasoned, searched)

"""Whether prompts that are computed ahead are asked for.

What was computed ahead is noted in Redis under the conversation that it is for, and taken from
there by whichever replica has that conversation's next turn:

{ns}:{tenant}:warmed:of:{conversation}   "tokens known, of them computed ahead, seconds that took"
{ns}:{tenant}:warmed:spent:{minute}      tokens, over all replicas

Each replica judges by what itself has warmed and seen: where turns come to any of several, it sees
as many of the others' prompts as they see of its own.
"""

import time
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b

from protos.common_pb2 import Usage
from protos.tokenizer_pb2 import PromptRequest
from services.common.redis import Redis
from services.common.text.content import text_of
from services.tokenizer import metrics

KEPT_S = 600  # a next turn that comes later finds its prompt evicted, as a rule
_MINUTE_S = 60
_ENOUGH = 16  # prompts, before it is judged
_MEMORY = 64  # of them are remembered: then older ones count half
_TRIED = 16  # where it does not pay, one of so many is still warmed
_KNOWN_AT_MOST = 4096  # tenants and models


@dataclass(slots=True)
class _Record:
    """Of one tenant with one model."""

    warmed: float = 0.0
    hits: float = 0.0
    skipped: int = 0


class Payoff:
    def __init__(self, redis: Redis, namespace: str, tokens_a_minute: int, least: float) -> None:
        """`least`: share of what was warmed that must be asked for."""
        self._redis, self._namespace = redis, namespace
        self._tokens_a_minute, self._least = tokens_a_minute, least
        self._records: OrderedDict[tuple[str, str], _Record] = OrderedDict()

    def pays(self, tenant: str, model: str) -> bool:
        """As far as is known; where it does not, it is tried at times."""
        record = self._of(tenant, model)
        if record.warmed < _ENOUGH or record.hits >= self._least * record.warmed:
            return True
        record.skipped += 1
        return record.skipped % _TRIED == 0

    async def take(self, tenant: str, tokens: int) -> bool:
        """Whether so many are left of the tenant's budget for this minute; then they are spent.
        Raises RedisAway."""
        if await self._spend(tenant, tokens) <= self._tokens_a_minute:
            return True
        await self.settle(tenant, tokens, 0)
        return False

    async def settle(self, tenant: str, taken: int, computed: int) -> None:
        """Of those that were taken so many were computed, or more than those. Raises RedisAway."""
        if computed != taken:
            await self._spend(tenant, computed - taken)

    async def _spend(self, tenant: str, tokens: int) -> int:
        """What is spent in this minute now. Where it ended since they were taken, the next one has
        so many more."""
        key = f"{self._namespace}:{{{tenant}}}:warmed:spent:{int(time.time() / _MINUTE_S)}"
        async with self._redis.pipeline(transaction=True) as both:
            both.incrby(key, tokens)
            both.expire(key, 2 * _MINUTE_S)
            spent, _ = await both.execute()
        return int(spent)

    async def warmed(
        self, tenant: str, model: str, conversation: str, tokens: int, ahead: int, took_s: float
    ) -> None:
        """Of the first `tokens` of the next prompt the last `ahead` were computed. Raises
        RedisAway."""
        record = self._of(tenant, model)
        record.warmed += 1
        if record.warmed > _MEMORY:
            record.warmed, record.hits = record.warmed / 2, record.hits / 2
        told = f"{tokens} {ahead} {took_s:.6f}"
        await self._redis.set(self._key(tenant, conversation), told, ex=KEPT_S)

    async def next_turn(self, tenant: str, model: str, conversation: str, usage: Usage) -> None:
        """A chat that goes on was answered: was it warmed, and did that help? Raises RedisAway."""
        told = await self._redis.getdel(self._key(tenant, conversation))
        if told is None:
            return
        tokens, ahead, took_s = (float(one) for one in told.split())
        found = min(ahead, max(0.0, usage.cached_tokens - (tokens - ahead)))
        if not found:
            metrics.WARMED_TURNS.labels("evicted").inc()
            return
        self._of(tenant, model).hits += 1
        metrics.WARMED_TURNS.labels("hit").inc()
        metrics.WARMED_HIT_TOKENS.inc(found)
        metrics.WARMED_SAVED_SECONDS.inc(took_s * found / ahead)

    def _of(self, tenant: str, model: str) -> _Record:
        record = self._records.pop((tenant, model), None) or _Record()
        self._records[tenant, model] = record
        if len(self._records) > _KNOWN_AT_MOST:
            self._records.popitem(last=False)
        return record

    def _key(self, tenant: str, conversation: str) -> str:
        return f"{self._namespace}:{{{tenant}}}:warmed:of:{conversation}"


def conversation(request: PromptRequest, answer: str | None = None) -> str:
    """Up to its last question, or with the `answer` to that: what a chat and its next turn have in
    common, in words that both can tell. Empty: there was no answer yet."""
    chat = request.chat
    end = len(chat.messages)
    if answer is None:
        end = max((n for n, one in enumerate(chat.messages) if one.role == "user"), default=0)
        if not any(one.role == "assistant" for one in chat.messages[:end]):
            return ""
    said = [f"{one.role}\0{text_of(one)}" for one in chat.messages[:end]]
    if answer is not None:
        said.append(f"assistant\0{answer}")
    told = "\0\0".join([request.model, chat.template_options, *said])
    return blake2b(told.encode(), digest_size=16).hexdigest()

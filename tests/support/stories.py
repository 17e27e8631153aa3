"""An answer that a scripted tokenizer tells word by word, from wherever a request begins."""

import asyncio

from protos.common_pb2 import FINISH_STOP, FINISH_TOOL_CALLS, Usage
from protos.tokenizer_pb2 import PromptRequest, TextDelta, ToolCallDelta
from services.common.link import LinkCall
from services.gateway.metering.ledger import Entry, Ledger
from tests.support.gateway_rig import Rig, finish, plan, send
from tests.support.waiting import until

WORDS = ("The", " water", " rises", " by", " night", ".")
TEXT = "".join(WORDS)


class Story:
    """Says its words one by one, each when it may; goes on where a request says that it begins."""

    def __init__(self, rig: Rig) -> None:
        self.may = asyncio.Semaphore(0)
        self.words = WORDS
        self.resumed: list[int] = []  # tokens that requests began with
        rig.tokenizer.script = self

    def go(self, words: int = len(WORDS)) -> None:
        for _ in range(words):
            self.may.release()

    async def __call__(self, call: LinkCall, request: PromptRequest) -> None:
        begun = list(request.resume.choices)
        ids = list(begun[0].token_ids) if begun else []
        self.resumed.append(len(ids))
        assert ids == list(range(100, 100 + len(ids)))
        assert not begun or begun[0].characters == len("".join(self.words[: len(ids)]))
        for number in range(len(ids), len(self.words)):
            await self.may.acquire()
            delta = TextDelta(text=self.words[number], token_ids=[100 + number])
            if number == len(ids):
                delta.plan.CopyFrom(plan(request))
                delta.prompt_digest, delta.checkpoint = b"d", "c"
            call.send(delta.SerializeToString())
        used = Usage(prompt_tokens=8, completion_tokens=len(WORDS))
        call.send(TextDelta(finish=FINISH_STOP, usage=used).SerializeToString())


async def ledger(rig: Rig, count: int) -> list[Entry]:
    found: list[Entry] = []

    async def there() -> bool:
        entries = Ledger(rig.redis, rig.settings.namespace).entries()
        found[:] = [entry async for entry in entries]
        return len(found) >= count

    await until(there, 10, f"{count} entries")
    return found


async def calls_a_tool(call: LinkCall, request: PromptRequest) -> None:
    """Thinks, says something, and calls a tool."""
    send(call, reasoning="Let me", plan=plan(request))
    send(call, reasoning=" see.")
    send(call, "I ask.")
    send(call, tool_calls=[ToolCallDelta(index=0, name="pressure", arguments='{"pipe"')])
    send(call, tool_calls=[ToolCallDelta(index=0, arguments=': "main"}')])
    finish(call, 5, finish=FINISH_TOOL_CALLS)

"""A chat's next turn finds computed what was known of it, and no answer is the later for it."""

import asyncio
import json
from pathlib import Path

from protos import common_pb2, router_pb2
from protos.common_pb2 import FINISH_LENGTH, PRIORITY_LOW, Caller, Passage, Sampling, Usage
from protos.router_pb2 import GenerateRequest
from protos.tokenizer_pb2 import Chat, PromptRequest
from protos.worker_pb2 import TokenDelta
from services.common.link import LinkCall
from services.common.packed_ids import pack
from services.common.redis import Redis
from services.common.text.content import said
from services.tokenizer import metrics
from tests.support.fake_worker import BLOCK_SIZE, CHECKPOINT, MODEL
from tests.support.prompts import prompt_of
from tests.support.router_stack import PROMPT, Stack, ask
from tests.support.tokenizer_bed import TOKENIZER, bed, ids
from tests.support.tokenizers import write_tokenizer
from tests.support.waiting import until

NO_SYSTEM = """\
{%- if messages[0].role == 'system' -%}{{ raise_exception('no system') }}{%- endif -%}
{%- for m in messages -%}<|{{ m.role }}|>{{ m.content }}<|eos|>{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""
ANSWER = "The water at the end of the penstock has a pressure of 12 bar [1]."


def write(folder: Path) -> None:
    write_tokenizer(folder, chat_template=NO_SYSTEM)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))


def chat(*talk: str) -> PromptRequest:
    roles = ["user", "assistant"] * len(talk)
    passages = [Passage(title="T", text="It is 12 bar.", source_id="file-1")]
    return PromptRequest(
        caller=Caller(request_id="r", tenant="acme", priority=2, weight=1),
        model="tiny",
        chat=Chat(
            messages=[said(*one) for one in zip(roles, talk, strict=False)], passages=passages
        ),
        sampling=Sampling(max_tokens=60, temperature=0, seed=7),
    )


class Router:
    """Answers each request with the same, and computes what is to be warmed but for two blocks."""

    def __init__(self) -> None:
        self.warmed: list[GenerateRequest] = []
        self.holds = asyncio.Event()
        self.holds.set()

    async def __call__(self, call: LinkCall, request: GenerateRequest) -> None:
        count = len(prompt_of(request))
        if request.warm:
            self.warmed.append(request)
            await self.holds.wait()
            usage = Usage(prompt_tokens=count, cached_tokens=32)
            call.send(TokenDelta(finish=FINISH_LENGTH, usage=usage).SerializeToString())
            return
        usage = Usage(prompt_tokens=count, cached_tokens=count - 20)
        call.send(TokenDelta(token_ids=ids(ANSWER), usage=usage).SerializeToString())
        call.send(TokenDelta(finish=FINISH_LENGTH, usage=usage).SerializeToString())


async def test_what_is_known_of_the_next_turn_is_sent_on_and_the_turn_is_a_hit(
    tmp_path: Path, redis: Redis, redis_url: str, namespace: str
) -> None:
    router, hits = Router(), metrics.WARMED_TURNS.labels("hit")
    was = hits._value.get()
    options = {"warm_tokens_per_minute": 1000}
    async with bed(tmp_path, redis_url, namespace, router, write=write, **options) as b:
        assert (await b.ask(chat("What is the pressure?"))).status.code == 0
        await until(lambda: len(router.warmed) == 1)
        (first,) = router.warmed
        text = TOKENIZER.decode(prompt_of(first))
        assert ANSWER in text
        assert "Passages" not in text
        assert first.caller.priority == PRIORITY_LOW
        assert (first.caller.tenant, first.sampling.max_tokens) == ("acme", 1)

        async def is_noted() -> bool:
            keys = f"{namespace}:{{acme}}:warmed:of:*"
            return [key async for key in redis.scan_iter(keys)] != []

        await until(is_noted)
        (spent,) = [key async for key in redis.scan_iter(f"{namespace}:{{acme}}:warmed:spent:*")]
        assert int(await redis.get(spent) or 0) == len(prompt_of(first)) - 32
        assert 0 < await redis.ttl(spent) <= 120
        next_turn = chat("What is the pressure?", ANSWER, "And in bar?")
        assert (await b.ask(next_turn)).status.code == 0
        await until(lambda: hits._value.get() - was == 1)


async def test_an_answer_does_not_wait_for_it_and_one_at_a_time_is_enough(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    router = Router()
    router.holds.clear()
    options = {"warm_tokens_per_minute": 1000}
    async with bed(tmp_path, redis_url, namespace, router, write=write, **options) as b:
        line = chat("Which?")  # of a batch, which has no next turn
        line.caller.priority = PRIORITY_LOW
        assert not b.pipeline.warming.wants(line)
        for question in ("What?", "Why?", "Where?"):
            assert (await b.ask(chat(question))).status.code == 0
        await until(lambda: len(router.warmed) == 1)
        assert (await b.ask(chat("Who?"))).status.code == 0
        assert len(router.warmed) == 1


async def test_it_is_off_unless_there_is_a_budget(
    tmp_path: Path, redis: Redis, redis_url: str, namespace: str
) -> None:
    router = Router()
    async with bed(tmp_path, redis_url, namespace, router, write=write) as b:
        assert not b.pipeline.warming.wants(chat("What?"))
        assert (await b.ask(chat("What?"))).status.code == 0
        assert (await b.ask(chat("What?", ANSWER, "Why?"))).status.code == 0
        assert [key async for key in redis.scan_iter(f"{namespace}:*warmed*")] == []
    assert router.warmed == []


async def test_a_router_has_the_rest_computed_where_the_beginning_is(stack: Stack) -> None:
    worker = await stack.worker("w1")
    link = await stack.router()
    await ask(link).whole()
    await until(lambda: worker.running == 0)
    longer = [*PROMPT[:160], *range(1000, 1100)]
    deltas: list[TokenDelta] = []

    async def warm(tenant: str) -> Usage:
        request = router_pb2.GenerateRequest(
            caller=Caller(request_id="r", tenant=tenant, priority=3, weight=1),
            model=MODEL, prompt_token_ids=pack(longer), checkpoint=CHECKPOINT,
            sampling=common_pb2.Sampling(max_tokens=1), warm=True,
        )  # fmt: skip
        opened = link.open(
            request.SerializeToString(),
            deadline=asyncio.get_running_loop().time() + 60,
            on_item=lambda payload: deltas.append(TokenDelta.FromString(payload)),
        )
        assert (await opened.ended()).status.code == 0
        return deltas[-1].usage

    whole = len(longer) // BLOCK_SIZE * BLOCK_SIZE

    async def is_warmed() -> bool:  # once the worker has told that it has nothing to do
        return (await warm("acme")).prompt_tokens == whole

    await until(is_warmed)
    assert deltas[-1].usage.cached_tokens == 160
    assert (await warm("other")).prompt_tokens == 0
    again = await ask(link, longer).whole()
    assert again.usage.cached_tokens == whole

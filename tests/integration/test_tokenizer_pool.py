"""What a tokenizer makes of requests for numbers: prompts of each input, so many at once, and what
comes of the numbers that they get."""

import asyncio
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protos.common_pb2 import FINISH_NONE, FINISH_STOP, Caller, Pooling, TokenIds, Usage
from protos.router_pb2 import GenerateRequest
from protos.tokenizer_pb2 import Pool, PromptRequest, Resume
from protos.worker_pb2 import TokenDelta
from services.common.errors import invalid, unavailable
from services.common.link import LinkCall
from tests.support.prompts import prompt_of
from tests.support.tokenizer_bed import Bed, bed, cut_off, ids, question, write_model
from tests.support.waiting import until

PAIRS = (
    "<|bos|>{% for m in messages if m.role == 'query' %}Q:{{ m.content }}{% endfor %}"
    "{% for m in messages if m.role == 'document' %}|D:{{ m.content }}{% endfor %}|A:"
)
MODULE = "sentence_transformers.models."


def numbers_of(prompt: Iterable[int], size: int = 3) -> np.ndarray:
    """What the scripted model makes of a prompt."""
    found = np.array([math.sin(sum(prompt) + i) for i in range(size)], "<f4")
    return found / np.linalg.norm(found)


class Router:
    """Gives each request the numbers of its prompt; counts how many it has at once."""

    def __init__(self, wait: asyncio.Event | None = None) -> None:
        self.asked: list[GenerateRequest] = []
        self.now = self.most = 0
        self.wait = wait
        self.before: Callable[[LinkCall, GenerateRequest], None] = lambda call, request: None

    async def __call__(self, call: LinkCall, request: GenerateRequest) -> None:
        self.asked.append(request)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(0.001)
            if self.wait is not None:
                await self.wait.wait()
            self.before(call, request)
        finally:
            self.now -= 1
        count = len(request.pooling.logits_of) or 3
        delta = TokenDelta(
            finish=FINISH_STOP,
            usage=Usage(prompt_tokens=len(prompt_of(request)), cached_tokens=1),
        )
        delta.pooled = numbers_of(prompt_of(request), count).tobytes()
        call.send(delta.SerializeToString())


def pool(inputs: list[Any], queries: Sequence[Any] = (), **fields: Any) -> PromptRequest:
    def given(one: Any) -> Pool.Input:
        return (
            Pool.Input(text=one)
            if isinstance(one, str)
            else Pool.Input(token_ids=TokenIds(ids=one))
        )

    return PromptRequest(
        caller=Caller(request_id="r1", tenant="t"),
        model="tiny",
        pool=Pool(inputs=map(given, inputs), queries=map(given, queries), **fields),
    )


def told(b: Bed) -> dict[int, np.ndarray]:
    """By input; each is told of once."""
    found = [one for delta in b.deltas for one in delta.pooled]
    assert not [index for index, count in Counter(one.index for one in found).items() if count > 1]
    return {one.index: np.frombuffer(one.values, "<f4") for one in found}


def writes(config: dict[str, Any], template: str = "", **files: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        write_model(folder)
        (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 64, **config}))
        for name, content in files.items():
            path = folder / name.replace("__", "/").replace("_json", ".json")
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(content))
        if template:
            path = folder / "tokenizer_config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))

    return write


async def test_each_input_gets_its_vector_so_many_at_once(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    router = Router()
    inputs = [*(f"text number {i} of them" for i in range(60)), [9, 8, 7]]
    async with bed(tmp_path, redis_url, namespace, router) as b:
        end = await b.ask(pool(inputs, dimensions=2))
        assert end.status.code == 0
        found = told(b)
        prompts = [one if isinstance(one, list) else ids(one) for one in inputs]
        for index, prompt in enumerate(prompts):
            np.testing.assert_array_equal(found[index], numbers_of(prompt))
        assert router.most == 16
        assert {(r.pooling.kind, r.pooling.dimensions) for r in router.asked} == {(Pooling.LAST, 2)}
        assert {r.caller.tenant for r in router.asked} == {"t"}
        finishes = [delta.finish for delta in b.deltas]
        assert finishes == [FINISH_NONE] * 60 + [FINISH_STOP]
        assert sum(d.usage.prompt_tokens for d in b.deltas) == sum(map(len, prompts))
        assert sum(d.usage.cached_tokens for d in b.deltas) == 61
        placed = [one for one in end.record.decisions if one.subject == "placement"]
        assert len(placed) == 8, "the record tells of some of them"
        assert [one.choice for one in end.record.decisions if one.subject == "pool"] == ["embed"]
        await b.ask(pool(["a"], pooling=Pooling.MEAN))
        assert router.asked[-1].pooling.kind == Pooling.MEAN


@pytest.mark.parametrize(("queue_limit", "at_once"), [(2, 2), (0, 1), (256, 16)])
async def test_inputs_of_one_request_never_fill_the_routers_queue(
    tmp_path: Path,
    redis_url: str,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    queue_limit: int,
    at_once: int,
) -> None:
    """An idle router would refuse it, for ever."""
    monkeypatch.setenv("PENSTOCK_ROUTER__QUEUE_LIMIT", str(queue_limit))
    router = Router()
    async with bed(tmp_path, redis_url, namespace, router) as b:
        end = await b.ask(pool([f"text number {i}" for i in range(30)]))
        assert end.status.code == 0
        assert len(told(b)) == 30
        assert router.most == at_once


async def test_scores_are_of_two_embeddings_where_the_model_reads_no_pairs(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    router = Router()
    modules = [{"type": MODULE + "Pooling", "path": "1_Pooling"}]
    config = {"pooling_mode_mean_tokens": True}
    write = writes(
        {"architectures": ["Qwen3Model"]},
        modules_json=modules,
        **{"1_Pooling__config_json": config},
    )
    async with bed(tmp_path, redis_url, namespace, router, write=write) as b:
        documents, queries = ["one", "two", [5, 6]], ["which?"]
        for asked in (queries, ["a", "b", [4]]):
            router.asked.clear()
            assert (await b.ask(pool(documents, asked, task=Pool.SCORE))).status.code == 0
            assert len(router.asked) == 3 + len(asked)
            assert {r.pooling.kind for r in router.asked} == {Pooling.MEAN}
            found = told(b)
            vectors = [numbers_of(ids(d) if isinstance(d, str) else d) for d in documents]
            for index, vector in enumerate(vectors):
                query = asked[index % len(asked)]
                theirs = numbers_of(ids(query) if isinstance(query, str) else query)
                assert found[index] == pytest.approx([vector @ theirs], abs=1e-6)
            count = sum(len(prompt_of(r)) for r in router.asked)
            assert sum(d.usage.prompt_tokens for d in b.deltas) == count
        # A second tokenizer has to compute the queries again; they are charged once.
        first, *_ = b.deltas
        rest = pool(documents, asked, task=Pool.SCORE)
        rest.resume.CopyFrom(Resume(checkpoint=first.checkpoint, policy=first.policy))
        rest.resume.pooled.extend(one.index for one in first.pooled)
        before = first.usage.prompt_tokens
        router.asked.clear()
        assert (await b.ask(rest)).status.code == 0
        assert len(told(b)) == 2
        assert len(router.asked) == 2 + len(asked)
        assert before + sum(d.usage.prompt_tokens for d in b.deltas) == count
        refused = await b.refused(question())
        assert (refused.param, refused.reason) == ("model", "unsupported_model")
        assert "makes no text" in refused.message


LOGITS = {"true_token_id": 40, "false_token_id": 41}


@pytest.mark.parametrize("logits", [LOGITS, LOGITS | {"false_token_id": None}])
async def test_a_model_of_pairs_reads_them_by_its_template(
    tmp_path: Path, redis_url: str, namespace: str, logits: dict[str, Any]
) -> None:
    """A document that writes out the template's control tokens does not end it."""
    router = Router()
    modules = [
        {"type": MODULE + "Transformer", "path": ""},
        {"type": "a.LogitScore", "path": "1_LogitScore"},
    ]
    write = writes(
        {"architectures": ["Qwen3ForCausalLM"]},
        PAIRS,
        modules_json=modules,
        **{"1_LogitScore__config_json": logits},
    )
    async with bed(tmp_path, redis_url, namespace, router, write=write) as b:
        documents = ["good", "<|bos|>bad"]
        assert (await b.ask(pool(documents, ["so?"], task=Pool.SCORE))).status.code == 0
        by_prompt = {tuple(prompt_of(r)): r for r in router.asked}
        good = (*ids("<|bos|>"), *ids("Q:so?|D:good|A:"))
        assert good in by_prompt
        assert all(prompt.count(1) == 1 for prompt in by_prompt)
        wanted = [id for id in logits.values() if id is not None]
        assert list(by_prompt[good].pooling.logits_of) == wanted
        yes, *no = numbers_of(good, len(wanted)).tolist()
        assert told(b)[0] == pytest.approx([1 / (1 + math.exp(sum(no) - yes))], abs=1e-6)
        refused = await b.refused(pool(["a", [5]], ["b"], task=Pool.SCORE))
        assert refused.param == "inputs[1]"


async def test_classes_have_names_and_probabilities(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    router = Router()
    named = {
        "architectures": ["LlamaForSequenceClassification"],
        "id2label": {"0": "no", "1": "yes"},
    }
    async with bed(tmp_path, redis_url, namespace, router, write=writes(named)) as b:
        assert (await b.ask(pool(["a", "b"], task=Pool.CLASSIFY))).status.code == 0
        assert [list(d.labels) for d in b.deltas] == [["no", "yes"], []]
        for index, text in enumerate(("a", "b")):
            powers = np.exp(numbers_of(ids(text), 2))
            assert told(b)[index] == pytest.approx(powers / powers.sum(), abs=1e-6)
        for asked, words in (
            (pool(["a"]), "makes no embeddings"),
            (pool(["a"], ["b"], task=Pool.SCORE), "has 2 classes"),
            (question(), "makes no text"),
        ):
            refused = await b.refused(asked)
            assert refused.param == "model"
            assert words in refused.message


async def test_one_class_is_a_score_of_both_texts_put_together(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    router = Router()
    one = {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1}
    async with bed(tmp_path, redis_url, namespace, router, write=writes(one)) as b:
        assert (await b.ask(pool(["doc"], ["query"], task=Pool.SCORE))).status.code == 0
        (asked,) = router.asked
        assert prompt_of(asked) == [*ids("query"), *ids("doc")]
        assert list(asked.pooling.logits_of) == [0]
        (logit,) = numbers_of(prompt_of(asked), 1)
        assert told(b)[0] == pytest.approx([1 / (1 + math.exp(-logit))], abs=1e-6)


async def test_what_is_wrong_with_an_input_is_told_by_its_name_before_any_is_computed(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    router = Router()
    async with bed(tmp_path, redis_url, namespace, router, write=writes({})) as b:
        for request, param, reason in (
            (pool(["a", "b", "c " * 70]), "inputs[2]", "context_length_exceeded"),
            (pool(["a", [5] * 65]), "inputs[1]", "context_length_exceeded"),
            (pool(["a", [320]]), "inputs[1]", ""),
            (pool(["a", ""]), "inputs[1]", ""),
            (pool(["a"] * 2049), "inputs", ""),
            (pool([]), "inputs", ""),
            (pool(["a"], ["q"]), "queries", ""),
            (pool(["a", "b", "c"], ["q", "r"], task=Pool.SCORE), "queries", ""),
            (pool(["a"], ["q " * 70], task=Pool.SCORE), "queries[0]", "context_length_exceeded"),
            (pool(["a", "a top secret"]), "inputs[1]", "content_policy"),
            (pool(["top secret", "c " * 9000]), "inputs[1]", "context_length_exceeded"),
            (pool(["a", ids("a top secret")]), "inputs[1]", "content_policy"),
            (pool(["a"], task=Pool.CLASSIFY), "model", "unsupported_model"),
        ):
            refused = await b.refused(request)
            assert (refused.param, refused.reason) == (param, reason), refused.message
        b.tokenizer.service._pipeline = replace(b.pipeline, max_pooled_tokens=120)
        refused = await b.refused(pool([[5] * 40] * 4))
        assert (refused.param, refused.reason) == ("inputs", "too_many_tokens")
        assert not router.asked
        assert (await b.ask(pool([[5] * 40] * 3))).status.code == 0
        assert (await b.ask(pool([[5] * 64]))).status.code == 0, "it may fill the window"


async def test_one_that_fails_ends_the_others_and_a_cancel_travels(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    router = Router(wait=asyncio.Event())

    def fail(call: LinkCall, request: GenerateRequest) -> None:
        if prompt_of(request) == ids("bad"):
            router.wait = asyncio.Event()
            raise invalid("odd", "dimensions", stage="worker")

    async with bed(tmp_path, redis_url, namespace, router) as b:
        running = b.open(pool(["a", "b"]))
        await until(lambda: len(router.asked) == 2, what="both are there")
        running.cancel()
        await until(lambda: b.router().cancelled == 2, what="both are cancelled")
        router.before, router.wait = fail, None
        refused = await b.refused(pool(["bad", *(f"text {i}" for i in range(50))]))
        assert (refused.param, refused.stage) == ("dimensions", "worker")
        assert len(router.asked) < 40


async def test_a_router_that_is_lost_costs_what_it_had_alone(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    first, second = Router(), Router()
    cut = False

    def dies(call: LinkCall, request: GenerateRequest) -> None:
        nonlocal cut
        if not cut and len(first.asked) + len(second.asked) > 20:
            cut = True
            cut_off(call._link._server)

    first.before = second.before = dies
    inputs = [f"text {i}" for i in range(50)]
    async with bed(tmp_path, redis_url, namespace, first, second) as b:
        assert (await b.ask(pool(inputs))).status.code == 0
        found = told(b)
        assert cut
        assert all((found[i] == numbers_of(ids(text))).all() for i, text in enumerate(inputs))
        assert len(first.asked) + len(second.asked) <= 50 + 16


async def test_a_checkpoint_that_is_replaced_gives_no_second_half(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    """Vectors of two checkpoints have nothing to do with each other."""
    router = Router()
    after = 0

    def replaced(call: LinkCall, request: GenerateRequest) -> None:
        if len(router.asked) > after:
            raise unavailable("gone", stage="router", reason="checkpoint_replaced")

    router.before = replaced
    async with bed(tmp_path, redis_url, namespace, router) as b:
        refused = await b.refused(pool(["a"]))
        assert refused.reason == "model_not_read", "it looked for another checkpoint"
        router.asked.clear()
        after = 30
        refused = await b.refused(pool(["a"] * 60))
        assert refused.reason == "checkpoint_replaced"
        router.before = lambda call, request: None
        again = pool(["a", "b", "c", "d"])
        digest = b.deltas[0].checkpoint
        again.resume.CopyFrom(Resume(checkpoint=digest, pooled=[2, 0]))
        assert (await b.ask(again)).status.code == 0
        assert told(b).keys() == {1, 3}
        again.resume.checkpoint = "another"
        assert (await b.refused(again)).reason == "cannot_resume"

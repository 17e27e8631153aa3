"""Adapters by name through all services: listed, mixed with their base, split, gone on with when a
worker is lost, loaded and dropped while it runs."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import torch
import transformers

from services.cli.stack.wanted_models import WantedModels
from services.common.config import ModelSpec
from tests.support import adapters
from tests.support.checkpoint import write_checkpoint
from tests.support.cluster import Cluster
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = "the water is here " * 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), window=2048)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    names = ("pirate", "lawyer", "late")
    return {n: adapters.make(folder / n, model, seed=i) for i, n in enumerate(names)}


@pytest.fixture(scope="module")
def expected(
    tmp_path_factory: pytest.TempPathFactory, model: Path, files: dict[str, Path]
) -> dict[str, str]:
    """By name, what transformers says with merged weights."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    folder, found = tmp_path_factory.mktemp("merged"), {}
    for name in ("tiny", *files):
        own = adapters.merge(model, files[name], folder / name, 2) if name in files else model
        loaded = transformers.AutoModelForCausalLM.from_pretrained(own, dtype=torch.float32)
        inputs = tokenizer(PROMPT, return_tensors="pt")
        with torch.inference_mode():
            output = loaded.generate(
                **inputs, max_new_tokens=30, min_new_tokens=30, do_sample=False
            )
        ids = output[0, inputs.input_ids.shape[1] :]
        found[name] = tokenizer.decode(ids, skip_special_tokens=True)
    assert len({*found.values()}) == 4
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def penstock(
    tmp_path_factory: pytest.TempPathFactory, model: Path, files: dict[str, Path]
) -> AsyncIterator[Cluster]:
    served = {name: str(files[name]) for name in ("pirate", "lawyer")}
    spec = ModelSpec(name="tiny", path=str(model), adapters=served)
    environment = {"PENSTOCK_ROUTER__SPLIT": "always", "PENSTOCK_WORKER__MAX_ADAPTERS": "2"}
    async with Cluster(tmp_path_factory.mktemp("cluster"), [spec], environment) as cluster:
        await cluster.start(workers=["prefill", "decode", "decode"])
        yield cluster


async def ask(penstock: Cluster, model: str, **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 30, "temperature": 0}
    async with penstock.api() as http:
        return await http.post("/v1/completions", json=body | {"ignore_eos": True} | fields)


async def text(penstock: Cluster, model: str) -> str:
    answer = (await ask(penstock, model)).json()
    assert answer.get("model") == model, answer
    found: str = answer["choices"][0]["text"]
    return found


async def listed(penstock: Cluster) -> dict[str, str | None]:
    async with penstock.api() as http:
        data = (await http.get("/v1/models")).json()["data"]
    return {one["id"]: one.get("parent") for one in data}


async def test_each_name_is_listed_and_answers_as_its_merged_weights_do(
    penstock: Cluster, expected: dict[str, str]
) -> None:
    """All at once, and again, from the prefix cache."""
    await until(lambda: is_listed(penstock, "lawyer", True), what="the adapters are listed")
    found = await listed(penstock)
    assert {n: found[n] for n in ("tiny", "pirate", "lawyer")} == {
        "tiny": None,
        "pirate": "tiny",
        "lawyer": "tiny",
    }
    names = ["tiny", "pirate", "lawyer"]
    for _ in range(2):
        answers = await asyncio.gather(*(text(penstock, name) for name in names * 2))
        assert answers == [expected[name] for name in names * 2]


async def is_listed(penstock: Cluster, name: str, there: bool) -> bool:
    return (name in await listed(penstock)) == there


async def test_prefixes_are_each_adapters_own(penstock: Cluster) -> None:
    prompt = "here is the water " * 30

    async def cached(model: str) -> int:
        usage = (await ask(penstock, model, prompt=prompt, max_tokens=2)).json()["usage"]
        found: int = usage["prompt_tokens_details"]["cached_tokens"]
        return found

    assert [await cached(name) for name in ("tiny", "pirate")] == [0, 0]
    assert await cached("pirate") > 0


async def test_when_a_worker_is_lost_another_one_goes_on(
    penstock: Cluster, expected: dict[str, str]
) -> None:
    busy = asyncio.create_task(penstock.busy_worker("decode"))  # it may be done when we have read
    async with (
        penstock.api() as http,
        http.stream(
            "POST",
            "/v1/completions",
            json={
                "model": "pirate",
                "prompt": PROMPT,
                "max_tokens": 1400,
                "temperature": 0,
                "stream": True,
                "ignore_eos": True,
            },
        ) as response,
    ):
        told, finish = "", None
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:]).get("choices", []):
                told += choice["text"]
                finish = choice["finish_reason"] or finish
            if len(told) > 10 and all(p.sound for p in penstock.of("worker")):
                (await busy).kill()
    assert finish == "length"
    assert told.startswith(expected["pirate"])


async def test_adapters_come_and_go_while_it_runs(
    penstock: Cluster, files: dict[str, Path], expected: dict[str, str]
) -> None:
    wanted = WantedModels(penstock.client, penstock.namespace)
    await wanted.start_with(penstock.models, "test")
    assert (await ask(penstock, "late")).status_code == 404
    assert not await wanted.add_adapter("tiny", "lawyer", str(files["late"]))  # there is one
    assert await wanted.remove_adapter("lawyer")
    assert not await wanted.remove_adapter("lawyer")
    await until(lambda: is_listed(penstock, "lawyer", False), what="it is dropped")
    assert (await ask(penstock, "lawyer")).status_code == 404
    assert await wanted.add_adapter("tiny", "late", str(files["late"]))
    await until(lambda: is_listed(penstock, "late", True), what="it is loaded")
    names = ["late", "tiny", "pirate"]
    assert [await text(penstock, name) for name in names] == [expected[name] for name in names]

    assert await wanted.add_adapter("tiny", "much", str(files["lawyer"]))

    async def why() -> str:
        return (await wanted.look()).failures.get("much", "")

    await until(lambda: told(why), what="it is told that there is no place for one more")
    assert "2 adapters are loaded" in await why()
    assert await text(penstock, "tiny") == expected["tiny"]


async def told(why: Any) -> bool:
    return bool(await why())

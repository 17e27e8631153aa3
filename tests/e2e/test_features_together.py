"""Features of the API by twos, the whole way: each pair gives the same by REST at once, streamed,
by gRPC, and from a worker that does it all without guessing; what each of them promises holds.

The others are of a prefill and a decode worker, which guess ahead (docs/engine.md: the table).
"""

import asyncio
import itertools
import json
import re
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from google.protobuf.json_format import ParseDict
from jsonschema import validate

from protos import gateway_pb2, gateway_pb2_grpc
from protos.common_pb2 import FINISH_LENGTH, FINISH_STOP, FINISH_TOOL_CALLS
from services.common.config import ModelSpec
from tests.support.cluster import Cluster
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASKED = "What is the pressure of the water?"
SHAPE = {
    "type": "object",
    "properties": {"turns": {"enum": [1, 22, 333]}, "on": {"type": ["boolean", "null"]}},
    "required": ["turns", "on"],
    "additionalProperties": False,
}
# Of REST, and of gRPC's ChatRequest in proto's JSON.
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "drawn": (
        drawn := {"temperature": 1.3, "top_p": 0.95, "top_k": 60, "min_p": 0.01, "seed": 11},
        {"sampling": drawn},
    ),
    "edits": (
        edits := {
            "frequency_penalty": 1.5,
            "presence_penalty": 0.5,
            "repetition_penalty": 1.2,
            "logit_bias": {"120": -100, "90": 3},
            "min_tokens": 8,
        },
        {"sampling": edits},
    ),
    "logprobs": ({"logprobs": True, "top_logprobs": 2}, {"sampling": {"logprobs": 2}}),
    "n": ({"n": 3}, {"sampling": {"n": 3}}),
    "stop": (stop := {"stop": ["e", "3"]}, {"sampling": stop}),
    "form": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "shape", "strict": True, "schema": SHAPE},
            }
        },
        {"constraint": {"json_schema": json.dumps(SHAPE)}},
    ),
    "tools": (
        {
            "tools": [
                {
                    "type": "function",
                    "function": {"name": name, "parameters": SHAPE, "strict": True},
                }
                for name in ("move", "turn")
            ],
            "tool_choice": "required",
        },
        {
            "tools": [
                {"name": name, "parameters": json.dumps(SHAPE), "strict": True}
                for name in ("move", "turn")
            ],
            "tool_choice": {"mode": "REQUIRED"},
        },
    ),
}
_SPECIAL = re.compile(rb"<\|\w+\|>")
"""Told with its logprob, and no text."""
PAIRS = [*itertools.combinations(FEATURES, 2), tuple(FEATURES)]


@dataclass
class Choice:
    text: str = ""
    calls: dict[int, list[str]] = field(default_factory=lambda: defaultdict(lambda: ["", ""]))
    """By index: name and arguments."""
    finish: str = ""
    logprobs: list[tuple[bytes, float, int]] = field(default_factory=list)
    """Of each token: its bytes, its own, and of how many best ones."""

    def add_rest(self, said: dict[str, Any], finish: str | None, told: Any) -> None:
        self.text += said.get("content") or ""
        for place, call in enumerate(said.get("tool_calls") or ()):
            one = self.calls[call.get("index", place)]
            one[0] += call["function"].get("name") or ""
            one[1] += call["function"].get("arguments") or ""
        self.finish = finish or self.finish
        for token in (told or {}).get("content") or ():
            best = len(token["top_logprobs"])
            self.logprobs.append((bytes(token["bytes"]), round(token["logprob"], 3), best))


Told = dict[int, Choice]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def penstock(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: Path
) -> AsyncIterator[Cluster]:
    """`tiny` of a prefill and two decode workers that guess, `whole` of one that does neither."""
    models = [ModelSpec(name=name, path=str(checkpoint)) for name in ("tiny", "whole")]
    own = {"PENSTOCK_ROUTER__SPLIT": "always"}
    folder = tmp_path_factory.mktemp("features")
    async with Cluster(folder, models, environment=own) as cluster:
        tiny, whole = (json.dumps([model.model_dump()]) for model in models)
        for role in ("prefill", "decode", "decode"):
            cluster.spawn("worker", WORKER__ROLE=role, MODELS=tiny)
        cluster.spawn("worker", WORKER__ROLE="both", MODELS=whole, WORKER__SPECULATION="off")
        await cluster.up(*cluster.processes)
        await cluster.start(workers=["prefill", "decode", "decode", "both"])
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(penstock: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with penstock.api() as http:
        yield http


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stub(penstock: Cluster) -> AsyncIterator[gateway_pb2_grpc.InferenceStub]:
    replica = penstock.of("gateway")[0].replica
    assert replica is not None
    async with grpc.aio.insecure_channel(replica.facts["grpc"]) as channel:
        yield gateway_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]


async def at_once(api: httpx.AsyncClient, body: dict[str, Any]) -> Told:
    answer = await api.post("/v1/chat/completions", json=body)
    assert answer.is_success, answer.text
    told: Told = defaultdict(Choice)
    for choice in answer.json()["choices"]:
        told[choice["index"]].add_rest(
            choice["message"], choice["finish_reason"], choice.get("logprobs")
        )
    return told


async def streamed(
    api: httpx.AsyncClient, body: dict[str, Any], seen: list[str] | None = None
) -> Told:
    """`seen`: gets the request's id, and then its lines."""
    told: Told = defaultdict(Choice)
    seen = [] if seen is None else seen
    async with api.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as answer:
        assert answer.is_success, await answer.aread()
        seen.append(answer.headers["x-request-id"])
        async for line in answer.aiter_lines():
            seen.append(line)
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                told[choice["index"]].add_rest(
                    choice["delta"], choice["finish_reason"], choice.get("logprobs")
                )
    return told


FINISHES = {FINISH_LENGTH: "length", FINISH_STOP: "stop", FINISH_TOOL_CALLS: "tool_calls"}


async def by_grpc(
    stub: gateway_pb2_grpc.InferenceStub, request: gateway_pb2.ChatRequest, key: str
) -> Told:
    told: Told = defaultdict(Choice)
    metadata = (("authorization", f"Bearer {key}"),)
    async for event in stub.Chat(request, metadata=metadata, timeout=60):
        one = told[event.choice]
        one.text += event.text
        for call in event.tool_calls:
            one.calls[call.index][0] += call.name
            one.calls[call.index][1] += call.arguments
        one.finish = FINISHES.get(event.finish, one.finish)
        for token in event.logprobs:
            own = token.token
            one.logprobs.append((own.bytes, round(own.logprob, 3), len(token.top)))
    return told


def asked(features: tuple[str, ...]) -> tuple[dict[str, Any], gateway_pb2.ChatRequest]:
    body: dict[str, Any] = {"model": "tiny", "temperature": 0, "seed": 3, "max_tokens": 160}
    body["messages"] = [{"role": "user", "content": ASKED}]
    wanted: dict[str, Any] = {"model": "tiny"}
    wanted["messages"] = [{"role": "user", "content": [{"text": ASKED}]}]
    sampling = {"temperature": 0, "seed": 3, "max_tokens": 160}
    for feature in features:
        rest, rpc = FEATURES[feature]
        body |= rest
        sampling |= rpc.get("sampling", {})
        wanted |= rpc
    wanted["sampling"] = sampling
    return body, ParseDict(wanted, gateway_pb2.ChatRequest())


@pytest.mark.parametrize("features", PAIRS, ids="+".join)
async def test_it_is_the_same_whichever_the_way_and_as_promised(
    penstock: Cluster,
    api: httpx.AsyncClient,
    stub: gateway_pb2_grpc.InferenceStub,
    features: tuple[str, ...],
) -> None:
    body, request = asked(features)
    told, *others = await asyncio.gather(
        at_once(api, body),
        streamed(api, body),
        by_grpc(stub, request, penstock.key),
        at_once(api, body | {"model": "whole"}),
    )
    for way, other in zip(("streamed", "gRPC", "whole"), others, strict=True):
        assert other == told, way
    assert sorted(told) == [*range(3 if "n" in features else 1)]
    for choice in told.values():
        as_promised(choice, features)
    if {"n", "drawn"} <= {*features} and not {"form", "tools", "stop"} & {*features}:
        assert len({choice.text for choice in told.values()}) == 3, "each has a seed of its own"


LONG = {"pattern": "^([a-d]{9} ){120}$", "type": "string"}
LASTING: dict[str, dict[str, Any]] = {
    "edits": edits | drawn | {"logprobs": True, "top_logprobs": 2, "ignore_eos": True},
    "n": drawn | {"n": 3, "stop": ["no such text"], "ignore_eos": True},
    "form": drawn | {"guided_json": LONG, "logprobs": True, "top_logprobs": 2},
    "tools": FEATURES["tools"][0]
    | {
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "spell",
                    "parameters": {"type": "object", "properties": {"a": LONG}, "required": ["a"]},
                    "strict": True,
                },
            }
        ]
    },
}


async def test_a_worker_that_is_lost_is_seen_in_none_of_them(
    penstock: Cluster, api: httpx.AsyncClient
) -> None:
    """Another one goes on, with edits, a form or a call that were begun elsewhere."""
    common = asked(())[0] | {"max_tokens": 1600}
    bodies = [common | lasting for lasting in LASTING.values()]
    wanted = [await at_once(api, body | {"model": "whole"}) for body in bodies]
    seen: list[list[str]] = [[] for _ in bodies]
    streams = [asyncio.create_task(streamed(api, *one)) for one in zip(bodies, seen, strict=True)]
    # No more than two: where the machine is busy the first may have ended when the last begins.
    await until(lambda: sum(len(lines) > 1 for lines in seen) >= 2, 30, "two have begun")
    (await penstock.busy_worker("decode")).kill()
    for name, told, want in zip(LASTING, await asyncio.gather(*streams), wanted, strict=True):
        assert told == want, name
    records = [(await api.get(f"/v1/requests/{lines[0]}")).json() for lines in seen]
    moved = [d for r in records for d in r["decisions"] if d["subject"] == "failover"]
    assert moved, "some were on it"


def as_promised(choice: Choice, features: tuple[str, ...]) -> None:
    if "tools" in features:
        assert (choice.finish, bool(choice.calls)) == ("tool_calls", True)
        for name, arguments in choice.calls.values():
            assert name in ("move", "turn")
            validate(json.loads(arguments), SHAPE)
    elif "stop" in features and "edits" not in features:  # whose `min_tokens` go before it
        assert not {"e", "3"} & {*choice.text}
    elif "form" in features and "stop" not in features:
        assert choice.finish == "stop"
        validate(json.loads(choice.text), SHAPE)
    if "logprobs" in features:
        assert choice.logprobs
        assert {best for _, _, best in choice.logprobs} == {2}
        if "tools" not in features:
            told = _SPECIAL.sub(b"", b"".join(token for token, _, _ in choice.logprobs))
            assert whole_of(told.decode(errors="replace")).startswith(whole_of(choice.text))
    else:
        assert not choice.logprobs


def whole_of(text: str) -> str:
    """Without what random bytes are where they are no characters."""
    return text.replace("\N{REPLACEMENT CHARACTER}", "")

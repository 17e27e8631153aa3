"""The policy says what it finds in texts, over REST, with OpenAI's client, and over gRPC."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from openai import AsyncOpenAI

from protos.gateway_pb2 import PublicModerateRequest
from protos.gateway_pb2_grpc import InferenceStub
from services.common.config import MeteringSettings, PolicySettings
from services.common.errors import unavailable
from services.common.policy import NO_POLICY
from tests.support.gateway_rig import Rig, gateway_rig
from tests.support.waiting import until

RULES = """
version: "7"
rules:
  - {name: payment, pii: [card], action: redact}
  - {name: slurs, pattern: blockhead, category: hate}
  - {name: locks, like: {examples: [how to open a lock]}, category: illicit, action: flag}
  - {name: said, pattern: kettle, where: [output]}
  - {name: systems, pattern: kettle, roles: [system]}
"""
PATH = "/v1/moderations"
CARD, SLUR, LOCK, KETTLE = "pay 4111 1111 1111 1111", "you blockhead", "pick a lock", "a kettle"


@pytest.fixture
async def rig(redis_url: str, namespace: str, tmp_path: Path) -> AsyncIterator[Rig]:
    file = tmp_path / "policy.yaml"
    file.write_text(RULES)
    policy, prices = PolicySettings(file=file), {"policy": {"prompt": 4, "output": 0}}
    metering = MeteringSettings(prices=prices)  # type: ignore[arg-type]
    async with gateway_rig(redis_url, namespace, policy=policy, metering=metering) as rig:
        yield rig


async def test_each_text_has_what_is_found_in_it_as_openais_client_reads_it(rig):
    client: AsyncOpenAI = await rig.openai()
    told = await client.moderations.create(input=[CARD, SLUR, LOCK, KETTLE])
    card, slur, lock, kettle = told.results
    assert [one.flagged for one in told.results] == [True, True, True, False]
    assert slur.categories.hate
    assert not slur.categories.violence
    assert slur.category_scores.hate == 1.0
    assert slur.category_applied_input_types.hate == ["text"]
    assert slur.category_applied_input_types.violence == []
    assert lock.category_scores.illicit == pytest.approx(0.75)
    assert card.categories.model_dump()["payment"]
    assert not any(kettle.categories.model_dump().values())
    assert told.model == "policy"


async def test_texts_of_a_batch_are_judged(rig):
    client: AsyncOpenAI = await rig.openai()
    lines = [
        {"custom_id": text, "method": "POST", "url": PATH, "body": {"input": text}}
        for text in (SLUR, KETTLE)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = await client.files.create(file=("b.jsonl", content), purpose="batch")
    batch = await client.batches.create(
        input_file_id=file.id, endpoint=PATH, completion_window="24h"
    )

    async def ended() -> bool:
        return (await client.batches.retrieve(batch.id)).status == "completed"

    await until(ended, 20, "the batch ends")
    output = (await client.batches.retrieve(batch.id)).output_file_id
    answers = [json.loads(one) for one in (await client.files.content(output)).text.splitlines()]
    flagged = {
        one["custom_id"]: one["response"]["body"]["results"][0]["flagged"] for one in answers
    }
    assert flagged == {SLUR: True, KETTLE: False}


async def test_what_is_judged_is_priced_and_in_the_record(rig):
    http = await rig.http()
    whole = (await http.post(PATH, json={"input": [SLUR, "x" * 39]})).json()
    own = whole["penstock"]
    assert own["judged"] == ["payment", "hate", "illicit"]
    assert (own["policy"], own["currency"]) == (rig.gateway.policy.current.version, "USD")
    assert own["cost"] == pytest.approx((4 + 10) * 4e-6)
    record = await rig.record(own["request_id"])
    (made,) = [one for one in record["decisions"] if one["subject"] == "policy"]
    version = {"version": own["policy"]}
    assert made["reasons"] == {**version, "texts": "2", "flagged": "1", "slurs": "1"}
    parts = [{"type": "text", "text": "block"}, {"type": "text", "text": "head"}]
    told = (await http.post(PATH, json={"input": parts, "model": "omni-moderation-latest"})).json()
    assert [one["flagged"] for one in told["results"]] == [True]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": [CARD, 3]}, "input[1]"),
        ({"input": []}, "input"),
        ({"input": [{"type": "image_url", "image_url": {"url": "x"}}]}, "input[0].type"),
        ({"input": [{"type": "text", "text": "a"}, "b"]}, "input[1]"),
        ({"input": "a", "model": "gpt-4o"}, "model"),
        ({"input": "a", "threshold": 1}, "threshold"),
        ({}, "input"),
    ],
)
async def test_bad_input_is_named(rig, body, param):
    answer = await (await rig.http()).post(PATH, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_nothing_passes_unjudged(rig):
    http = await rig.http()
    rig.retrieval.failure = unavailable("away", stage="retrieval")
    answer = await http.post(PATH, json={"input": LOCK})
    assert answer.status_code == 503
    rig.gateway.policy.current = NO_POLICY
    answer = await http.post(PATH, json={"input": LOCK})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_rules")


async def test_over_grpc_it_is_the_same(rig):
    moderate: Any = InferenceStub(await rig.channel()).Moderate
    key = (("authorization", f"Bearer {rig.key}"),)
    told = await moderate(PublicModerateRequest(texts=[KETTLE, LOCK]), metadata=key)
    assert [dict(one.scores) for one in told.results] == [{}, {"illicit": 0.75}]
    assert list(told.judged) == ["payment", "hate", "illicit"]
    assert told.policy.startswith("7@")
    assert told.cost.amount == pytest.approx(5 * 4e-6)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await moderate(PublicModerateRequest(), metadata=key)
    assert dict(raised.value.trailing_metadata())["x-param"] == "texts"

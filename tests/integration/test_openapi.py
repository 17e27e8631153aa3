"""The API is as its document says: for what fits it, for what does not, on every path."""

import asyncio
import json
import os
import re
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from protos.common_pb2 import FINISH_STOP
from protos.tokenizer_pb2 import PromptRequest, TextDelta
from services.common.config import PolicySettings
from services.common.link import LinkCall
from services.gateway.api.openapi.document import document
from services.gateway.api.openapi.operation import Form
from services.gateway.api.openapi.operations.table import OPERATIONS
from tests.support.described import check, events_as_described
from tests.support.gateway_rig import MODEL, finish, gateway_rig, plan, say_numbers, send

EXAMPLES = int(os.environ.get("EXAMPLES", "8"))
"""Of each endpoint; `make api-fuzz` asks for many, and others each time."""
DIALECT = "https://json-schema.org/draft/2020-12/schema"  # OpenAPI 3.1's
NAMELESS = ("invalid_json", "invalid_form")  # refusals of no field in particular
JSON_BODIES = [
    name for name, one in OPERATIONS.items() if one.body and not issubclass(one.body, Form)
]


class Door(NamedTuple):
    """A gateway, and what its tenant has."""

    client: httpx.Client
    ids: dict[str, str]  # by the path's parameter


@pytest.fixture(scope="module")
def door(redis_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """On a loop of its own: hypothesis drives it from this thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    rules = tmp_path_factory.mktemp("policy") / "policy.yaml"
    rules.write_text("rules:\n  - {name: hate, pattern: blockhead, action: flag}\n")
    policy = PolicySettings(file=rules)
    rig_context = gateway_rig(redis_server.url, "openapi", policy=policy)
    rig = asyncio.run_coroutine_threadsafe(rig_context.__aenter__(), loop).result(60)
    rig.tokenizer.script = _say
    headers = {"Authorization": f"Bearer {rig.key}"}
    with httpx.Client(base_url=rig.url, headers=headers, timeout=10) as client:
        yield Door(client, _things(client))
    asyncio.run_coroutine_threadsafe(rig_context.__aexit__(None, None, None), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def _say(call: LinkCall, request: PromptRequest) -> None:
    if request.HasField("pool"):
        return await say_numbers(call, request)
    if request.tokens_only:
        return call.send(TextDelta(token_ids=[1, 2], finish=FINISH_STOP).SerializeToString())
    for choice in range(max(1, request.choices)):
        send(call, "Hello", choice=choice, plan=plan(request))
        send(call, " world", choice=choice)
        finish(call, 2, choice=choice)


def _things(client: httpx.Client) -> dict[str, str]:
    file = client.post(
        "/v1/files", files={"file": ("a.txt", b"water")}, data={"purpose": "assistants"}
    ).json()["id"]
    store = client.post("/v1/vector_stores", json={"file_ids": [file]}).json()["id"]
    in_store = f"/v1/vector_stores/{store}/file_batches"
    file_batch = client.post(in_store, json={"file_ids": [file]}).json()["id"]
    response = client.post("/v1/responses", json={"model": MODEL, "input": "Hi"}).json()
    messages = [{"role": "user", "content": "Hi"}]
    chat = client.post(
        "/v1/chat/completions",
        json={"model": MODEL, "messages": messages, "store": True},
        headers={"Idempotency-Key": "k"},
    ).json()["id"]
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
    asked = json.dumps({**line, "body": {"model": MODEL, "messages": messages}}).encode()
    lines = client.post(
        "/v1/files", files={"file": ("a.jsonl", asked)}, data={"purpose": "batch"}
    ).json()["id"]
    wanted = {"input_file_id": lines, "endpoint": line["url"], "completion_window": "1h"}
    batch = client.post("/v1/batches", json=wanted).json()["id"]
    request = response["penstock"]["request_id"]
    said = {"items": [{"role": "user", "content": "Hi"}]}
    conversation = client.post("/v1/conversations", json=said).json()["id"]
    ids = {
        "lines": lines,
        "batch": batch,
        "file": file,
        "file_batch": file_batch,
        "store": store,
        "response": response["id"],
        "completion": chat,
        "upload": _upload(client),
        "conversation": conversation,
        "item": client.get(f"/v1/conversations/{conversation}/items").json()["first_id"],
    }
    return {**ids, "model": MODEL, "request": request, "asset": "swagger-ui.css"}


def _upload(client: httpx.Client) -> str:
    about = {"filename": "a.md", "purpose": "assistants", "bytes": 9, "mime_type": "text/plain"}
    return str(client.post("/v1/uploads", json=about).json()["id"])


@pytest.fixture(scope="module")
def described() -> Any:
    import schemathesis

    return schemathesis.openapi.from_dict(document())


@settings(
    max_examples=EXAMPLES,
    derandomize=EXAMPLES < 100,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],  # the document's schemas are slow to shrink
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
@pytest.mark.parametrize("endpoint", OPERATIONS)
def test_answers_are_as_the_document_says(door, described, endpoint, data):
    from schemathesis import GenerationMode

    method, path = endpoint.split()
    operation = described[path.replace(":path}", "}")][method]
    mode = data.draw(st.sampled_from([GenerationMode.POSITIVE, GenerationMode.NEGATIVE]))
    case = data.draw(operation.as_strategy(generation_mode=mode))
    if mode is GenerationMode.POSITIVE:
        if isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = MODEL
        if method != "DELETE":
            case.path_parameters = {name: door.ids[name] for name in case.path_parameters or ()}
    base, known = str(door.client.base_url), door.client.headers["Authorization"]
    answer = case.call_and_validate(base, headers={"Authorization": known}, checks=_checks())
    if answer.status_code != 400:
        return
    error = answer.json()["error"]
    assert error["param"] or error["code"] in NAMELESS or "''" in error["message"], error
    if mode is GenerationMode.POSITIVE:  # what there is, in ways that do not go together
        assert error["code"] != "unknown_parameter", error


def _example(endpoint: str, door: Door) -> tuple[str, str, dict[str, Any]]:
    """Its method, its path and its body, of what is there."""
    method, path = endpoint.split()
    body = json.loads(json.dumps(dict(OPERATIONS[endpoint].example)))
    body |= {"model": MODEL} if "model" in body else {}
    body |= {"input_file_id": door.ids["lines"]} if "input_file_id" in body else {}
    body |= {"file_id": door.ids["file"]} if "file_id" in body else {}
    body |= {"file_ids": [door.ids["file"]]} if "file_ids" in body else {}
    ids = {**door.ids}
    if "part_ids" in body:  # of one that nothing has ended
        ids["upload"] = begun = _upload(door.client)
        part = door.client.post(f"/v1/uploads/{begun}/parts", files={"data": b"The water"})
        body["part_ids"] = [part.json()["id"]]
    return method, path.replace(":path}", "}").format_map(ids), body


@pytest.mark.parametrize("endpoint", JSON_BODIES)
def test_examples_are_answered_and_no_field_beside_is_taken(door, endpoint):
    method, path, body = _example(endpoint, door)
    answer = door.client.request(method, path, json=body)
    assert answer.status_code == 200, answer.text
    check(answer)
    for at, place in [("", body), *_objects(body)]:
        if at == "attributes.":  # which have the client's own names
            continue
        place["nobodys"] = 1
        answer = door.client.request(method, path, json=body)
        del place["nobodys"]
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == (f"{at}nobodys", "unknown_parameter")


def _objects(value: Any, at: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Those within, and where they are."""
    named = value.items() if isinstance(value, dict) else enumerate(value)
    for name, inner in named:
        here = f"{at}[{name}]" if isinstance(name, int) else f"{at}.{name}".removeprefix(".")
        if isinstance(inner, dict):
            yield f"{here}.", inner
        if isinstance(inner, dict | list):
            yield from _objects(inner, here)


@pytest.mark.parametrize("endpoint", OPERATIONS)
def test_no_parameter_beside_is_taken_in_a_query(door, endpoint):
    method, path, body = _example(endpoint, door)
    sent = {"json": body} if endpoint in JSON_BODIES else {}
    answer = door.client.request(method, path, params={"nobodys": "1"}, **sent)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "nobodys"


def test_no_parameter_is_taken_twice_in_a_query(door):
    twice = [("purpose", "batch"), ("purpose", "assistants")]
    answer = door.client.get("/v1/files", params=twice)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "purpose")


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/chat/completions", {"stream_options": {"include_usage": True}, "n": 2}),
        ("/v1/completions", {"stream_options": {"include_usage": True}}),
        (
            "/v1/completions",
            {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        ),
        ("/v1/completions", {"prompt": [[1, 2], [3]], "n": 2}),
    ],
)
def test_events_of_streams_are_as_the_document_says(door, path, more):
    _, _, body = _example(f"POST {path}", door)
    told = door.client.post(path, json={**body, "stream": True, **more})
    assert told.text.endswith("data: [DONE]\n\n")
    assert len(events_as_described(path, told.text)) > 4


def test_the_document_is_one_and_the_page_needs_nothing_else(door):
    import jsonschema_rs

    told = door.client.get("/openapi.json").json()
    assert told == document()
    for schema in told["components"]["schemas"].values():
        jsonschema_rs.meta.validate({"$schema": DIALECT} | schema)
    page = door.client.get("/docs")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert loaded
    for path in loaded:
        assert path.startswith("/docs/")
        assert door.client.get(path).status_code == 200


def _checks() -> list[Any]:
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    return [
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
        checks.negative_data_rejection,
    ]

"""What a tenant's record shows of the installation: labels, and nothing else."""

import json

import pytest

from protos.common_pb2 import Record, Span
from services.common.discovery import new_replica_id
from services.common.telemetry import decision
from services.gateway.auth import Identity
from services.gateway.records import Journal
from tests.support.inside import check, leaks

FIRST, THEN = new_replica_id("worker"), new_replica_id("worker")
ROUTER = new_replica_id("router")


def record(tenant: str = "acme"):
    journal = Journal("req_1", "chat")
    journal.identity = Identity("key_1", tenant, "normal", 1.0, None)
    journal.tags = {"note": f"my {FIRST}"}
    made = [
        decision("router", "placement", f"{FIRST} > {THEN}", {THEN: "cost 1 s", FIRST: "cost 2 s"}),
        decision("router", "failover", THEN, {"lost": FIRST, "cause": "peer_lost"}),
        decision("tokenizer", "router", "tried again", {"lost": ROUTER}),
    ]
    spans = [Span(service="router", name="run", attributes={"workers": f"{FIRST} > {THEN}"})]
    journal.close(Record(spans=spans, decisions=made))
    return journal.as_json()


def test_a_replica_has_a_label_in_place_of_its_id():
    told = record()
    placement, failover, again = told["decisions"]
    first, then = placement["choice"].split(" > ")
    assert first != then
    assert {first.split()[0], then.split()[0]} == {"worker"}
    assert placement["reasons"] == {then: "cost 1 s", first: "cost 2 s"}
    assert (failover["choice"], failover["reasons"]["lost"]) == (then, first)
    assert again["reasons"]["lost"].startswith("router ")
    assert told["spans"][0]["attributes"]["workers"] == placement["choice"]
    assert told["metadata"] == {"note": f"my {FIRST}"}, "the client's own words stay as they are"
    check(json.dumps({**told, "metadata": {}}))


def test_a_label_is_the_same_in_all_records_of_a_tenant_and_only_there():
    assert record("acme")["decisions"] == record("acme")["decisions"]
    assert record("acme")["decisions"][0]["choice"] != record("rival")["decisions"][0]["choice"]


@pytest.mark.parametrize(
    "told",
    [
        "lost tokenizer: UNAVAILABLE ipv4:127.0.0.1:4711: recvmsg",
        "see 10.0.0.7:50051",
        f"no {ROUTER}",
        "the store in /tmp/x/qdrant is in use",
        "set PENSTOCK_DATA_DIR",
        "KeyError",
        "ValueError('x')",
    ],
)
def test_the_check_itself_finds_what_must_not_be_told(told):
    assert leaks(told)
    with pytest.raises(AssertionError):
        check(json.dumps({"error": {"message": told}}))


def test_the_check_lets_ordinary_answers_pass():
    ordinary = {
        "error": {"type": "server_error", "code": "peer_lost", "message": "the worker was lost"},
        "id": "req_00063f1e5a9c3b0011223344aabbcc",
        "created": 1_700_000_000,
        "url": "GET /v1/files/x: 'text/event-stream' and/or",
    }
    assert leaks(json.dumps(ordinary)) == []

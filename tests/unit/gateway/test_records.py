"""What a tenant's record shows of the installation: labels, and nothing else."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from protos.common_pb2 import Record, Span
from services.common.telemetry.telemetry import decision
from services.gateway.runs.records import Journal, Records
from tests.support.inside import check, leaks

# In a process of its own, as what is measured is the process.
MANY_RECORDS = """
import json
from protos.common_pb2 import Record, Span
from services.common.give_back import resident_bytes
from services.common.telemetry.telemetry import decision
from services.gateway.runs.records import Journal

def ended():
    journal = Journal("req_1", "chat")
    spans = [Span(service="router", name="run", attributes={"a": "1", "b": "2"}) for _ in range(16)]
    made = [decision("router", "placement", "w", dict.fromkeys("abcdef", 1.5)) for _ in range(6)]
    journal.below.MergeFrom(Record(spans=spans, decisions=made))
    for _ in range(4):
        journal.decide("retrieval", "searched", passages=3)
    told = [Span(service="gateway", name="request") for _ in range(4)]
    record = Record(spans=told, decisions=journal.decisions)
    record.MergeFrom(journal.below)
    journal.close(record)
    return journal

first = ended()
before = resident_bytes()
kept = [ended() for _ in range(3000)]
each = (resident_bytes() - before) / len(kept)
print(json.dumps([each, len(kept[-1].as_json()["spans"])]))
"""

FIRST, THEN, ROUTER = "worker-0a1b2c3d", "worker-4e5f6071", "router-8293a4b5"


def record(tenant: str = "acme"):
    journal = Journal("req_1", "chat")
    journal.tenant = tenant
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


def test_the_waterfall_goes_by_start_in_milliseconds_from_the_first():
    """Of two that start together the longer one is the outer one."""
    second, ms = 1_700_000_000 * 10**9, 10**6
    journal = Journal("req_1", "chat")
    spans = [
        Span(service="c", name="late", start_ns=second + 5 * ms, duration_ns=ms, parent_id="1"),
        Span(service="b", name="inner", start_ns=second, duration_ns=2 * ms, attributes={"n": "1"}),
        Span(service="a", name="outer", start_ns=second, duration_ns=9 * ms, span_id="1"),
    ]
    journal.close(Record(spans=spans))
    told = journal.as_json()["spans"]
    assert [(s["name"], s["start_ms"], s["duration_ms"]) for s in told] == [
        ("outer", 0, 9),
        ("inner", 0, 2),
        ("late", 5, 1),
    ]
    assert [(s["id"], s["parent"]) for s in told] == [("1", None), ("", None), ("", "1")]
    assert told[1]["attributes"] == {"n": "1"}


def test_what_a_record_counts(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    ticking = SimpleNamespace(monotonic=lambda: clock.now, time=lambda: 1_700_000_000.9)
    monkeypatch.setattr("services.gateway.runs.records.time", ticking)
    journal = Journal("req_1", "chat")
    journal.close(Record())
    assert journal.as_json()["time_to_first_token_ms"] is None
    clock.now = 100.25
    assert journal.arrived(3)
    clock.now = 101.5
    assert not journal.arrived(4)
    journal.close(Record())
    journal.decide("rate", "let in", left=2)
    told = journal.as_json()
    assert (told["created"], told["tokens"], told["model"]) == (1_700_000_000, 7, None)
    assert (told["time_to_first_token_ms"], told["duration_ms"]) == (250, 1500)
    assert (told["id"], told["route"], told["status"]) == ("req_1", "chat", "ok")
    (made,) = journal.decisions
    assert (made.stage, made.subject, made.choice, dict(made.reasons)) == (
        "gateway",
        "rate",
        "let in",
        {"left": "2"},
    )


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_kept_record_is_small():
    """A thousand are kept. As messages each took over 40 KB, and no flood's end gave that back."""
    command = [sys.executable, "-c", MANY_RECORDS]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    each, spans = json.loads(ran.stdout)
    assert each < 8_000
    assert spans == 20, "and it tells all"


def test_a_record_is_its_tenants_alone():
    records = Records(2)
    for number, tenant in enumerate(("acme", "acme", "rival")):
        journal = Journal(f"req_{number}", "chat")
        journal.tenant = tenant
        records.keep(journal)
    assert records.find("req_0", "acme") is None, "the oldest is forgotten"
    assert (found := records.find("req_1", "acme")) is not None
    assert found.request_id == "req_1"
    assert records.find("req_2", "acme") is None
    assert records.find("req_2", "rival") is not None


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

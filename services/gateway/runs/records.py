"""A request's record: its waterfall over all services, and why each decision fell as it did.

A tenant sees stages, decisions and their figures, and of the installation no more: a replica has a
label that is the same in all of the tenant's records, in place of its id. Traces and logs, which
are the operator's, have the ids.
"""

import base64
import hashlib
import json
import re
import time
from collections import OrderedDict
from typing import Any, Protocol

from protos import common_pb2
from services.common.discovery import REPLICA_ID
from services.common.errors import PenstockError
from services.common.telemetry.spans import Remote
from services.common.telemetry.telemetry import decision, remote_parent
from services.gateway.metering.meter import Metered
from services.gateway.metering.prices import Cost

_STORED = (
    "request_id", "route", "created", "model", "tags", "first_text_s", "duration_s", "tokens"
)  # fmt: skip


_ADMISSION = ("admit", "admit again")  # as the router has them


class Journal:
    """What is noted of one request: figures and decisions, none of its text."""

    def __init__(self, request_id: str, route: str) -> None:
        self.request_id = request_id
        self.route = route
        self.created = time.time()
        self.tenant = ""  # empty: nobody knows yet who asks
        self.model = ""  # as asked for, or where the policy sent it
        self.served = ""  # the same, once it is known that there is such one
        self.tags: dict[str, str] = {}  # the client's own
        self.usage: common_pb2.Usage | None = None  # of a complete answer
        self.metered: Metered | None = None  # past its limits and not ended yet
        self.cost: Cost | None = None  # None: nobody set a price
        self.error: PenstockError | None = None
        self.goes_on = False  # as a run, which has a record of its own
        self.decisions: list[common_pb2.Decision] = []
        self._below: common_pb2.Record | None = None
        self.is_watched = True  # somebody waits for its first text: times of others tell nothing
        self._record = b""  # all of it, once the request has ended
        self.first_text_s = 0.0  # since the start; 0: none yet
        self.duration_s = 0.0
        self.tokens = 0  # that arrived
        self._began = time.monotonic()

    @property
    def below(self) -> common_pb2.Record:
        """What the other services told."""
        if self._below is None:
            self._below = common_pb2.Record()
        return self._below

    def decide(self, subject: str, choice: str, **reasons: Any) -> None:
        self.decisions.append(decision("gateway", subject, choice, reasons))

    def arrived(self, tokens: int) -> bool:
        """Notes an arrival; returns whether it was the first."""
        first = not self.first_text_s
        if first:
            self.first_text_s = time.monotonic() - self._began
        self.tokens += tokens
        return first

    def fail(self, error: PenstockError) -> None:
        """Notes how it failed. Not the exception itself: its traceback holds the variables of every
        frame that it passed, the request's body among them."""
        self.error = PenstockError.from_status(error.to_status())

    def close(self, record: common_pb2.Record) -> None:
        """`record` is all that is told of it. What is kept are its bytes, some 3 KB: as messages
        it would be 40, and in pieces that hold memory between those of larger requests."""
        self.duration_s = time.monotonic() - self._began
        self._record = record.SerializeToString()
        self._below, self.decisions = None, []

    @property
    def admission_s(self) -> float:
        """Of a closed one: how long it waited for a place, wherever there was none."""
        spans = common_pb2.Record.FromString(self._record).spans
        return sum(span.duration_ns for span in spans if span.name in _ADMISSION) / 1e9

    @property
    def pace_s(self) -> float | None:
        """Of a closed one: between two of its tokens, on average; None for fewer than two."""
        if self.tokens < 2:
            return None
        return (self.duration_s - self.first_text_s) / (self.tokens - 1)

    def as_stored(self) -> str:
        """All of a closed one, for another gateway to tell."""
        told = {name: getattr(self, name) for name in _STORED} | {"cost": self.cost}
        error = None
        if self.error is not None:
            error = base64.b64encode(self.error.to_status().SerializeToString()).decode()
        record = base64.b64encode(self._record).decode()
        return json.dumps({**told, "error": error, "record": record})

    @classmethod
    def of_stored(cls, stored: str, tenant: str) -> "Journal":
        """What `as_stored` made of it. Raises ValueError."""
        told = json.loads(stored)
        journal = cls(told["request_id"], told["route"])
        for name in _STORED:
            setattr(journal, name, told[name])
        journal.cost = Cost(*told["cost"]) if told["cost"] else None
        if told["error"] is not None:
            status = common_pb2.Status.FromString(base64.b64decode(told["error"]))
            journal.error = PenstockError.from_status(status)
        journal.tenant = tenant
        journal._record = base64.b64decode(told["record"])
        return journal

    def as_json(self) -> dict[str, Any]:
        """As its tenant may see it."""
        record = common_pb2.Record.FromString(self._record)
        outside = _Labels(self.tenant).outside
        told: dict[str, Any] = {
            "id": self.request_id,
            "object": "request",
            "created": int(self.created),
            "route": self.route,
            "model": self.model or None,
            "metadata": self.tags,
            "status": self.error.code.name.lower() if self.error else "ok",
            "duration_ms": round(self.duration_s * 1000, 3),
            "time_to_first_token_ms": round(self.first_text_s * 1000, 3) or None,
            "tokens": self.tokens,
            "cost": self.cost.amount if self.cost else None,
            "currency": self.cost.currency if self.cost else None,
            "spans": outside(_waterfall(record.spans)),
            "decisions": outside(
                [
                    {
                        "stage": made.stage,
                        "subject": made.subject,
                        "choice": made.choice,
                        "reasons": dict(made.reasons),
                    }
                    for made in record.decisions
                ]
            ),
        }
        if self.error is not None:
            told["error"] = {
                "stage": self.error.stage,
                "code": self.error.reason,
                "message": self.error.message,
            }
        return told


class _Labels:
    """What stands for replicas in what one tenant sees: "worker 5c1f"."""

    def __init__(self, tenant: str) -> None:
        self._key = hashlib.blake2b(tenant.encode(), digest_size=32).digest()

    def outside(self, told: Any) -> Any:
        """`told`, JSON, with labels for the ids of replicas in all of its texts."""
        if isinstance(told, str):
            return REPLICA_ID.sub(self._label, told)
        if isinstance(told, list):
            return [self.outside(one) for one in told]
        if isinstance(told, dict):
            return {self.outside(name): self.outside(value) for name, value in told.items()}
        return told

    def _label(self, id: re.Match[str]) -> str:
        digest = hashlib.blake2b(id.group().encode(), digest_size=2, key=self._key).hexdigest()
        return f"{id.group(1)} {digest}"


def _waterfall(spans: Any) -> list[dict[str, Any]]:
    """Spans by start; times in milliseconds from the first one's start."""
    ordered = sorted(spans, key=lambda span: (span.start_ns, -span.duration_ns))
    began = ordered[0].start_ns if ordered else 0
    return [
        {
            "service": span.service,
            "name": span.name,
            "start_ms": round((span.start_ns - began) / 1e6, 3),
            "duration_ms": round(span.duration_ns / 1e6, 3),
            "id": span.span_id,
            "parent": span.parent_id or None,
            "attributes": dict(span.attributes),
        }
        for span in ordered
    ]


class Shared(Protocol):
    """Where other gateways' requests are told of (shared_records.py)."""

    def start(self) -> None: ...
    async def stop(self) -> None: ...
    def keep(self, journal: Journal) -> None: ...
    async def find(self, request_id: str, tenant: str) -> Journal | None: ...


class Records:
    """The last requests that the gateways served, for their tenants: this one's at once, and
    whatever else is away."""

    def __init__(self, kept: int, shared: Shared | None = None) -> None:
        self._kept = kept
        self._shared = shared
        self._journals: OrderedDict[str, Journal] = OrderedDict()

    def start(self) -> None:
        if self._shared is not None:
            self._shared.start()

    async def stop(self) -> None:
        if self._shared is not None:
            await self._shared.stop()

    def keep(self, journal: Journal) -> None:
        self._journals[journal.request_id] = journal
        if len(self._journals) > self._kept:
            self._journals.popitem(last=False)
        if self._shared is not None:
            self._shared.keep(journal)

    def find(self, request_id: str, tenant: str) -> Journal | None:
        """One of this gateway's own. None also for another tenant's."""
        journal = self._journals.get(request_id)
        if journal is None or journal.tenant != tenant:
            return None
        return journal

    async def look_up(self, request_id: str, tenant: str) -> Journal | None:
        """Any gateway's. Raises one of `RedisAway`."""
        journal = self.find(request_id, tenant)
        if journal is None and self._shared is not None:
            journal = await self._shared.find(request_id, tenant)
        return journal


def client_context(traceparent: str | None) -> Remote:
    """The client's trace to hang ours below, if it sent a valid one.

    The sampled flag is set whatever the client says: collectors are the operator's.
    """
    if not traceparent or len(traceparent) != 55 or not traceparent.startswith("00-"):
        return Remote()
    return remote_parent(traceparent[:-2] + "01")

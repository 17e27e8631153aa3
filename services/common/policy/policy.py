"""One version of the policy, ready for every place; and the file that it comes from, looked at
while a service runs: a new version holds for requests that come then, and a bad file is told of
while the last good one goes on.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.config.policy import PolicySettings
from services.common.errors import invalid
from services.common.policy import metrics
from services.common.policy.check import Subject, TextRules, Verdict
from services.common.policy.rules import NO_RULES, Rules, load_rules
from services.common.policy.schema import MAX_BYTES
from services.common.policy.stream import AnswerRules
from services.common.policy.work import Allowance, TooMuchError, Work
from services.common.telemetry.metrics_server import Page

log = logging.getLogger(__name__)

_KEPT = 8  # versions, for answers that began under them


@dataclass(frozen=True)
class Policy:
    """What is asked of texts, and of answers."""

    rules: Rules
    texts: TextRules
    output: AnswerRules | None
    tool_arguments: AnswerRules | None
    answers: AnswerRules | None  # all of them, for what both are cut from

    @classmethod
    def of(cls, rules: Rules) -> "Policy":
        """Raises ValueError."""
        return cls(
            rules,
            TextRules(rules),
            AnswerRules.of(rules, "output"),
            AnswerRules.of(rules, "tool_arguments"),
            AnswerRules.of(rules, "output", "tool_arguments"),
        )

    @property
    def digest(self) -> str:
        return self.rules.digest

    @property
    def version(self) -> str:
        return self.rules.version


NO_POLICY = Policy.of(NO_RULES)


def read_policy(path: Path) -> Policy:
    """Raises ValueError that names the file, and the rule that is wrong. Blocking."""
    file = PolicyFile(path, 1.0)
    file.look()
    if file.fault:
        raise ValueError(f"policy file {path}: {file.fault}")
    return file.current


class PolicyFile:
    """The policy of a service. `start` fails on a bad file; later ones only say so."""

    def __init__(
        self, path: Path | None, look_every_s: float, allowance: Allowance | None = None
    ) -> None:
        self.current = NO_POLICY
        self._allowance = allowance or Allowance()
        self._path = path
        self._look_every_s = look_every_s
        self._content: bytes | None = None
        self.fault = ""  # of the file as it is, if it is not the one in use
        self._since = time.time()
        self._versions: OrderedDict[str, Policy] = OrderedDict()
        self._watch: asyncio.Task[None] | None = None

    @classmethod
    def of_settings(cls, settings: PolicySettings) -> "PolicyFile":
        allowance = Allowance(settings.max_bytes, settings.max_seconds)
        return cls(settings.file, settings.look_every_s, allowance)

    async def start(self) -> None:
        """Raises ValueError that names the file, and the rule that is wrong."""
        if self._path is None:
            return
        await asyncio.to_thread(self.look)
        if self.fault:
            raise ValueError(f"policy file {self._path}: {self.fault}")
        self._watch = asyncio.create_task(self._look_often(), name="policy file")

    async def stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)

    def look(self) -> None:
        """At the file, and takes it if it is another and good. Blocking."""
        assert self._path is not None
        try:
            with self._path.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
            if content == self._content:
                return
            self._content = content
            found = Policy.of(load_rules(content))
        except OSError as error:
            self._content = None
            return self._refuse(error.strerror or "it cannot be read")
        except ValueError as error:
            return self._refuse(str(error))
        self._take(found)

    def of(self, digest: str) -> Policy | None:
        """A version that was in use here lately."""
        return self.current if digest == self.current.digest else self._versions.get(digest)

    def check(self, policy: Policy, subjects: Sequence[Subject]) -> Verdict:
        """What a version says of a request's texts. Blocking. Raises INVALID_ARGUMENT
        ("policy_too_much") for what it cannot look at all of: nothing passes unseen."""
        try:
            return policy.texts.check(subjects, Work(self._allowance))
        except TooMuchError as error:
            raise invalid(error.why, error.param, reason="policy_too_much") from None

    def check_each(self, policy: Policy, subjects: Sequence[Subject]) -> list[Verdict]:
        """The same of each by itself, of all within what one request may take."""
        work = Work(self._allowance)
        try:
            return [policy.texts.check([one], work) for one in subjects]
        except TooMuchError as error:
            raise invalid(error.why, error.param, reason="policy_too_much") from None

    def status(self) -> dict[str, Any]:
        """For whoever operates it."""
        return {
            "version": self.current.version or None,
            "rules": len(self.current.rules.spec.rules),
            "since": round(self._since, 3),
            "file": str(self._path) if self._path else None,
            "fault": self.fault or None,
        }

    def pages(self) -> Mapping[str, Page]:
        """For a service's metrics port."""

        async def page() -> dict[str, Any]:
            return self.status()

        return {"/policy": page}

    def _take(self, found: Policy) -> None:
        self.fault = ""
        metrics.FILE_GOOD.set(1)
        if found.digest == self.current.digest:  # back to what it was
            return
        self._versions[self.current.digest] = self.current
        while len(self._versions) >= _KEPT:
            self._versions.popitem(last=False)
        metrics.INFO.clear()
        metrics.INFO.labels(found.version).set(1)
        log.info("policy %s: %d rules", found.version, len(found.rules.spec.rules))
        self._since = time.time()
        self.current = found

    def _refuse(self, fault: str) -> None:
        if fault == self.fault:
            return
        self.fault = fault
        metrics.FILE_GOOD.set(0)
        if self._watch is not None:
            kept = self.current.version
            log.error("policy file %s is not taken, %s goes on: %s", self._path, kept, fault)

    async def _look_often(self) -> None:
        while True:
            await asyncio.sleep(self._look_every_s)
            try:
                await asyncio.to_thread(self.look)
            except Exception:
                log.exception("the policy file could not be looked at")

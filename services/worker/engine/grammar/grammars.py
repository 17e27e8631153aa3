"""The grammars of an engine's requests: made in side threads, kept by content."""

import logging
import os
import select
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from time import monotonic

from services.worker.engine.grammar.compiler import Compiler, is_panic
from services.worker.engine.grammar.matcher import (
    Allowance,
    ConstraintError,
    Matcher,
    Tenant,
    Unavailable,
)
from services.worker.engine.grammar.trial import Trial
from services.worker.engine.grammar.turns import Turns
from services.worker.engine.messages import Constraint

log = logging.getLogger(__name__)

_KEPT = 256
"""Grammars. A large schema's takes a few MB."""
_AT_ONCE = 2
"""Are made: a slow one holds up nobody but its tenant."""
_REFUSED_S = 30.0
"""For so long a reason why there is none, or why a tenant's outputs ended, is kept: it may have
been for want of time."""
_UNAVAILABLE_S = 1.0
_TENANTS = 1024


@dataclass(frozen=True, slots=True)
class _Made:
    tenant: bytes
    """Who wanted it first."""
    matcher: Matcher | None
    """At an output's beginning."""
    error: ConstraintError | Unavailable | None
    until: float
    """Monotonic seconds."""
    allowances: dict[bytes, Allowance] = field(default_factory=dict)
    """By tenant."""


class Tenants:
    """Those that were there last: who was not for long has all its time again."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, Tenant] = OrderedDict()

    def of(self, salt: bytes) -> Tenant:
        tenant = self._known.setdefault(salt, Tenant())
        self._known.move_to_end(salt)
        if len(self._known) > _TENANTS:
            self._known.popitem(last=False)
        return tenant


class Grammars:
    """Used from the engine's thread: `want` a grammar, `find` it until it is there, or `leave`."""

    def __init__(
        self, folder: str, vocab_size: int, eos_token_ids: Seq[int], generates: bool = True
    ) -> None:
        """Blocking, up to seconds: the vocabulary of a checkpoint that generates is read now, since
        that holds the interpreter, and later every step would wait for it. Logs if none can be
        made."""
        self._made: OrderedDict[Constraint, _Made] = OrderedDict()
        self._wanted = Turns()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._trial = Trial(folder, vocab_size, eos_token_ids)
        self._compiler: Compiler | ConstraintError | Unavailable
        """Or why there is none."""
        self._tenants = Tenants()
        self._closed = False
        self.news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when something was made, until `hear`."""
        self._end_news = weakref.finalize(self, os.close, self.news)
        self._end_news.atexit = False  # its threads may write to it as long as the process lives
        try:
            if generates:
                self._compiler = Compiler(folder, vocab_size, eos_token_ids)
            else:
                self._compiler = Unavailable("the model makes no text")
        except (ConstraintError, Unavailable) as error:
            # A copy: the error's own cause holds the frames that it came through, and the text of
            # the whole vocabulary with them.
            self._compiler = type(error)(*error.args)
            log.warning("requests with a constraint will fail: %s", self._compiler)

    def want(self, constraint: Constraint, tenant: bytes) -> None:
        """Has it made, unless it is there. Raises Unavailable, and ConstraintError where the
        checkpoint takes none."""
        if not isinstance(self._compiler, Compiler):
            raise self._compiler.with_traceback(None)
        with self._changed:
            made = self._made.get(constraint)
            if made is not None and monotonic() < made.until:
                self._made.move_to_end(constraint)
                return
            self._made.pop(constraint, None)
            self._wanted.add(constraint, tenant)
            self._changed.notify()
        self._start()

    def find(self, constraint: Constraint, tenant: bytes, so_far: Seq[int] = ()) -> Matcher | None:
        """A matcher of one's own; None while the grammar is being made. Raises ConstraintError, and
        Unavailable where it is not the constraint's fault."""
        with self._changed:
            made = self._made.get(constraint)
        if made is None:
            self.want(constraint, tenant)  # it may have been there, and gone before it was found
            return None
        if made.matcher is None:
            assert made.error is not None
            raise made.error.with_traceback(None)
        allowance = made.allowances.get(tenant)
        if allowance is None or allowance.ended_s > _REFUSED_S:
            allowance = made.allowances[tenant] = Allowance(self._tenants.of(tenant))
        return made.matcher.copy(allowance, so_far)

    def leave(self, constraint: Constraint, tenant: bytes) -> None:
        """Nobody of this tenant waits for it any more."""
        with self._changed:
            self._wanted.leave(constraint, tenant)

    def wait(self, within_s: float) -> None:
        """Until something was made."""
        made = select.poll()
        made.register(self.news, select.POLLIN)
        made.poll(within_s * 1000)
        self.hear()

    def tell(self) -> None:
        """There is something to find."""
        with self._changed:
            if not self._closed:
                os.eventfd_write(self.news, 1)

    def hear(self) -> None:
        """To call before `find`, by whoever polls `news`."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.news)

    def close(self, until: float) -> None:
        """Ends its threads and their process. Who is in the library then is waited for until so
        many monotonic seconds, and ends with what it makes."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._trial.close()
        for thread in self._threads:
            thread.join(max(0.0, until - monotonic()))
        self._end_news()

    def _start(self) -> None:
        if self._threads:
            return
        try:
            for _ in range(_AT_ONCE):
                thread = threading.Thread(target=self._work, name="grammars", daemon=True)
                thread.start()
                self._threads.append(thread)
        except RuntimeError as error:
            if not self._threads:
                raise Unavailable(str(error)) from error

    def _work(self) -> None:
        while (constraint := self._next()) is not None:
            began, matcher, error = monotonic(), None, None
            try:
                matcher = self._make(constraint)
            except (ConstraintError, Unavailable) as why:
                error = why
            self._keep(constraint, matcher, error, monotonic() - began)
            self.tell()

    def _make(self, constraint: Constraint) -> Matcher:
        """Raises ConstraintError, and Unavailable for anything else that goes wrong."""
        assert isinstance(self._compiler, Compiler)
        try:
            return self._compiler.matcher(self._trial.grammar(constraint))
        except (ConstraintError, Unavailable):
            raise
        except BaseException as error:
            if is_panic(error):
                raise ConstraintError(f"the grammar library failed: {error}") from error
            raise Unavailable(f"{type(error).__name__}: {error}") from error

    def _next(self) -> Constraint | None:
        """What to make, once there is something; None at the end."""
        with self._changed:
            while not self._closed:
                if constraint := self._wanted.take():
                    return constraint
                self._changed.wait()
        return None

    def _keep(
        self,
        constraint: Constraint,
        matcher: Matcher | None,
        error: ConstraintError | Unavailable | None,
        took_s: float,
    ) -> None:
        for_s = _UNAVAILABLE_S if isinstance(error, Unavailable) else _REFUSED_S
        until = inf if error is None else monotonic() + for_s
        with self._changed:
            tenant = self._wanted.done(constraint, took_s)
            self._made[constraint] = _Made(tenant, matcher, error, until)
            self._made.move_to_end(constraint)
            if len(self._made) > _KEPT:  # whoever has most of them gives the oldest
                most, _ = Counter(made.tenant for made in self._made.values()).most_common(1)[0]
                del self._made[next(c for c, made in self._made.items() if made.tenant == most)]
            self._changed.notify_all()

"""All of Penstock on a ground: the graph of services/app.py, started, tended, and ended."""

import asyncio
import json
import os
import secrets
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from services.cli.ground.ground import Ground, Report
from services.cli.interruptible import run
from services.cli.laptop_key import key_file, laptop_key
from services.cli.running import Running, holding, state_file
from services.cli.stack.data_directory import open_data_directory
from services.cli.stack.model_keeper import ModelKeeper, remove_model
from services.cli.stack.ready import not_ready, not_served
from services.cli.stack.replicas import check_room, missing, wanted
from services.cli.stack.wanted_models import WantedModels
from services.common.config import Settings, unknown_names
from services.common.discovery import Directory, Replica
from services.common.redis import Redis, connect
from services.common.start_failures import first_told, forget

_START_TIMEOUT_S = 300.0  # without progress: a large checkpoint takes long to load
_LOOK_EVERY_S = 1.0  # for replicas that failed to start
_END_OF_ONE_S = 2.0  # four workers took 6 s on two busy cores


class Stack:
    """Starts everything in order, reports what is being waited for, and leaves nothing behind; but
    on a ground where Penstock was before, what ran there stays if its successor does not start.

    with Stack(settings, ground, report=print) as running: ...
    """

    def __init__(
        self, settings: Settings, ground: Ground, *, report: Report, again: bool = False
    ) -> None:
        """`again`: in place of one that was lost. It starts without models, and its keeper brings
        those that were wanted: one that does not come back keeps the others from nothing."""
        self._models = settings.models
        # Absolute: Ray's processes may have another working directory.
        own = {"data_dir": settings.data_dir.resolve(), "models": [] if again else settings.models}
        self._settings = settings.model_copy(update=own)
        self._ground = ground
        self._report = report
        self._again = again
        self._before: list[str] = []  # applications that ran before this one deployed any
        self._stays = False
        self._id = secrets.token_hex(8)  # of who keeps the models
        self._keeper: ModelKeeper | None = None
        self._undo = ExitStack()

    @property
    def ends_within_s(self) -> float:
        """How long its end may take: all replicas drain side by side, and then end on the cores
        that they share."""
        replicas = sum(wanted(self._settings).values())
        return self._settings.drains_within_s + replicas * _END_OF_ONE_S

    @property
    def logs(self) -> Path | None:
        """Folder of the logs of all processes; None where it is not known."""
        return self._ground.logs

    def told_key(self, running: Running) -> str:
        """The local tenant's key where only this host can use it, else where it lies: what a server
        prints, in a container above all, ends in logs that others read."""
        if self._settings.on_loopback:
            return running.key
        return f"kept in {key_file(self._settings)}; others: penstock keys create --tenant NAME"

    def __enter__(self) -> Running:
        with self._undo:
            try:
                running = self._start()
            except (RuntimeError, OSError) as error:
                if self.logs is None:
                    raise
                raise RuntimeError(f"{error}\nlogs of all processes: {self.logs}") from error
            self._undo = self._undo.pop_all()
        return running

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def tend(self) -> bool:
        """To be called often while it is up. False: it is not this one's any more to keep up."""
        if not self._ground.tend():
            self._report("Penstock was taken down")
            self._stays = True  # whatever is there by now is not this one's
            return False
        if self._keeper is not None and self._keeper.replaced:
            self._report(f"another `penstock up` serves {self._settings.namespace!r} from now on")
            self._stays = self._ground.lasts
            return False
        return True

    def detach(self) -> None:
        """What was deployed stays when this stack ends."""
        self._stays = True

    def _start(self) -> Running:
        for name in unknown_names(os.environ):
            self._report(f"{name} is set, but there is no such setting")
        # What can be told now is told now, not by a replica that fails a minute later.
        self._settings = self._ground.checked(self._settings)
        open_data_directory(self._settings.data_dir)
        self._undo.enter_context(holding(self._settings))
        self._settings = self._undo.enter_context(self._ground.stores(self._settings))
        self._undo.enter_context(self._ground.ray(self._settings))
        check_room(self._settings, self._ground.resources())
        key = run(laptop_key(self._settings))
        gateway = self._deploy(key)
        self.metrics_url = gateway.metrics_url
        self.admin_url = gateway.facts.get("admin", "")
        running = Running(
            url=gateway.facts["url"],
            grpc=gateway.facts["grpc"],
            redis_url=self._settings.redis_dsn,
            namespace=self._settings.namespace,
            key=key,
            pid=os.getpid(),
        )
        self._keep_models()
        self._write_state(running)
        return running

    def _deploy(self, key: str) -> Replica:
        """Returns a gateway once everything is up and what it replaces is gone."""
        from services.app import delete_all, deployed

        namespace = self._settings.namespace
        self._before = deployed(namespace)
        with ExitStack() as failed:
            failed.callback(delete_all, namespace, but=self._before)
            gateway = run(self._start_services(key))
            failed.pop_all()
        self._undo.callback(self._take_down)
        return gateway

    def _take_down(self) -> None:
        """Drains the replicas; what remains of Serve is the ground's."""
        if not self._stays:
            from services.app import delete_all

            delete_all(self._settings.namespace)
            if self._keeper is not None:
                self._keeper.wait()
                delete_all(self._settings.namespace)  # a model that it was just deploying

    async def _start_services(self, key: str) -> Replica:
        """Returns a gateway once every replica is registered and it serves the models. Those that
        were registered before are replaced, and count for nothing."""
        from services.app import deploy

        settings = self._settings
        redis = connect(settings.redis_dsn)
        waited_for = wanted(settings)
        views = {
            service: Directory(redis, settings.namespace, service, settings.lease_s)
            for service in {service for service, _ in waited_for} | {"worker"}
        }
        try:
            await forget(redis, settings.namespace)
            for view in views.values():
                await view.start()
            before = frozenset(id for view in views.values() for id in view.replicas)
            await asyncio.to_thread(deploy, settings)
            await self._wait(
                redis, lambda: self._not_replaced() or missing(waited_for, views, before)
            )
            gateway = await _a_gateway(redis, settings, before)
            await self._wait(redis, lambda: not_ready(gateway.facts["url"]))
            names = [model.name for model in settings.models]
            url, cert = gateway.facts["url"], settings.gateway.tls_cert
            await self._wait(redis, lambda: not_served(url, key, names, cert))
            await self._remove_others(redis, views["worker"])
            await self._write_wanted(WantedModels(redis, settings.namespace))
            return gateway
        finally:
            for view in views.values():
                await view.stop()
            await redis.aclose()

    async def _wait(self, redis: Redis, missing: Callable[[], list[str]]) -> None:
        """Raises RuntimeError with the reason of the first replica that does not start: here none
        fails for a reason that a second attempt would not meet."""
        # Of those that are replaced, each drains before another takes its place.
        patience_s = _START_TIMEOUT_S + self._settings.drains_within_s
        progress, look = time.monotonic(), 0.0
        said: list[str] = []
        while waiting := await asyncio.to_thread(missing):
            now = time.monotonic()
            if waiting != said:
                self._report("waiting for: " + ", ".join(waiting))
                said, progress = waiting, now
            if now > look:
                if reason := await self._failure(redis):
                    raise RuntimeError(reason)
                look = now + _LOOK_EVERY_S
            if now > progress + patience_s:
                raise RuntimeError(f"not up after {patience_s:.0f} s: {', '.join(waiting)}")
            await asyncio.sleep(0.2)

    async def _failure(self, redis: Redis) -> str:
        """Why a replica does not start, as itself says, or else Serve; empty while all is well."""
        applications = await asyncio.to_thread(self._applications)
        if told := await first_told(redis, self._settings.namespace):
            return str(told)
        failed = (a.message for a in applications.values() if a.status == "DEPLOY_FAILED")
        return next(failed, "")

    def _not_replaced(self) -> list[str]:
        """What ran before, and is replaced step by step, as long as Serve is at it."""
        left = []
        for name, its in self._applications().items():
            if name in self._before and its.status != "RUNNING":
                parts = [part for part, one in its.deployments.items() if one.status != "HEALTHY"]
                left += [f"the new {part}" for part in parts or [name]]
        return left

    def _applications(self) -> dict[str, Any]:
        """Serve's own idea of each that is deployed here."""
        from ray import serve

        from services.app import application_name

        models = ("", *(model.name for model in self._settings.models))
        own = {application_name(self._settings.namespace, model) for model in models}
        return {n: its for n, its in serve.status().applications.items() if n in own}

    async def _remove_others(self, redis: Redis, workers: Directory) -> None:
        """Models that an earlier deployment had, and this one has not."""
        from services.app import deployed_models

        own = {model.name for model in self._settings.models}
        others = set(deployed_models(self._settings.namespace)) - own
        if others:
            self._report(f"not served any more: {', '.join(sorted(others))}")
        removals = (remove_model(redis, self._settings, workers, name) for name in others)
        await asyncio.gather(*removals)

    async def _write_wanted(self, models: WantedModels) -> None:
        """Now that they are served: whoever kept those of before has kept them until here, and
        sees by the mark that he is replaced."""
        if self._again and (await models.look()).keeper:
            await models.keep(self._id)
        else:
            await models.start_with(self._models, self._id)

    def _keep_models(self) -> None:
        keeper = ModelKeeper(self._id, self._settings, self._ground.resources, self._report)
        keeper.start()
        self._keeper = keeper
        self._undo.callback(keeper.stop)
        keeper.settle(_START_TIMEOUT_S)

    def _write_state(self, running: Running) -> None:
        path = state_file(self._settings)
        path.touch(mode=0o600)
        path.write_text(json.dumps(asdict(running)))
        self._undo.callback(path.unlink, missing_ok=True)


async def _a_gateway(redis: Redis, settings: Settings, before: Collection[str]) -> Replica:
    """By a fresh look, none of before: one that was lost is listed until its lease ends."""
    view = Directory(redis, settings.namespace, "gateway", settings.lease_s)
    await view.refresh()
    new = [replica for id, replica in view.replicas.items() if id not in before]
    if not new:
        raise RuntimeError("the gateway ended when all was up")
    return new[0]

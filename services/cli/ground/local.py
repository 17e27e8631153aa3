"""A ground of one machine, for one stack: its own Ray, Redis and ports, all within this host."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pydantic import SecretStr

from services.cli.ground.alone import check_alone
from services.cli.ground.doors import held_ports
from services.cli.ground.ground import Report
from services.cli.ground.ports import check_ports
from services.cli.ground.ray_cluster import RayCluster
from services.cli.ground.reached import check_redis
from services.cli.interruptible import run
from services.cli.stack.checkpoints import check_embeddings, made_local
from services.cli.stack.supervisor import LOST
from services.common.config import Settings
from services.common.embedded_redis import EmbeddedRedis
from services.common.locks.secrets import redacted
from services.common.locks.socket_folder import SocketFolder


class LocalGround:
    """A Ground whose parts end with it."""

    lasts = False

    def __init__(self, report: Report, *, again: bool = False) -> None:
        """`again`: in place of one that was lost, whose replicas may still be registered."""
        self._report = report
        self._again = again
        self._sockets = SocketFolder()
        self._redis: EmbeddedRedis | None = None
        self._ray: RayCluster | None = None

    @property
    def logs(self) -> Path | None:
        return self._ray.logs if self._ray is not None else None

    def checked(self, settings: Settings) -> Settings:
        """The models' checkpoints are on this machine afterwards, and can be read."""
        check_embeddings(settings.retrieval)
        models = [made_local(model, settings, self._report) for model in settings.models]
        settings = settings.on_node("127.0.0.1").model_copy(update={"models": models})
        check_ports(settings)
        return settings

    @contextmanager
    def stores(self, settings: Settings) -> Iterator[Settings]:
        with ExitStack() as started:
            started.callback(self._sockets.close)
            settings = started.enter_context(held_ports(settings))
            if "redis_url" in settings.model_fields_set:
                self._report(f"redis: {redacted(settings.redis_dsn)}")
                run(check_redis(settings))
                if not self._again:
                    run(check_alone(settings, self._report))
                yield settings
            else:
                redis = self._redis = EmbeddedRedis(settings.data_dir / "redis", self._sockets)
                started.enter_context(redis)
                self._report(f"redis: {redacted(redis.url)} (embedded)")
                yield settings.model_copy(update={"redis_url": SecretStr(redis.url)})

    @contextmanager
    def ray(self, settings: Settings) -> Iterator[None]:
        self._report("ray: starting")
        ray = self._ray = RayCluster(settings.data_dir, self._sockets.path)
        try:
            ray.start()
            yield
        finally:
            ray.stop()

    def resources(self) -> dict[str, float]:
        assert self._ray is not None
        return self._ray.resources()

    def tend(self) -> bool:
        """What it cannot start again ends this process with `LOST`, for its supervisor to start all
        anew."""
        assert self._ray is not None
        try:
            if self._redis is not None and self._redis.ended:
                self._report("redis ended: starting it again")
                self._redis.start()
            for line in self._ray.tend():
                self._report(line)
        except Exception as error:
            self._report(str(error))
            os._exit(LOST)  # at once: what Ray does at an exit needs the parts that are lost
        return True

"""All settings together: what a process reads of its environment when it starts."""

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from services.common.config.base import AUTO, Replicated, ServiceSettings, is_loopback
from services.common.config.gateway import GatewaySettings
from services.common.config.identity import IdentitySettings
from services.common.config.jobs import JobsSettings
from services.common.config.metering import MeteringSettings
from services.common.config.models import ModelSpec
from services.common.config.policy import PolicySettings
from services.common.config.retrieval import RetrievalSettings
from services.common.config.router import RouterSettings
from services.common.config.runs import RunsSettings
from services.common.config.security import SecuritySettings
from services.common.config.stores import StoreSettings
from services.common.config.tokenizer import TokenizerSettings
from services.common.config.worker import Role, WorkerSettings


class Settings(SecuritySettings, StoreSettings, BaseSettings):
    """Everything that a Penstock process can be told."""

    model_config = SettingsConfigDict(
        env_prefix="PENSTOCK_",
        env_nested_delimiter="__",
        extra="ignore",
        populate_by_name=True,
        hide_input_in_errors=True,  # it may be a secret
    )

    data_dir: Path = Field(
        Path(".penstock"), description="local state: embedded Redis and Qdrant, secrets, logs"
    )
    bind_host: str = Field(
        "127.0.0.1",
        description="where the services' gRPC servers listen; auto: at the address of their Ray "
        "node, the default of `penstock up --address`",
    )
    advertise_host: str = Field("", description="how peers reach this host; empty: bind_host")
    lease_s: float = Field(3.0, gt=0.2, description="a silent replica leaves the registry after")
    model_memory_s: float = Field(
        300.0, gt=0, description="a model is known for so long after its last worker was stopped"
    )
    drain_grace_s: float = Field(20.0, ge=0, description="running requests may finish this long")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = "INFO"
    log_prompts: bool = Field(
        False, description="put prompts and answers into spans; logs never have them"
    )
    models: list[ModelSpec] = Field(default_factory=list)

    gateway: GatewaySettings = GatewaySettings()
    identity: IdentitySettings = IdentitySettings()
    jobs: JobsSettings = JobsSettings()
    metering: MeteringSettings = MeteringSettings()
    policy: PolicySettings = PolicySettings()
    retrieval: RetrievalSettings = RetrievalSettings()
    tokenizer: TokenizerSettings = TokenizerSettings()
    router: RouterSettings = RouterSettings()
    runs: RunsSettings = RunsSettings()
    worker: WorkerSettings = WorkerSettings()
    _on_cpus: int = 1  # set by `of_worker`, which leaves other models out

    @field_validator("models")
    @classmethod
    def _no_two_of_one_name(cls, models: list[ModelSpec]) -> list[ModelSpec]:
        names = [name for model in models for name in (model.name, *model.adapters)]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two models are called {', '.join(sorted(twice))}")
        return models

    @model_validator(mode="after")
    def _local_store_has_one_process(self) -> "Settings":
        self.replicas_of("retrieval")
        return self

    @field_validator("log_level", mode="before")
    @classmethod
    def _in_any_case(cls, level: object) -> object:
        return level.upper() if isinstance(level, str) else level

    @property
    def reflects(self) -> bool:
        """Whether gRPC servers offer reflection."""
        return self.on_loopback if self.reflection is None else self.reflection

    @property
    def on_loopback(self) -> bool:
        """Whether only this host reaches it: the door, and what is behind it."""
        hosts = (self.bind_host, self.gateway.host)
        return all(is_loopback(host) for host in hosts)

    def of_worker(self, model: ModelSpec, role: Role) -> "Settings":
        """As a worker in one of the model's pools has them; the pool's own count first."""
        pool = model.pools[role]
        own = {**model.overrides, **pool.overrides, "role": role, "model": model.name}
        if pool.ray is not None:
            own["ray"] = pool.ray
        worker = self.worker.model_copy(update={**own, "replicas": pool.replicas})
        found = self.model_copy(update={"worker": worker, "models": [model]})
        found._on_cpus = self._counted_on_cpus(model)
        return found

    @property
    def workers_on_cpus(self) -> int:
        """Of these settings if they are a worker's: how many workers of all models, it among them,
        compute on a CPU."""
        return self._on_cpus

    def _counted_on_cpus(self, model: ModelSpec) -> int:
        """`model`: in place of that of its name, or beside the others."""
        others = [other for other in self.models if other.name != model.name]
        return sum(
            pool.replicas
            for spec in (model, *others)
            for pool in spec.pools.values()
            if {"device": self.worker.device, **spec.overrides, **pool.overrides}["device"] == "cpu"
        )

    def replicas_of(self, service: str) -> int:
        """How many of a service the Serve graph has; workers are counted by their pools.

        Raises ValueError where that cannot be.
        """
        section = getattr(self, service)
        count: int = section.count if isinstance(section, Replicated) else section.replicas
        if service == "retrieval" and count > 1 and not self.qdrant_url:
            raise ValueError(
                "setting PENSTOCK_RETRIEVAL__REPLICAS: a local vector store is of one process; "
                "set QDRANT_URL, or PENSTOCK_RETRIEVAL__REPLICAS=1"
            )
        return count

    def of_service(self, name: str) -> ServiceSettings:
        """The section of one service."""
        section: ServiceSettings = getattr(self, name)
        return section

    def on_node(self, host: str) -> "Settings":
        """With the address of a Ray node where AUTO stands."""
        changes: dict[str, object] = {}
        if self.bind_host == AUTO:
            changes["bind_host"] = host
        if self.gateway.host == AUTO:
            changes["gateway"] = self.gateway.model_copy(update={"host": host})
        return self.model_copy(update=changes)

    @property
    def drains_within_s(self) -> float:
        """How long the drain of a replica may take; the gateway's takes longest."""
        return self.gateway.leaves_after_s + self.drain_grace_s

    @property
    def peer_host(self) -> str:
        """The host name that this process registers under."""
        if self.advertise_host:
            return self.advertise_host
        if self.bind_host in ("0.0.0.0", "::"):
            return socket.gethostbyname(socket.gethostname())
        return self.bind_host


_OF_COMMANDS = {"API_KEY"}  # read by the command line's clients


def unknown_names(environment: Mapping[str, str]) -> list[str]:
    """`PENSTOCK_…` variables that no setting has, most likely misspelt. For a warning, not an
    error: Kubernetes sets variables of its own that are named after services.
    """
    known = {name.upper() for name in Settings.model_fields} | _OF_COMMANDS
    names = (name for name in environment if name.startswith("PENSTOCK_"))
    return sorted(n for n in names if n.removeprefix("PENSTOCK_").split("__")[0] not in known)

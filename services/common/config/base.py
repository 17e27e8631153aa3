"""What sections of settings are made of."""

import os
from ipaddress import ip_address
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

AUTO = "auto"  # as a host: the address of the Ray node that a replica runs on


class Section(BaseModel):
    """A group of settings; a misspelt name in it is an error, not a silent default."""

    model_config = ConfigDict(extra="forbid")


class RayOptions(Section):
    """What one replica takes of the Ray node that it runs on; by default nothing."""

    num_cpus: float = Field(0, ge=0, description="CPU cores, as Ray counts them")
    num_gpus: float = Field(0, ge=0, description="GPUs, as Ray counts them")
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict, description="a node's own resources, as `ray start --resources`"
    )

    @property
    def asks_for_something(self) -> bool:
        """Whether not every node has room for it."""
        return bool(self.num_cpus or self.num_gpus or self.resources)


class ServiceSettings(Section):
    """What every service has: what its replicas take, and ports of its own."""

    ray: RayOptions = Field(
        RayOptions(), description="JSON; what each replica takes of its Ray node"
    )
    internal_port: int = Field(
        0, ge=0, le=65535, description="gRPC for the other services; 0 takes a free one"
    )
    internal_connections: int = Field(
        1024, gt=0, description="to `internal_port` at once; further ones are closed"
    )
    metrics_port: int = Field(0, ge=0, le=65535, description="HTTP; 0 takes a free one")
    health_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="gRPC health checks without TLS or secret, for probes; unset: none",
    )


class Replicated(ServiceSettings):
    """A service of which two are worth their memory: the other one goes on when one is lost."""

    replicas: int = Field(
        0, ge=0, description="of the Serve graph; 0: two where there are four cores, else one"
    )

    @property
    def count(self) -> int:
        """How many replicas there shall be on this machine."""
        return self.replicas or (2 if (os.cpu_count() or 1) >= 4 else 1)


def is_loopback(host: str) -> bool:
    """Whether what listens there is reached from this machine alone."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # a name
        return False

"""Served models: their pools of workers, and what is set for those alone."""

from typing import Annotated, Any

from pydantic import (
    Field,
    StringConstraints,
    field_serializer,
    field_validator,
    model_validator,
)

from services.common.config.base import RayOptions, Section
from services.common.config.worker import Role, WorkerSettings

# A pool and a role say these of a worker; what KV blocks look like is the same in both pools.
NOT_OVERRIDDEN = {"role", "model", "replicas", "ray"}
OF_BOTH_POOLS = {"block_size", "dtype", "kv_format", "quantization"}


# Slashes as in a hub's ids; neither spaces nor control characters, which no request, log line or
# price list shows for what they are.
MODEL_NAME = r"^\w[\w.:/+@-]*$"
NOT_A_NAME = (
    "a model's name has at most 100 letters, digits and . : / + @ - _, and begins with a letter, "
    "a digit or _"
)
AdapterName = Annotated[str, StringConstraints(pattern=MODEL_NAME, max_length=100)]


class Overrides(Section):
    """May set a worker's settings anew."""

    worker: WorkerSettings = Field(
        WorkerSettings(), description="settings of the worker section, in place of that section's"
    )

    @field_validator("worker")
    @classmethod
    def _of_a_worker_alone(cls, worker: WorkerSettings) -> WorkerSettings:
        if wrong := worker.model_fields_set & NOT_OVERRIDDEN:
            raise ValueError(f"{', '.join(sorted(wrong))}: not set here; a pool has replicas, ray")
        return worker

    @field_serializer("worker")
    def _what_is_set(self, worker: WorkerSettings) -> dict[str, Any]:
        return worker.model_dump(mode="json", exclude_unset=True)

    @property
    def overrides(self) -> dict[str, Any]:
        return {name: getattr(self.worker, name) for name in self.worker.model_fields_set}


class Pool(Overrides):
    """Workers of one model that do the same: how many, what each takes, what is theirs alone."""

    replicas: int = Field(1, ge=1)
    ray: RayOptions | None = Field(None, description="unset: PENSTOCK_WORKER__RAY")


class ModelSpec(Overrides):
    """A served model: the name that requests use, where its checkpoint lies, and its workers.

    Without pools it has one to prefill and one to decode; with `decode` alone, that does both.
    """

    # It is part of the names of a Serve application, of Ray resources and of Redis keys.
    name: str = Field(pattern=MODEL_NAME, max_length=100)
    path: str = Field(description="folder of a Hugging Face checkpoint, a GGUF file, or a hub id")
    adapters: dict[AdapterName, str] = Field(
        default_factory=dict,
        description="adapters of low rank (LoRA) that it is served with, too: by the names that "
        "requests use, folders of the peft library's files",
    )
    prefill: Pool | None = None
    decode: Pool | None = None

    @model_validator(mode="after")
    def _pools_fit(self) -> "ModelSpec":
        if self.prefill is not None and self.decode is None:
            raise ValueError("prefill: needs a decode pool beside it")
        if self.prefill is None:
            return self
        for pool in (self.prefill, self.decode):
            if wrong := pool.worker.model_fields_set & OF_BOTH_POOLS:  # type: ignore[union-attr]
                raise ValueError(
                    f"{', '.join(sorted(wrong))}: of both pools, as KV blocks go from one to the "
                    "other; set it in the model's own `worker`"
                )
        return self

    def sized(self, prefill: int, decode: int) -> "ModelSpec":
        """With pools of that many workers, if it names none; no `prefill`: one pool for both."""
        if self.decode is not None:
            return self
        first = Pool(replicas=prefill) if prefill else None
        return self.model_copy(update={"prefill": first, "decode": Pool(replicas=decode)})

    @property
    def names(self) -> set[str]:
        """That requests may use."""
        return {self.name, *self.adapters}

    @property
    def pools(self) -> dict[Role, Pool]:
        """By what their workers do."""
        if self.decode is None:
            return self.sized(1, 1).pools
        if self.prefill is None:
            return {"both": self.decode}
        return {"prefill": self.prefill, "decode": self.decode}

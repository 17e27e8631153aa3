"""PENSTOCK_ROUTER__…"""

from typing import Literal

from pydantic import Field

from services.common.config.base import Replicated


class RouterSettings(Replicated):
    queue_limit: int = Field(256, ge=0, description="waiting requests over all tenants")
    max_requests: int = Field(4096, gt=0, description="requests under way; more are refused")
    queue_timeout_s: float = Field(60.0, gt=0, description="longest wait for admission")
    slot_lease_s: float = Field(
        5.0, gt=1, description="a silent router's slots and places in the queue return after this"
    )
    ageing_s: float = Field(
        10.0,
        gt=0,
        description="a tenant that waits this long without a slot rises one priority lane",
    )
    recall_after_s: float = Field(
        0.25,
        ge=0,
        description="who waits this long may take a slot of a tenant that has twice its share; one "
        "of the low lane goes to who waits above it at once",
    )
    max_recalls: int = Field(
        2, ge=0, description="how often one request may lose its slot so; 0: slots are kept"
    )
    admission_without_redis: Literal["open", "closed"] = "open"
    split: Literal["auto", "always", "never"] = "auto"
    split_min_tokens: int = Field(
        128, ge=0, description="auto: uncached prompt tokens below which splitting is not weighed"
    )
    max_failovers: int = Field(
        3, ge=0, description="workers lost under one request; those that drain do not count"
    )
    stall_timeout_s: float = Field(
        30.0,
        gt=0,
        description="a worker with work must step within; longer by what a long step takes",
    )
    worker_patience_s: float = Field(
        20.0, ge=0, description="how long a request waits while no worker of its model is ready"
    )

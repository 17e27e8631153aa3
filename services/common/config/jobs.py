"""PENSTOCK_JOBS__…"""

from pydantic import Field

from services.common.config.base import Section


class JobsSettings(Section):
    """Durable jobs: lines of batches, and files on their way into vector stores."""

    lease_s: float = Field(
        10.0, ge=0.5, description="a killed gateway's jobs are taken over after this"
    )
    in_flight: int = Field(
        32,
        gt=0,
        description="lines of batches under way at one gateway at most; how many of them there are "
        "depends on what is idle",
    )
    tries: int = Field(
        5, gt=0, description="of a line that fails by the platform's fault; then it is dead"
    )
    backoff_s: float = Field(
        1.0, gt=0, description="before the second try, and twice as long before each other"
    )
    max_lines: int = Field(50_000, gt=0, description="of one batch")
    max_unfinished: int = Field(20, gt=0, description="batches of one tenant")
    kept: int = Field(
        1000, gt=0, description="batches of one tenant; the oldest that have ended go first"
    )

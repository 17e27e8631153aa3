"""PENSTOCK_POLICY__…"""

from pathlib import Path

from pydantic import Field

from services.common.config.base import Section


class PolicySettings(Section):
    file: Path | None = Field(
        None, description="rules, YAML (docs/policy.md), read anew when it changes; unset: none"
    )
    look_every_s: float = Field(2.0, gt=0, description="how often the file is looked at")
    max_bytes: int = Field(
        16 * 2**20, gt=0, description="of a request's texts together; more are refused unseen"
    )
    max_seconds: float = Field(
        2.0, gt=0, description="of a processor, for a request's texts; what takes more is refused"
    )

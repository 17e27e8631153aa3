"""PENSTOCK_POLICY__…"""

from pathlib import Path

from pydantic import Field

from services.common.config.base import Section


class PolicySettings(Section):
    file: Path | None = Field(
        None, description="rules, YAML (docs/policy.md), read anew when it changes; unset: none"
    )
    look_every_s: float = Field(2.0, gt=0, description="how often the file is looked at")

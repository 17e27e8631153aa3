"""PENSTOCK_RUNS__…"""

from pydantic import Field

from services.common.config.base import Section


class RunsSettings(Section):
    """Runs that outlive their connections, and answers that are stored."""

    kept_s: float = Field(86_400.0, ge=60, description="how long they are kept in Redis")
    kept: int = Field(1000, gt=0, description="of one tenant; the oldest that have ended go first")
    max_bytes_per_tenant: int = Field(
        32 * 2**20, gt=0, description="of all of its together, prompts and answers, in Redis"
    )
    conversations: int = Field(1000, gt=0, description="of one tenant")
    conversations_kept_s: float = Field(
        30 * 86_400.0, ge=60, description="how long one is kept in Redis after its last change"
    )
    max_conversation_bytes_per_tenant: int = Field(
        32 * 2**20, gt=0, description="of all its conversations together, in Redis"
    )
    max_followers: int = Field(
        2000, gt=0, description="streams of runs at one gateway; no tenant gets all of them"
    )
    lease_s: float = Field(
        5.0, ge=0.5, description="a killed gateway's runs are taken over after this"
    )

"""A gateway whose jobs are another's after a second."""

from collections.abc import AsyncIterator

import pytest

from services.common.config import JobsSettings
from tests.support.gateway_rig import Rig, gateway_rig


@pytest.fixture
async def rig(redis_url: str, namespace: str) -> AsyncIterator[Rig]:
    async with gateway_rig(redis_url, namespace, jobs=JobsSettings(lease_s=1.0)) as rig:
        yield rig

"""Clusters whose parts the tests kill; each test has one of its own."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.common.config import ModelSpec
from tests.support.checkpoint import write_checkpoint
from tests.support.cluster import Cluster


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), window=4096)


@pytest.fixture
async def cluster(tmp_path: Path, checkpoint: Path) -> AsyncIterator[Cluster]:
    """Not started yet. Stalls are noticed after 3 s."""
    own = {"PENSTOCK_ROUTER__STALL_TIMEOUT_S": "3", "PENSTOCK_ROUTER__SPLIT": "always"}
    models = [ModelSpec(name="tiny", path=str(checkpoint))]
    async with Cluster(tmp_path, models, environment=own) as cluster:
        yield cluster

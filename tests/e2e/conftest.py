"""One whole Penstock, as plain processes, for all end-to-end tests: they leave it as it was."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.common.config import ModelSpec
from tests.support.checkpoint import write_checkpoint
from tests.support.cluster import Cluster


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), window=2048)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def penstock(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: Path
) -> AsyncIterator[Cluster]:
    models = [ModelSpec(name="tiny", path=str(checkpoint))]
    # What is worth splitting depends on how fast the machine is just now.
    own = {"PENSTOCK_ROUTER__SPLIT": "always"}
    async with Cluster(tmp_path_factory.mktemp("penstock"), models, environment=own) as cluster:
        await cluster.start(workers=["prefill", "decode"], retrieval=True)
        yield cluster

"""A cluster whose parts the tests of a module kill: each says what it needs to be up, and what was
killed before is replaced."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.common.config import ModelSpec
from tests.support.checkpoint import write_checkpoint
from tests.support.cluster import Cluster

WINDOW = 16_384
LASTS_S = 3.0
"""What is lost is lost while answers run, however fast the machine is."""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), window=WINDOW)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: Path
) -> AsyncIterator[Cluster]:
    """Not started yet. Stalls are noticed after 3 s; who is asked to end moves its streams."""
    own = {
        "PENSTOCK_ROUTER__STALL_TIMEOUT_S": "3",
        "PENSTOCK_ROUTER__SPLIT": "always",
        "PENSTOCK_DRAIN_GRACE_S": "0",
    }
    models = [ModelSpec(name="tiny", path=str(checkpoint))]
    async with Cluster(tmp_path_factory.mktemp("cluster"), models, environment=own) as cluster:
        yield cluster

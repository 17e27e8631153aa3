"""What tests of two workers share."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.worker.engine.kv import payload as kv_payload
from tests.unit.worker.split_rig import Split, two_workers


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where shared memory would be."""
    monkeypatch.setattr(kv_payload, "FOLDER", tmp_path)
    return tmp_path


@pytest.fixture
async def split(folder: Path) -> AsyncIterator[Split]:
    async with two_workers(folder) as pair:
        yield pair

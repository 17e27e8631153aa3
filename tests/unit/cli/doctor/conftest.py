"""What the doctor's tests share."""

from collections.abc import Callable
from pathlib import Path

import pytest

from services.common.config import Settings


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., Settings]:
    """Of an installation whose data directory is not made yet, unless told otherwise."""

    def make(**told: object) -> Settings:
        return Settings(**{"data_dir": tmp_path / "data", **told})

    return make

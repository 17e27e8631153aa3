"""What the doctor's tests share: settings of an installation, and its findings by what they are
about."""

from collections.abc import Callable
from pathlib import Path

import pytest

from services.cli.doctor.findings import Finding
from services.common.config import Settings


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., Settings]:
    """Of a data directory that is not made yet, unless told otherwise."""

    def make(**told: object) -> Settings:
        return Settings(**{"data_dir": tmp_path / "data", **told})

    return make


def about(findings: list[Finding], what: str) -> Finding:
    """The one finding about it."""
    found = [finding for finding in findings if finding.about == what]
    assert len(found) == 1, f"{what!r} in {findings}"
    return found[0]

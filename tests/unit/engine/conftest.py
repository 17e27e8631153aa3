"""What the engine's tests share."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from services.worker.engine.kv.tiers.pace import Pace
from tests.unit.engine import checkpoints, driving

torch.set_num_threads(1)

of_a_module = pytest.fixture(scope="module", autouse=True)(driving.closing_engines)
of_a_test = pytest.fixture(autouse=True)(driving.closing_engines)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the folder of a variant's checkpoint, made when first asked for."""
    made: dict[str, Path] = {}

    def get(variant: str = "gqa") -> Path:
        if variant not in made:
            made[variant] = checkpoints.make(tmp_path_factory.mktemp(variant), variant)
        return made[variant]

    return get


@pytest.fixture
def loading_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine's disk is, and however small the model."""
    monkeypatch.setattr(Pace, "expected_s", lambda *_: 0.0)


@pytest.fixture(params=[False, True], ids=["plain", "overlapped"])
def both_loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """The test runs with both of the engine's loops; which one it is."""
    monkeypatch.setitem(driving.SMALL, "overlap", request.param)
    overlap: bool = request.param
    return overlap

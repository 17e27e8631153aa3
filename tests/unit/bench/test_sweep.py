"""What a token costs by batch and context: the plans are right, the drawings whole."""

from pathlib import Path

import pytest

from bench import sweep
from tests.support.checkpoint import write_checkpoint


def test_a_plan_of_decodes_reads_blocks_of_its_own() -> None:
    plan = sweep.decode_plan(batch=3, context=33)
    assert plan.num_decodes == 3
    assert plan.lengths.tolist() == [33] * 3
    assert plan.positions.tolist() == [32] * 3
    assert plan.block_tables.tolist() == [[[0, 1, 2], [3, 4, 5], [6, 7, 8]]]
    assert plan.rows.tolist() == [0, 1, 2]


def test_a_sweep_gives_every_point_and_draws_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "BATCHES": (1, 4),
        "CONTEXTS": (16, 40, 1000),
        "WAITING": (0, 3),
        "RUNNING": 2,
        "PLANNED_STEPS": 3,
        "PASS_S": 0.0,
    }.items():
        monkeypatch.setattr(sweep, name, value)
    model = write_checkpoint(tmp_path / "model")
    costs = list(sweep.costs(model))
    # A context that the model has not is left out.
    asked = [(batch, context) for context in (16, 40) for batch in (1, 4)]
    assert [(p["batch"], p["context"]) for p in costs] == asked
    assert all(p["step_s"] > 0 for p in costs)
    waiting = list(sweep.waiting(model))
    assert [p["waiting"] for p in waiting] == [0, 3]
    assert all(p["planning_s"] > p["collecting_s"] > 0 for p in waiting)
    assert all(p["frame_s"] > 0 for p in waiting)
    sweep.draw({"cost": costs, "waiting": waiting}, tmp_path / "plots")
    drawn = {path.name: path.read_text() for path in (tmp_path / "plots").iterdir()}
    assert set(drawn) == {"cost-by-batch.svg", "cost-by-context.svg", "planning.svg"}
    assert "context 40" in drawn["cost-by-batch.svg"]
    assert "batch 4" in drawn["cost-by-context.svg"]
    assert "the limit" in drawn["planning.svg"]
    sweep.draw({"cost": costs, "waiting": waiting}, tmp_path / "plots")
    assert drawn == {path.name: path.read_text() for path in (tmp_path / "plots").iterdir()}

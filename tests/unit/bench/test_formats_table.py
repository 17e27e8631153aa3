"""The table of formats in docs/quantization.md: of all that the engine has, as it was measured."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench import format_quality
from bench.format_quality import Apart, kl, row_of
from bench.quantization import ALL, DOCS, MARKS, RESULTS, lines

DEMO = Path(__file__).parents[3] / "models/demo"


def test_the_table_is_of_every_format_and_of_what_was_measured() -> None:
    known = json.loads(RESULTS.read_text())
    assert set(known) == {"auto", *ALL}, "run `python -m bench.quantization table`"
    told = DOCS.read_text().split(MARKS[0])[1].split(MARKS[1])[0]
    assert told.strip() == "\n".join(lines(known)).strip()


def test_kl_is_of_what_is_wanted_from_what_was_found() -> None:
    wanted, found = np.float32([[0, 0], [np.log(3), 0]]), np.float32([[0, 0], [0, 0]])
    expected = 0.75 * np.log(0.75 / 0.5) + 0.25 * np.log(0.25 / 0.5)
    np.testing.assert_allclose(kl(wanted, found), [0, expected], atol=1e-7)
    assert kl(found + 5, found).tolist() == [0, 0], "logits are known up to a number"


def test_what_is_lost_and_gained_is_told_apart() -> None:
    exact = Apart([0.0], [True], [0.0], {"a": [True, True, False], "b": [True]})
    row = row_of(
        Apart([0.5, 0.1], [True, False], [0.3], {"a": [True, False, True], "b": [True]}), exact
    )
    assert (row["lost"], row["gained"], row["tasks"]) == (1, 1, {"a": 2, "b": 1})
    assert (row["right"], row["same"]) == (75, 50)
    assert row["kl"] == pytest.approx(0.3)


def test_fewer_bits_say_something_else_and_none_the_same() -> None:
    formats = {"none": {}, "int8": {"quantization": "int8"}, "int4": {"quantization": "int4"}}
    found = format_quality.measured(DEMO, formats, count=3, threads=1)
    mean = {name: np.mean(apart.kl_of_passages) for name, apart in found.items()}
    assert mean["auto"] == mean["none"] == 0
    assert 0 < 4 * mean["int8"] < mean["int4"] < 1

"""What a checkpoint says of sampling, where a request does not."""

import json
from pathlib import Path

import pytest

from protos.common_pb2 import Sampling
from services.tokenizer.checkpoints.own_sampling import fill, read_own


@pytest.mark.parametrize(
    ("told", "taken"),
    [
        ({"temperature": 0.6, "top_k": 20, "do_sample": True}, {"temperature": 0.6, "top_k": 20}),
        ({"temperature": 0, "min_p": 0.05}, {"temperature": 0, "min_p": 0.05}),
        ({"top_p": 0, "repetition_penalty": 1.1, "top_k": None}, {"repetition_penalty": 1.1}),
        ({"temperature": float("nan"), "top_p": "0.9", "top_k": 4.5, "min_p": True}, {}),
        ([], {}),
    ],
)
def test_what_is_no_value_is_left_out(
    tmp_path: Path, told: object, taken: dict[str, float]
) -> None:
    assert read_own(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text(json.dumps(told))
    assert read_own(tmp_path) == taken


def test_a_file_that_is_no_json_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    assert read_own(tmp_path) == {}


def test_what_the_client_named_stays() -> None:
    sampling = Sampling(temperature=0, top_p=1, unnamed=["top_p", "top_k"])
    fill(sampling, {"temperature": 0.6, "top_p": 0.9, "min_p": 0.1})
    assert sampling == Sampling(temperature=0, top_p=0.9)

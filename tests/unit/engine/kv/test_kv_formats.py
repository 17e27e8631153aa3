"""Keys and values in 8 bits, and in 4: what is computed with them by all kernels, and that all ways
of going through an engine give the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.cpu.library import built
from services.worker.engine import EngineConfig, Request
from services.worker.engine.config import KV_FORMATS
from services.worker.engine.models.registry import read_config
from services.worker.engine.sizes import choose_dtype, kv_bytes_per_block
from services.worker.engine.speculation.draft_model import with_room
from tests.unit.engine import checkpoints
from tests.unit.engine.driving import (
    assert_moves,
    drive,
    generate,
    greedy,
    make_engine,
    make_prompts,
)
from tests.unit.engine.guessing import KINDS, guessing_engine, requests_of, told
from tests.unit.engine.test_engine_parity import watch_logits

Checkpoint = Callable[..., Path]
NARROW = KV_FORMATS[1:]
each_kv_format = pytest.mark.parametrize("kv_format", NARROW)


def logits_by(folder: Path, monkeypatch: pytest.MonkeyPatch, **how: Any) -> torch.Tensor:
    """Behind a prompt in pieces, and behind tokens of an answer."""
    engine = make_engine(folder, max_batched_tokens=16, **how)
    seen: list[torch.Tensor] = []
    watch_logits(engine, seen, monkeypatch)
    for output in ([], [7], [7, 9]):
        generate(engine, [list(range(3, 93)) + output], greedy(1))
    return torch.cat(seen)


@each_kv_format
@pytest.mark.parametrize("variant", [v for v in checkpoints.VARIANTS if v != "head-dim"])
@pytest.mark.skipif(not built(), reason="no kernels for this processor")
def test_every_family_computes_what_the_reference_does(
    checkpoint: Checkpoint, variant: str, kv_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for numbers that lie between two of few bits: they are either by a sum's last bit."""
    folder = checkpoint(variant)
    want = logits_by(folder, monkeypatch, kernels="reference", kv_format=kv_format)
    exact = logits_by(folder, monkeypatch, kernels="reference")
    apart = (exact - want).abs().mean()
    for kernels in built():
        found = logits_by(folder, monkeypatch, kernels=kernels, kv_format=kv_format)
        assert (found - want).abs().mean() < apart / 4
    assert 1e-5 < apart < exact.std() / (2 if kv_format == "int4" else 5)


@each_kv_format
@pytest.mark.parametrize("kernels", [*built()[:1], "reference"])
def test_blocks_take_less(checkpoint: Checkpoint, kernels: str, kv_format: str) -> None:
    """A byte for each number, or half of one, and four for each token and head."""
    wide, narrow = (
        make_engine(checkpoint(), kernels=kernels, kv_format=name).info
        for name in ("auto", kv_format)
    )
    dim = wide.kv_shape_per_block[-1]
    numbers = dim // 2 if kv_format == "int4" else dim
    assert narrow.kv_bytes_per_block * 4 * dim == wide.kv_bytes_per_block * (numbers + 4)
    order = "rows" if kernels == "reference" else "panels"
    assert (wide.kv_format, narrow.kv_format) == (f"float32 {order}", f"{kv_format} {order}")


@pytest.fixture(scope="module", params=NARROW)
def kv_format(request: pytest.FixtureRequest) -> str:
    given: str = request.param
    return given


@pytest.fixture(scope="module")
def alone(checkpoint: Checkpoint, kv_format: str) -> dict[str, list[int]]:
    engine = make_engine(checkpoint(), kv_format=kv_format, prefix_caching=False)
    return {one.request_id: drive(engine, [one]).tokens[one.request_id] for one in work()}


def work() -> list[Request]:
    """With a common beginning, greedy and drawn."""
    return requests_of(KINDS)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"num_blocks": 9},
        {"max_batched_tokens": 16},
        {"overlap": True},
        {"threads": 3},
        {"kernels": "reference"},
    ],
    ids=["together", "preempted", "chunked", "overlapped", "threads", "reference"],
)
def test_ways_through_the_engine_change_nothing(
    checkpoint: Checkpoint, kv_format: str, alone: dict[str, list[int]], how: dict[str, Any]
) -> None:
    engine = make_engine(checkpoint(), kv_format=kv_format, **how)
    if "kernels" in how:
        alone = drive(engine, work()).tokens
    assert drive(engine, work()).tokens == alone
    assert drive(engine, work()).tokens == alone  # from the prefix cache


def test_guesses_change_nothing(
    checkpoint: Checkpoint,
    kv_format: str,
    alone: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = drive(make_engine(checkpoint(), kv_format=kv_format), work())
    engine = guessing_engine(checkpoint(), monkeypatch, alone, kv_format=kv_format)
    found = drive(engine, work())
    assert told(found) == told(plain)
    assert sum(step.accepted_tokens for step in found.steps)


def test_a_split_and_going_on_elsewhere_change_nothing(
    checkpoint: Checkpoint, kv_format: str, alone: dict[str, list[int]]
) -> None:
    """What is handed over has its scales with it."""
    prefill, decode = (make_engine(checkpoint(), kv_format=kv_format) for _ in range(2))
    one = work()[0]
    assert_moves(one, alone[one.request_id], prefill, decode)


@each_kv_format
def test_answers_are_near_those_of_the_numbers_as_they_are(
    checkpoint: Checkpoint, kv_format: str
) -> None:
    prompts = make_prompts(24)
    exact, near = (
        generate(make_engine(checkpoint(), kv_format=name), prompts, greedy(1))
        for name in ("auto", kv_format)
    )
    least = 14 if kv_format == "int4" else 22
    assert sum(a == b for a, b in zip(exact, near, strict=True)) >= least


@each_kv_format
def test_a_draft_models_blocks_are_of_the_format_and_fit_beside(
    checkpoint: Checkpoint, tmp_path: Path, kv_format: str
) -> None:
    """Narrower heads have more scales: together they take no more than there is."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 16}
    draft = checkpoints.make(tmp_path / "draft", "gqa", **heads)
    room = 2**20
    config = EngineConfig(
        str(checkpoint("qwen3")),
        kv_format=kv_format,
        speculation="draft",
        draft_model=str(draft),
        kv_cache_bytes=room,
    )
    models = [read_config(folder) for folder in (config.model, draft)]
    each = [
        kv_bytes_per_block(config, one, choose_dtype("auto", one, "cpu", False)) for one in models
    ]
    count = with_room(config).kv_cache_bytes // each[0]
    assert room - 2 * sum(each) < count * sum(each) <= room


def test_another_format_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(
        ValueError, match="kv_format must be one of auto, int8, fp8, int4, is 'fp4'"
    ):
        EngineConfig(str(checkpoint()), kv_format="fp4")  # type: ignore[arg-type]

"""Cells of docs/engine.md that say "no matter" and "as any": a prompt found in the cache, one that
comes from disk, one computed in chunks, an answer beside others of all ways. Each way of asking
gives the tokens that it gives alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.worker.engine import Request, Sampling
from services.worker.engine.engine import Engine
from services.worker.engine.messages import Constraint
from tests.support.checkpoint import write_checkpoint
from tests.unit.engine.driving import drive, make_engine
from tests.unit.engine.test_kv_tiers import counts, evict

PROMPT = list(range(10, 110))
ASKED: dict[str, dict[str, Any]] = {
    "edits": {"repetition_penalty": 1.3, "logit_bias": ((40, 9.0),), "bad_words": ((41, 42),)},
    "min tokens": {"min_tokens": 10, "stop_token_ids": (7, 8)},
    "logprobs": {"logprobs": 3},
    "prompt logprobs": {"prompt_logprobs": 2},
    "form": {"constraint": Constraint("regex", "([a-d]{3} ){4}")},
    "form and edits": {
        "constraint": Constraint("json_schema", json.dumps({"enum": ["abc", "abd", 7]})),
        "logit_bias": ((40, 9.0),),
        "logprobs": 1,
    },
}


def requests() -> list[Request]:
    return [
        Request(name, PROMPT, Sampling(24, temperature=1.5, seed=n, **asked))
        for n, (name, asked) in enumerate(ASKED.items())
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("composed"), window=512)


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, list[int]]:
    engine = make_engine(folder, prefix_caching=False, max_batched_tokens=256)
    return {one.request_id: drive(engine, [one]).tokens[one.request_id] for one in requests()}


@pytest.mark.usefixtures("loading_pays")
@pytest.mark.parametrize("way", ["cached", "disk", "chunked", "together"])
def test_what_does_not_matter_does_not(
    folder: Path, alone: dict[str, list[int]], way: str, tmp_path: Path
) -> None:
    disk = {"kv_disk_dir": str(tmp_path), "checkpoint": "it"} if way == "disk" else {}
    engine = make_engine(folder, max_batched_tokens=16 if way == "chunked" else 256, **disk)
    if way in ("cached", "disk"):
        drive(engine, [Request("before", PROMPT, Sampling(1))])
    for group in [requests()] if way == "together" else [[one] for one in requests()]:
        before = 0
        if way == "disk":
            evict(engine)
            before = counts(engine).loaded
        run = drive(engine, group)
        for one in group:
            name = one.request_id
            assert run.last[name].error is None
            assert run.tokens[name] == alone[name], name
            usage = run.last[name].usage
            assert usage is not None
            reads = way in ("cached", "disk") and name != "prompt logprobs"
            assert (usage.cached_tokens > 0) or not reads
            assert way != "disk" or (counts(engine).loaded > before) == reads
            told = [o for s in run.steps for o in s.outputs if o.request_id == name]
            scores = [p for o in told for p in o.prompt_logprobs or ()]
            assert len(scores) == (99 if name == "prompt logprobs" else 0)


def test_engines_end_their_threads(folder: Path) -> None:
    engine: Engine = make_engine(folder)
    drive(engine, requests())
    threads = engine.aside._grammars._threads
    assert any(thread.is_alive() for thread in threads)
    engine.close()
    assert not any(thread.is_alive() for thread in threads)

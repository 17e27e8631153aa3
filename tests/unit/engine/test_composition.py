"""Cells of docs/engine.md that say "no matter" and "as any": a prompt found in the cache, one that
comes from disk, one computed in chunks, an answer beside others of all ways. Each way of asking
gives the tokens that it gives alone, whatever the model is: rounded, with windows, experts or
adapters, cut over ranks, and all of these at once."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from kernels.cpu.library import built
from services.worker.engine import Pooling, Request, Sampling
from services.worker.engine.adapters import peft
from services.worker.engine.engine import Engine
from services.worker.engine.kv.groups import kv_groups
from services.worker.engine.messages import Constraint
from services.worker.engine.models.registry import read_config
from tests.support import adapters
from tests.support.checkpoint import write_checkpoint
from tests.support.tokenizers import write_tokenizer
from tests.unit.engine import checkpoints
from tests.unit.engine.driving import assert_moves, drive, greedy, make_engine
from tests.unit.engine.guessing import answering
from tests.unit.engine.kv.test_kv_tiers import counts, evict
from tests.unit.engine.ranks_in_threads import engine_of_threads

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


def requests(adapter: str = "") -> list[Request]:
    return [
        Request(name, PROMPT, Sampling(24, temperature=1.5, seed=n, **asked), adapter=adapter)
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


@dataclass
class Kind:
    """Of a model."""

    variant: str = "gqa"
    settings: dict[str, Any] = field(default_factory=dict)
    adapter: str = ""
    ranks: int = 1
    few: int = 10
    """Blocks of each KV group, of which not all requests that begin together find enough."""


KINDS = {
    "weights": Kind(settings={"quantization": "int4"}),
    "weights and rows": Kind(settings={"quantization": "w8a8"}),
    "keys and values": Kind(settings={"kv_format": "int4"}),
    "windows": Kind("gemma3", few=8),
    "experts": Kind("qwen3-moe"),
    "adapter": Kind(adapter="it"),
    "ranks": Kind(ranks=2),
    "all": Kind("mixtral", {"quantization": "int8", "kv_format": "int8"}, "it", ranks=2, few=5),
}


class Model:
    """Engines of a kind."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self.kind, self.folder = kind, folder / "model"
        checkpoints.make(self.folder, kind.variant, vocab_size=320, intermediate_size=128)
        write_tokenizer(self.folder, 320)
        self.groups = len(kv_groups(read_config(self.folder)))
        self._adapter = kind.adapter and adapters.make(
            folder / "adapter", self.folder, targets=adapters.Q_AND_V, strength=0.8
        )
        with pytest.MonkeyPatch.context() as patch:
            engine = self.engine(patch, prefix_caching=False, max_batched_tokens=256)
        runs = {one.request_id: drive(engine, [one]) for one in self}
        self.alone = {name: run.tokens[name] for name, run in runs.items()}
        self.numbers = {name: run.last[name].pooled for name, run in runs.items()}

    def __iter__(self) -> Iterator[Request]:
        """Of all ways of asking, and some that grow."""
        name = self.kind.adapter
        yield from requests(name)
        yield Request("numbers", PROMPT, Sampling(1), adapter=name, pooling=Pooling("last"))
        for n in range(3):
            yield Request(f"long {n}", [n + 9] * 30, greedy(60), adapter=name)

    def engine(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Engine:
        settings |= self.kind.settings
        if self.kind.ranks > 1:
            engine = engine_of_threads(self.folder, self.kind.ranks, monkeypatch, **settings)
        else:
            engine = make_engine(self.folder, **settings)
        if self._adapter:
            adapter = replace(peft.read(self._adapter, self.folder, 64), id=self.kind.adapter)
            assert not engine.load_adapter(adapter)
        return engine


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    if not built():
        pytest.skip("no kernels for this processor")
    return Model(request.param, tmp_path_factory.mktemp("kind"))


@pytest.mark.usefixtures("loading_pays")
def test_of_each_kind_all_at_once_preempted_in_chunks_and_from_disk(
    model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = model.engine(
        monkeypatch,
        num_blocks=model.kind.few * model.groups,
        max_batched_tokens=16,
        kv_disk_dir=str(tmp_path),
        checkpoint="it",
    )
    preempted = 0
    for _ in range(2):
        run = drive(engine, model)
        assert run.tokens == model.alone
        assert not any(last.error for last in run.last.values())
        assert {name: last.pooled for name, last in run.last.items()} == model.numbers
        preempted += run.num_preempted
        evict(engine)
    assert preempted
    assert counts(engine).loaded


def test_of_each_kind_guesses_change_nothing(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, model.alone)
    guesses = {"speculation": "ngram", "num_speculative_tokens": 4}
    engine = model.engine(monkeypatch, **guesses)
    run = drive(engine, model)
    assert run.tokens == model.alone
    assert sum(step.accepted_tokens for step in run.steps)


def test_of_each_kind_a_split_and_going_on_elsewhere_change_nothing(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [model.engine(monkeypatch) for _ in range(2)]
    for request in model:
        if len(tokens := model.alone[request.request_id]) > 9:
            assert_moves(request, tokens, *ends)

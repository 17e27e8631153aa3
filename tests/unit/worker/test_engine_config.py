"""What a worker's settings make of the engine's."""

from pathlib import Path
from typing import Any

import pytest

from services.common.config import ModelSpec, Settings
from services.worker import engine_config as module
from services.worker.engine.config import EngineConfig
from services.worker.engine_config import engine_config

SPLIT = {"prefill": {"replicas": 1}, "decode": {"replicas": 2}}


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "usable_cores", lambda: 8)


def threads(
    folder: Path, host: str, *others: ModelSpec, device: str = "cpu", **changes: Any
) -> int | None:
    """Of the first worker of a model, by settings with others."""
    spec = ModelSpec(name="m", path=str(folder), **changes)
    models = [*others, ModelSpec(name="m", path="as it was before it was made local")]
    settings = Settings(models=models, bind_host=host, worker={"device": device})
    own = settings.of_worker(spec, next(iter(spec.pools)))
    return engine_config(own, str(folder)).threads


def test_threads_are_what_the_process_may_use_divided_among_the_hosts_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert threads(tmp_path, "127.0.0.1") == 4  # one prefills, one decodes
    assert threads(tmp_path, "127.0.0.1", decode={}) == 8
    assert threads(tmp_path, "127.0.0.1", **SPLIT) == 2
    assert threads(tmp_path, "10.0.0.7", **SPLIT) == 8  # one to a host, or a pod
    assert threads(tmp_path, "127.0.0.1", worker={"threads": 5}, **SPLIT) == 5
    monkeypatch.setattr(module, "usable_cores", lambda: 2)
    assert threads(tmp_path, "127.0.0.1", **SPLIT) == 1


def test_workers_of_other_models_on_cpus_have_their_share(tmp_path: Path) -> None:
    def other(name: str, **changes: Any) -> ModelSpec:
        return ModelSpec(name=name, path="elsewhere", **changes)

    one = {"decode": {}}
    assert threads(tmp_path, "127.0.0.1", other("a", **one), **one) == 4
    assert threads(tmp_path, "127.0.0.1", other("a", **SPLIT), **one) == 2
    assert threads(tmp_path, "127.0.0.1", other("a", **SPLIT), other("b", **SPLIT), **one) == 1
    assert threads(tmp_path, "10.0.0.7", other("a", **SPLIT), **one) == 8
    on_gpu = {"worker": {"device": "cuda"}}
    assert threads(tmp_path, "127.0.0.1", other("a", **one, **on_gpu), **one) == 8
    pools = {"prefill": on_gpu, "decode": {}}
    assert threads(tmp_path, "127.0.0.1", other("a", **pools), **one) == 4
    on_cpu = {"worker": {"device": "cpu"}}
    here = threads(tmp_path, "127.0.0.1", other("a", **one), device="cuda", **one, **on_cpu)
    assert here == 8, "the other one has the section's device"


def test_packed_weights_lie_in_the_data_directory_or_as_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def place(**told: Any) -> str | None:
        spec = ModelSpec(name="m", path=str(tmp_path))
        settings = Settings(models=[spec], data_dir=Path("data"), worker=told)
        return engine_config(settings, str(tmp_path)).packed_dir

    assert place() == str(tmp_path / "data" / "packed")
    assert place(packed_dir="/elsewhere") == "/elsewhere"
    assert place(packed_dir="mine/x") == str(tmp_path / "data" / "mine" / "x")
    assert place(packed_dir="~/x") == str(Path.home() / "x")
    assert place(packed_dir="") is None


def test_blocks_on_disk_lie_in_the_data_directory_under_the_checkpoints_digest(
    tmp_path: Path,
) -> None:
    def config(digest: str = "", **worker: Any) -> EngineConfig:
        settings = Settings(worker=worker, data_dir=tmp_path)
        return engine_config(settings, str(tmp_path), digest)

    assert config().kv_disk_dir is None
    found = config("ab12", kv_disk_dir="kv", kv_disk_bytes=7)
    assert found.kv_disk_dir == str(tmp_path / "kv")
    assert (found.kv_disk_bytes, found.checkpoint) == (7, "ab12")
    assert config(kv_disk_dir="/elsewhere").kv_disk_dir == "/elsewhere"


@pytest.mark.parametrize(
    ("worker", "guesses"),
    [
        ({}, "ngram"),
        ({"role": "prefill"}, "off"),
        ({"device": "cuda"}, "off"),
        ({"overlap": True}, "off"),
        ({"device": "cuda", "speculation": "ngram"}, "ngram"),
        ({"speculation": "off"}, "off"),
        ({"speculation": "draft", "draft_model": "."}, "draft"),
        ({"role": "prefill", "speculation": "draft", "draft_model": "."}, "off"),
    ],
)
def test_tokens_are_guessed_where_steps_do_not_overlap_and_decode(
    tmp_path: Path, worker: dict[str, Any], guesses: str
) -> None:
    config = engine_config(Settings(worker=worker), str(tmp_path))
    assert config.speculation == guesses
    assert config.draft_model == ("." if guesses == "draft" else None)


@pytest.mark.parametrize(
    ("worker", "told"),
    [
        ({}, "'PACK' says where ranks are, and tensor_parallel is 1"),
        (
            {"tensor_parallel": 2, "device": "cuda", "ray": {"num_gpus": 1}},
            "ray must ask for num_gpus 2, as many as tensor_parallel, and asks for 1",
        ),
    ],
)
def test_strategies_that_place_nothing_are_refused(
    tmp_path: Path, worker: dict[str, Any], told: str
) -> None:
    settings = Settings(worker={"placement_group_strategy": "PACK", **worker})
    with pytest.raises(ValueError, match=told):
        engine_config(settings, str(tmp_path))


def test_ranks_on_several_hosts_need_ray() -> None:
    from services.worker.seats import Seats

    worker = {"tensor_parallel": 2, "placement_group_strategy": "SPREAD"}
    with pytest.raises(ValueError, match="'SPREAD': Ray gives ranks their hosts, and this worker"):
        Seats(Settings(worker=worker))

"""What the graph deploys: replicas and what they take, by settings, pools and arguments; it is what
`penstock up` waits for."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from ray.serve._private import api as serve_api
from ray.serve._private.constants import REPLICA_HEALTH_CHECK_UNHEALTHY_THRESHOLD
from ray.serve.deployment import Application

from services import app
from services.app import build
from services.cli.stack.replicas import check_room
from services.cli.stack.replicas import wanted as waited_for
from services.common.config import (
    GatewaySettings,
    ModelSpec,
    RetrievalSettings,
    RouterSettings,
    Settings,
    TokenizerSettings,
)
from services.post import Post

serve_config: Any = serve_api.call_user_app_builder_with_args_if_necessary
TINY = ModelSpec(name="tiny", path="/nowhere")


def deployed(*applications: Application) -> dict[str, Any]:
    """All deployments of applications, by name."""
    found = {}
    for application in applications:
        own = application._bound_deployment
        found[own.name] = own
        found.update(deployed(*(a for a in own.init_args if isinstance(a, Application))))
    return found


def post_of(deployment: Any) -> Post:
    """As its replicas read it."""
    return Post.read(deployment.init_args[0])


def takes(deployment: Any) -> dict[str, Any]:
    return dict(deployment.ray_actor_options)


@pytest.mark.parametrize(
    ("cores", "given", "replicas"),
    [(1, 0, 1), (3, 0, 1), (4, 0, 2), (64, 0, 2), (2, 3, 3), (8, 1, 1)],
)
@pytest.mark.parametrize("prefill", [0, 2])
def test_routers_and_tokenizers_have_a_spare_where_there_are_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, given: int, replicas: int, prefill: int
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    settings = Settings(
        models=[TINY.sized(prefill, 3)],
        gateway=GatewaySettings(replicas=4),
        router=RouterSettings(replicas=given),
        tokenizer=TokenizerSettings(replicas=given),
        retrieval=RetrievalSettings(replicas=2),
        qdrant_url="http://127.0.0.1:6333",
    )
    services: Counter[str] = Counter()
    for deployment in deployed(*build(settings).values()).values():
        services[post_of(deployment).service] += deployment.num_replicas
    assert services["router"] == services["tokenizer"] == replicas
    assert (services["retrieval"], services["gateway"]) == (2, 4)
    wanted: Counter[str] = Counter()
    for (service, _), count in waited_for(settings).items():
        wanted[service] += count
    assert services == wanted


def test_a_replica_that_hangs_is_given_up_while_those_above_still_wait_for_another() -> None:
    patience_s = min(TokenizerSettings().router_patience_s, GatewaySettings().tokenizer_patience_s)
    for deployment in deployed(*build(Settings(models=[TINY])).values()).values():
        config = deployment._deployment_config
        checks = REPLICA_HEALTH_CHECK_UNHEALTHY_THRESHOLD
        assert checks * (config.health_check_timeout_s + config.health_check_period_s) < patience_s


def test_a_laptop_s_graph_is_small_and_asks_ray_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    graph = deployed(*build(Settings(models=[TINY])).values())
    assert sorted(graph) == [
        "decode-tiny", "gateway", "prefill-tiny", "retrieval", "router", "tokenizer"
    ]  # fmt: skip
    for deployment in graph.values():
        assert deployment.num_replicas == 1
        assert takes(deployment) == {"num_cpus": 0, "num_gpus": 0, "resources": {}}


def test_each_model_has_an_application_of_its_own() -> None:
    other = ModelSpec.model_validate({"name": "other", "path": "o", "decode": {}})
    one, two = (
        build(Settings(namespace="ours", models=models)) for models in ([TINY], [TINY, other])
    )
    assert set(two) - set(one) == {"ours:other"}
    assert set(deployed(two["ours:other"])) == {"both-other"}
    assert not set(deployed(two["ours"])) & set(deployed(two["ours:tiny"]))
    for service in deployed(two["ours"]).values():
        assert not post_of(service).own_settings().models, "it would know of a removed one"


def test_pools_have_settings_of_their_own() -> None:
    spec = ModelSpec.model_validate(
        {
            "name": "big",
            "path": "b",
            "worker": {"threads": 3, "kv_cache_bytes": 7, "block_size": 32},
            "prefill": {"replicas": 2, "worker": {"threads": 5}},
            "decode": {"replicas": 4, "ray": {"num_gpus": 2, "resources": {"big": 1}}},
        }
    )
    settings = Settings.model_validate(
        {"worker": {"max_running": 9, "threads": 1, "ray": {"num_cpus": 0.5}}}
    )
    settings.models = [TINY, spec]
    graph = deployed(*build(settings).values())
    prefill, decode = graph["prefill-big"], graph["decode-big"]
    assert (prefill.num_replicas, decode.num_replicas) == (2, 4)
    assert takes(prefill) == {"num_cpus": 0.5, "num_gpus": 0, "resources": {}}
    assert takes(decode) == {"num_cpus": 0, "num_gpus": 2, "resources": {"big": 1}}

    def own(name: str) -> tuple[Any, ...]:
        worker = post_of(graph[name]).own_settings().worker
        return (
            worker.role,
            worker.model,
            worker.threads,
            worker.kv_cache_bytes,
            worker.block_size,
            worker.max_running,
        )

    assert own("prefill-big") == ("prefill", "big", 5, 7, 32, 9)
    assert own("decode-big") == ("decode", "big", 3, 7, 32, 9)
    assert own("decode-tiny") == ("decode", "tiny", 1, 256 * 2**20, 16, 9)
    shown = ModelSpec.model_validate_json(spec.model_dump_json())
    assert shown == spec, "what is written down of it is all of it"
    assert shown.overrides == spec.overrides


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"prefill": {}}, "prefill: needs a decode pool"),
        ({"decode": {"replicas": 0}}, "decode.replicas"),
        ({"decode": {"ray": {"num_cpus": -1}}}, "decode.ray.num_cpus"),
        ({"decode": {"ray": {"resources": {"x": 0}}}}, "decode.ray.resources.x"),
        ({"decode": {"worker": {"threads": -1}}}, "decode.worker.threads"),
        ({"decode": {"worker": {"thread": 1}}}, "decode.worker.thread"),
        ({"worker": {"role": "both"}}, "role: not set here"),
        ({"worker": {"replicas": 2}}, "replicas: not set here"),
        ({"prefill": {"worker": {"block_size": 8}}, "decode": {}}, "block_size: of both pools"),
        ({"decode": {"worker": {"dtype": "bfloat16"}}, "prefill": {}}, "dtype: of both pools"),
        ({"decode": {"worker": {"kv_format": "fp8"}}, "prefill": {}}, "kv_format: of both pools"),
        ({"decode": {"worker": {"quantization": "int8"}}, "prefill": {}}, "quantization: of both"),
        ({"name": "a#b"}, "name"),
        ({"name": ""}, "name"),
        ({"pool": {}}, "pool"),
        ({"adapters": {"a#b": "/p"}}, "adapters"),
    ],
)
def test_a_wrong_model_is_refused_by_the_name_of_its_field(wrong: Any, told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        ModelSpec.model_validate({"name": "m", "path": "p", **wrong})


def test_an_adapter_of_a_models_name_is_refused() -> None:
    one, two = ({"name": name, "path": "p"} for name in ("tiny", "other"))
    with pytest.raises(ValidationError, match="two models are called tiny"):
        Settings.model_validate({"models": [one, two | {"adapters": {"tiny": "/p"}}]})


def test_two_models_of_one_name_are_refused() -> None:
    with pytest.raises(ValidationError, match="two models are called tiny"):
        Settings(models=[TINY, TINY])


def test_a_serve_config_says_how_many_and_each_replica_reads_its_own_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PENSTOCK_ROUTER__REPLICAS", "3")
    monkeypatch.setenv("PENSTOCK_GATEWAY__RAY", '{"resources": {"penstock-gateway": 1}}')
    monkeypatch.setenv("PENSTOCK_WORKER__REPLICAS", "2")
    arguments = {"gateway": {"replicas": 5}, "tokenizer": {"replicas": 2, "ray": {"num_cpus": 1}}}
    graph = deployed(serve_config(app.application, arguments))
    assert {name: d.num_replicas for name, d in graph.items()} == {
        "gateway": 5,
        "retrieval": 1,
        "router": 3,
        "tokenizer": 2,
    }
    assert takes(graph["gateway"])["resources"] == {"penstock-gateway": 1}
    assert takes(graph["tokenizer"])["num_cpus"] == 1

    spec = {"name": "m", "path": "p", "worker": {"threads": 2}}
    workers = deployed(serve_config(app.model, spec))
    assert {name: d.num_replicas for name, d in workers.items()} == {"prefill-m": 2, "decode-m": 2}
    monkeypatch.setenv("PENSTOCK_BIND_HOST", "10.1.2.3")  # of the pod that it runs in
    for deployment in (*graph.values(), *workers.values()):
        assert post_of(deployment).own_settings().bind_host == "10.1.2.3"
    assert post_of(workers["decode-m"]).own_settings().worker.threads == 2


def test_a_serve_config_may_leave_the_gateways_out() -> None:
    graph = deployed(serve_config(app.application, {"gateway": None, "router": {"replicas": 3}}))
    assert sorted(graph) == ["retrieval", "router", "tokenizer"]
    assert graph["router"].num_replicas == 3


@pytest.mark.parametrize(
    ("builder", "arguments", "told"),
    [
        (app.application, {"gateways": {}}, "gateways"),
        (app.application, {"gateway": {"replicas": 0}}, "gateway.replicas"),
        (app.application, {"retrieval": {"replicas": 2}}, "RETRIEVAL__REPLICAS"),
        (app.model, {"name": "m"}, "path"),
        (app.model, {"name": "m", "path": "p", "decode": {"replica": 1}}, "decode.replica"),
    ],
)
def test_wrong_arguments_of_a_serve_config_are_refused(
    builder: Any, arguments: Any, told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        serve_config(builder, arguments)


def test_ranks_that_may_be_on_several_nodes_have_a_bundle_each() -> None:
    """With its share of what a replica takes, none of which is more than there is."""
    ray = {"num_gpus": 3, "resources": {"own": 1}}
    worker = {"tensor_parallel": 3, "placement_group_strategy": "PACK", "ray": ray}
    settings = Settings.model_validate({"models": [TINY.sized(0, 2)], "worker": worker})
    pool = deployed(*build(settings, nodes=2).values())["both-tiny"]
    config = pool._deployment_config
    share = {"num_cpus": 0, "num_gpus": 1, "resources": {"own": 0.3333}}
    assert takes(pool) == share
    assert pool._replica_config.placement_group_bundles == [{"GPU": 1, "own": 0.3333}] * 3
    assert (pool._replica_config.placement_group_strategy, config.num_replicas) == ("PACK", 2)

    nothing = {"tensor_parallel": 2, "placement_group_strategy": "SPREAD"}
    settings = Settings.model_validate({"models": [TINY.sized(0, 1)], "worker": nothing})
    pool = deployed(*build(settings).values())["both-tiny"]
    assert pool._replica_config.placement_group_bundles == [{"memory": 1}] * 2

    settings.worker.placement_group_strategy = "STRICT_PACK"
    pool = deployed(*build(settings, nodes=2).values())["both-tiny"]
    config = pool._replica_config
    assert (config.placement_group_bundles, config.max_replicas_per_node) == (None, 1)


def test_ranks_that_want_more_nodes_than_there_are_are_told() -> None:
    spread = {"tensor_parallel": 3, "placement_group_strategy": "STRICT_SPREAD"}
    settings = Settings.model_validate({"models": [TINY.sized(0, 1)], "worker": spread})
    nodes = {"node:__internal_head__": 1.0, "node:10.0.0.1": 1.0, "node:10.0.0.2": 1.0}
    with pytest.raises(RuntimeError, match=r"worker of tiny: .* 3 ranks on a node each, .* has 2"):
        check_room(settings, nodes)
    check_room(settings, nodes | {"node:10.0.0.3": 1.0})


def test_what_ray_has_not_is_told_before_anything_waits_for_it() -> None:
    def check(has: dict[str, float], **changes: Any) -> None:
        settings = Settings.model_validate({"models": [TINY.sized(0, 3)], **changes})
        check_room(settings, has)

    check({})
    check({"CPU": 2, "own": 1}, gateway={"replicas": 2, "ray": {"num_cpus": 1}})
    with pytest.raises(RuntimeError, match=r"PENSTOCK_GATEWAY__RAY.* 3 of CPU, and Ray has 2"):
        check({"CPU": 2}, gateway={"replicas": 3, "ray": {"num_cpus": 1}})
    with pytest.raises(RuntimeError, match=r"worker of tiny.* 3 of GPU, and Ray has 0"):
        check({"CPU": 2}, worker={"ray": {"num_gpus": 1}})
    with pytest.raises(RuntimeError, match=r"ROUTER__RAY.* 1 of own, and Ray has 0"):
        check({}, router={"replicas": 1, "ray": {"resources": {"own": 1}}})
    with pytest.raises(RuntimeError, match="all replicas take 4 of CPU"):
        check(
            {"CPU": 3},
            gateway={"ray": {"num_cpus": 1}},
            worker={"ray": {"num_cpus": 1}},
        )


def test_serve_is_started_without_proxies_whoever_has_shut_it_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By itself it would start them: listeners without a lock on each node."""
    calls: list[Any] = []
    monkeypatch.setattr(app, "ray_nodes", lambda: [{"Alive": True}])
    monkeypatch.setattr(app.serve, "start", lambda **given: calls.append(given))
    monkeypatch.setattr(app.serve, "run_many", lambda *_, **__: calls.append("run"))
    app.deploy(Settings(models=[TINY]))
    app.deploy_model(Settings(models=[TINY]), TINY)
    assert calls == [{"proxy_location": "Disabled"}, "run"] * 2


def test_what_is_deployed_during_the_take_down_is_taken_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a thread that adds a model just then: a call to Serve cannot be cancelled."""
    there = ["penstock", "penstock:tiny", "before", "penstock:stays"]
    late = ["penstock:late"]
    deleted: list[str] = []

    def delete(name: str, _blocking: bool) -> None:
        deleted.append(name)
        there.remove(name)
        if name == "penstock:tiny":
            there.extend(late)

    monkeypatch.setattr(
        app.serve, "status", lambda: SimpleNamespace(applications=dict.fromkeys(there))
    )
    monkeypatch.setattr(app.serve, "delete", delete)
    app.delete_all("penstock", but=["penstock:stays"])
    assert deleted == ["penstock", "penstock:tiny", "penstock:late"]
    assert there == ["before", "penstock:stays"]

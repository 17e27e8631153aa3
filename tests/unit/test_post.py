"""What replicas are told by whoever deploys, who may be of another version than they."""

import json
import traceback
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from pydantic import SecretStr

from services.app import build
from services.common.config import (
    GatewaySettings,
    ModelSpec,
    PolicySettings,
    RayOptions,
    RetrievalSettings,
    Settings,
    TokenizerSettings,
)
from services.common.config.elsewhere import as_data, from_data
from services.post import Post

SECRETS = ("pw-of-redis", "key-of-qdrant", "secret-of-the-install")
BIG = ModelSpec.model_validate(
    {
        "name": "big",
        "path": "b",
        "worker": {"threads": 3},
        "prefill": {"replicas": 2, "worker": {"max_running": 5}},
        "decode": {"ray": {"num_gpus": 2, "resources": {"big": 1}}},
    }
)


def everything() -> Settings:
    """Settings of all kinds."""
    return Settings(
        redis_url=SecretStr("rediss://:pw-of-redis@h:1/0"),
        redis_ca=Path("/etc/ca.pem"),
        qdrant_url="http://q:6333",
        qdrant_api_key=SecretStr("key-of-qdrant"),
        internal_secret=SecretStr("secret-of-the-install"),
        reflection=False,
        models=[BIG],
        gateway=GatewaySettings(port=0, cors_origins=["*"], ray=RayOptions(num_cpus=0.5)),
        retrieval=RetrievalSettings(replicas=2),
        tokenizer=TokenizerSettings(threads=3),
        policy=PolicySettings(file=Path("/etc/policy.yaml")),
    )


def deploys(**changes: Any) -> SecretStr:
    """What a deployer of another version sends, which has a word more or less."""
    data = json.loads(Post.of("gateway", everything()).sealed().get_secret_value())
    return SecretStr(json.dumps({**data, **changes}))


def test_a_replica_has_the_settings_of_whoever_deploys_and_none_of_its_own_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = everything()
    sent = Post.of("gateway", settings).sealed()
    monkeypatch.setenv("PENSTOCK_NAMESPACE", "of-the-node")
    monkeypatch.setenv("QDRANT_URL", "http://of-the-node:1")
    monkeypatch.setenv("PENSTOCK_GATEWAY__PORT", "1")
    own = Post.read(sent).own_settings()
    assert own.model_dump() == settings.model_dump()
    assert own.models[0].overrides == BIG.overrides
    assert own.model_fields_set == settings.model_fields_set


def test_a_worker_has_those_of_its_pool() -> None:
    post = Post.read(Post.of("worker", everything(), BIG, "prefill").sealed())
    worker = post.own_settings().worker
    assert (worker.role, worker.model) == ("prefill", "big")
    assert (worker.threads, worker.max_running) == (3, 5)
    assert str(post) == "prefill worker of big"


def test_what_is_changed_in_settings_travels_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_INTERNAL_SECRET")
    settings = Settings()
    settings.namespace = "changed"
    changed = settings.model_copy(
        update={"gateway": settings.gateway.model_copy(update={"port": 8000})}
    )
    assert as_data(changed) == {"namespace": "changed", "gateway": {"port": 8000}}


def test_a_setting_that_nobody_set_need_not_be_known_to_the_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PENSTOCK_INTERNAL_SECRET")
    assert as_data(Settings(models=[BIG])) == {"models": [BIG.model_dump(exclude_unset=True)]}
    told = json.loads(Post.of("worker", Settings(), BIG, "decode").sealed().get_secret_value())
    assert told["model"] == BIG.model_dump(exclude_unset=True)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"settings": {"new": 1}}, "setting PENSTOCK_NEW: unknown setting"),
        ({"settings": {"gateway": {"new": 1}}}, "setting PENSTOCK_GATEWAY__NEW: unknown setting"),
        ({"settings": {"gateway": {"port": -1}}}, "setting PENSTOCK_GATEWAY__PORT"),
        (
            {"settings": {"models": [{"name": "m", "path": "p", "new": 1}]}},
            r"setting PENSTOCK_MODELS \(0.new\)",
        ),
        ({"tier": "gold"}, "tier: Extra inputs"),
        ({"role": "draft"}, "role: Input should be"),
        (
            {"model": {"name": "m", "path": "p", "decode": {"tp": 8}}},
            "model.decode.tp: Extra inputs",
        ),
    ],
)
def test_what_another_version_sends_and_this_one_does_not_know_is_named(
    changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told) as error:
        Post.read(deploys(**changes, version="9.9.9")).own_settings()
    if "settings" in changes:
        assert "Penstock 9.9.9" in str(error.value), "which version sent it"


def test_no_secret_is_seen_on_the_way_or_told_in_an_error() -> None:
    settings = everything()
    graph = build(settings)["penstock"]
    shown = [repr(graph._bound_deployment.init_args[0]), str(graph._bound_deployment.init_args[0])]
    shown += [f"{Post.of('router', settings)!r}", f"{settings!r}"]
    for wrong in (
        {"internal_secret": "pw-of-redis"},
        {"redis_url": "pw-of-redis"},
        {"qdrant_api_key": ["key-of-qdrant"]},
        {"gateway": {"new": "key-of-qdrant"}},
        {"new": "secret-of-the-install"},
    ):
        with pytest.raises(ValueError, match="setting PENSTOCK_") as error:
            from_data(wrong)
        shown.append("".join(traceback.format_exception(error.value)))
    for said in shown:
        assert not any(secret in said for secret in SECRETS), said


def test_what_travels_names_no_class_of_this_version() -> None:
    """An object of one would be built by the other's code, whatever that holds."""
    for application in build(everything()).values():
        for deployment in application._bound_deployment.init_args[:1]:
            assert b"services." not in cloudpickle.dumps(deployment)


def test_redis_is_found_where_the_other_settings_are_not_understood() -> None:
    post = Post.read(deploys(settings={"redis_url": "redis://:w@h:1/0", "new": 1}))
    assert post.stores().redis_dsn == "redis://:w@h:1/0"
    with pytest.raises(ValueError, match="PENSTOCK_NEW"):
        post.own_settings()

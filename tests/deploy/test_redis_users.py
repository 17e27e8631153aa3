"""Redis' two users: who holds whose password. What they may do is tried on a real server
(tests/integration/test_chart_redis.py)."""

import re
from typing import Any

import pytest
from helm_python import HelmError

from tests.deploy.conftest import ELSEWHERE
from tests.deploy.manifests import Release, Thing, merge, render
from tests.deploy.network import End, Network


def elsewhere(**changes: Any) -> Release:
    return render(None, merge(ELSEWHERE, {"redis": {"external": changes}}))


def rays_state(release: Release) -> Thing:
    found: Thing = release.ray["rayClusterConfig"]["gcsFaultToleranceOptions"]
    return found


def test_the_password_of_rays_state_is_in_no_pod_that_we_write(release: Release) -> None:
    """KubeRay gives it to the head. Redis itself has to know it."""
    secret = rays_state(release)["redisPassword"]["valueFrom"]["secretKeyRef"]["name"]
    holders = {pod.component for pod in release.pods if secret in pod.secrets}
    assert holders <= {"redis"}
    [gateway] = release.pods_of("gateway")
    mine = {name for name in gateway.secrets if "redis" in name and "tls" not in name}
    assert mine
    assert secret not in mine


def test_both_come_by_names_of_their_own(release: Release) -> None:
    told = rays_state(release)
    assert told["redisUsername"] == {"value": "ray"}
    [gateway] = release.pods_of("gateway")
    [url] = [
        entry["value"]
        for entry in gateway.spec["containers"][0]["env"]
        if entry["name"] == "PENSTOCK_REDIS_URL"
    ]
    address = re.fullmatch(r"(rediss?://)([^:]*):\$\(REDIS_AUTH\)@([^/]+)/\d+", url)
    assert address is not None
    assert address[2] != "ray"
    assert told["redisAddress"] == address[1] + address[3]


def test_without_rays_state_there_is_no_user_for_it() -> None:
    release = render(None, {"ray": {"gcsFaultTolerance": False}})
    assert "gcsFaultToleranceOptions" not in release.ray["rayClusterConfig"]
    assert "demo-penstock-redis-ray" not in {s["metadata"]["name"] for s in release.of("Secret")}
    script = release.one("ConfigMap", "demo-penstock-redis")["data"]["start.sh"]
    assert "user penstock" in script
    assert "user ray" not in script


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"ray": {"existingSecret": ""}}, r"redis\.external\.ray\.existingSecret: needed"),
        ({"ray": {"username": ""}}, r"redis\.external\.ray: needs a username or a url"),
        ({"username": "ray"}, r"redis\.external\.ray: needs a username or a url"),
        (
            {"ray": {"username": "", "url": "rediss://Redis.example.com:6380"}},
            r"redis\.external\.ray: needs a username or a url",
        ),
        (
            {"url": "redis://r", "ray": {"username": "", "url": "redis://r:6379/5"}},
            r"redis\.external\.ray: needs a username or a url",
        ),
        ({"ray": {"url": "http://r:1"}}, r"redis\.external\.ray\.url: must be redis://"),
        ({"ray": {"url": "redis://u:p@r"}}, r"redis\.external\.ray\.url: no user and password"),
    ],
)
def test_an_external_redis_is_not_shared_by_one_user(changes: Thing, told: str) -> None:
    with pytest.raises(HelmError, match=told):
        elsewhere(**changes)


def test_ray_may_have_a_redis_of_its_own() -> None:
    release = elsewhere(ray={"url": "redis://state.example.com:6399", "username": ""})
    told = rays_state(release)
    assert told["redisAddress"] == "redis://state.example.com:6399"
    assert "redisUsername" not in told
    assert told["redisPassword"]["valueFrom"]["secretKeyRef"]["name"] == "redis-ray-password"
    network, internet = Network.of(release), End(None, ip="203.0.113.9")
    for pod in release.pods:
        assert network.lets(End(pod.labels), internet, 6399) == (pod.component == "head")


def test_a_redis_without_passwords_needs_none_for_ray() -> None:
    release = elsewhere(existingSecret="", ray={"existingSecret": "", "username": ""})
    assert set(rays_state(release)) == {"redisAddress"}

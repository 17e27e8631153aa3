"""Every profile renders, by Helm itself, to objects that a cluster takes."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import helm_python
import pytest
from helm_python import HelmError

from tests.deploy.conftest import RENDERINGS
from tests.deploy.manifests import CHART, Release, Thing, merge, notes, of_profile, render
from tests.deploy.validation import errors, pod_errors


def test_a_cluster_takes_every_object(release: Release) -> None:
    wrong = [line for thing in release.things for line in errors(thing)]
    assert not wrong, "\n".join(wrong)


def test_kubernetes_takes_the_pods_of_the_ray_cluster(release: Release) -> None:
    cluster = release.ray["rayClusterConfig"]
    templates = [group["template"] for group in cluster["workerGroupSpecs"]]
    for template in (cluster["headGroupSpec"]["template"], *templates):
        assert not pod_errors(template)


def test_an_unknown_field_is_refused(release: Release) -> None:
    """Of the checks above, that they check."""
    ray = release.one("RayService")
    spoilt = {**ray, "spec": {**ray["spec"], "serveConfig": ""}}
    assert any("serveConfig" in line for line in errors(spoilt))
    service = release.of("Service")[0]
    assert errors({**service, "spec": {**service["spec"], "sessionAffinty": "None"}})


@pytest.mark.parametrize("rendering", RENDERINGS)
def test_lint_finds_nothing(rendering: str) -> None:
    profile, values = RENDERINGS[rendering]
    report = helm_python.lint(CHART, merge(of_profile(profile), values), strict=True)
    told = [message for message in report["messages"] if message["severity"] >= 2]
    assert not told
    assert not report["errors"]


def test_names_are_unique_and_short_enough(release: Release) -> None:
    named = Counter((t["apiVersion"], t["kind"], t["metadata"]["name"]) for t in release.things)
    assert [name for name, times in named.items() if times > 1] == []
    for thing in release.things:
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", thing["metadata"]["name"])


def test_every_object_says_whose_it_is(release: Release) -> None:
    for thing in release.things:
        labels = thing["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "penstock", thing
        assert labels["app.kubernetes.io/instance"] == "demo", thing
        assert labels["app.kubernetes.io/managed-by"] == "Helm", thing
        for name, value in labels.items():
            assert re.fullmatch(r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?", value), (name, value)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"redis": {"external": {"url": "redis://r:6379/0"}}}, "redis.external: set, but"),
        ({"redis": {"external": {"ray": {"url": "redis://r:1/0"}}}}, "redis.external: set, but"),
        ({"redis": {"external": {"existingSecret": "mine"}}}, "redis.external: set, but"),
        ({"qdrant": {"external": {"url": "http://q:6333"}}}, "qdrant.external: set, but"),
        ({"qdrant": {"external": {"caSecret": {"name": "q"}}}}, "qdrant.external: set, but"),
        (
            {
                "collector": {"enabled": True, "exporters": {"debug": {}}},
                "otlp": {"endpoint": "http://t:4317"},
            },
            "otlp.endpoint: set, but",
        ),
    ],
)
def test_one_of_two_that_exclude_each_other_is_not_ignored(values: Thing, named: str) -> None:
    with pytest.raises(HelmError, match=re.escape(named)):
        render(None, values)


@pytest.mark.parametrize("rendering", RENDERINGS)
def test_secrets_that_you_make_are_said_after_the_install(rendering: str) -> None:
    """Those that are waited for and that the chart does not make, each with the keys in use."""
    profile, values = RENDERINGS[rendering]
    release, said = render(profile, values), notes(merge(of_profile(profile), values))
    made = {secret["metadata"]["name"] for secret in release.of("Secret")}
    made |= {certificate["spec"]["secretName"] for certificate in release.of("Certificate")}
    told = re.findall(r"create secret generic (\S+)((?: --from-literal=\S+=VALUE)+)\n", said)
    asked = {name: set(re.findall(r"literal=(\S+)=VALUE", keys)) for name, keys in told}
    read = [reference for thing in release.things for reference in _keys(thing)]
    assert set(asked) == (release.secrets_used() | {name for name, _ in read}) - made
    for name, key in read:
        assert key in asked.get(name, {key}), (name, key)


def test_what_pods_mount_or_read_is_in_the_chart_or_named_by_values(release: Release) -> None:
    made = {thing["metadata"]["name"] for thing in release.of("Secret")}
    made |= {thing["spec"]["secretName"] for thing in release.of("Certificate")}
    given = {
        "redis-password",
        "redis-ray-password",
        "qdrant-key",
        "huggingface-token",
        "issuer-ca",
    }  # of conftest.py
    given |= {"penstock-internal", "penstock-redis", "penstock-redis-ray"}
    given |= {"penstock-qdrant", "penstock-hugging-face"}
    assert release.secrets_used() - made - given == set()
    maps = {thing["metadata"]["name"] for thing in release.of("ConfigMap")}
    claims = {thing["metadata"]["name"] for thing in release.of("PersistentVolumeClaim")}
    for pod in release.pods:
        for volume in pod.spec.get("volumes", ()):
            if "configMap" in volume:
                assert volume["configMap"]["name"] in maps, pod.owner
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims, pod.owner


def _keys(part: Any) -> Iterator[tuple[str, str]]:
    """Secret and key of each variable that must be there."""
    if isinstance(part, list):
        for own in part:
            yield from _keys(own)
    elif isinstance(part, dict):
        reference = part.get("secretKeyRef", {"optional": True})
        if not reference.get("optional"):
            yield reference["name"], reference["key"]
        for own in part.values():
            yield from _keys(own)

"""serveConfigV2: Ray Serve takes it, the code has what it names, and pods have room for it."""

import json
from importlib import import_module
from typing import Any

import yaml
from ray.serve.schema import ServeDeploySchema

from services.app import application_name
from services.common.config import ModelSpec
from tests.deploy.environment import read, variables
from tests.deploy.manifests import Release


def config(release: Release) -> ServeDeploySchema:
    return ServeDeploySchema.model_validate(yaml.safe_load(release.ray["serveConfigV2"]))


def test_serve_takes_it_and_finds_what_it_imports(release: Release) -> None:
    told = config(release)
    assert told.proxy_location == "Disabled"
    assert told.applications[0].name == "penstock"
    for application in told.applications:
        module, _, attribute = application.import_path.partition(":")
        assert callable(getattr(import_module(module), attribute))


def test_each_model_is_an_application_of_its_own(release: Release) -> None:
    for application in config(release).applications[1:]:
        spec = ModelSpec.model_validate(application.args)
        assert application.name == application_name("penstock", spec.name)
        assert "/" not in application.name, "Serve has a log of that name where it builds it"


def test_settings_of_the_applications_are_valid(release: Release) -> None:
    base = variables(release.pods_of("head")[0].spec["containers"][0])
    for application in config(release).applications:
        read({**base, **application.runtime_env.get("env_vars", {})})


def test_pods_hold_one_replica_each_and_all_of_them(release: Release) -> None:
    """Each deployment asks for one of a resource, of which each pod of its group has one."""
    offered: dict[str, int] = {}
    for group in release.groups().values():
        for resource, count in json.loads(group["rayStartParams"]["resources"].strip("'")).items():
            assert count == 1
            assert resource not in offered, "two groups offer the same"
            offered[resource] = group["replicas"]
    asked: dict[str, int] = {}
    for replicas, ray in _deployments(release):
        [(resource, amount)] = ray["resources"].items()
        assert amount == 1
        asked[resource] = replicas
    assert asked == {name: count for name, count in offered.items() if count}


def test_gpus_of_ray_are_those_of_the_pod(release: Release) -> None:
    for group in release.groups().values():
        told = int(group["rayStartParams"].get("num-gpus", 0))
        [main] = group["template"]["spec"]["containers"]
        limits = main["resources"]["limits"]
        assert int(limits.get("nvidia.com/gpu", 0)) == told, group["groupName"]
        assert group["rayStartParams"]["num-cpus"] == "0"


def test_groups_do_not_grow_by_themselves(release: Release) -> None:
    for group in release.groups().values():
        assert group["minReplicas"] == group["maxReplicas"] == group["replicas"]


def _deployments(release: Release) -> list[tuple[int, dict[str, Any]]]:
    """Replicas and Ray options of every deployment that the applications make."""
    base = variables(release.pods_of("head")[0].spec["containers"][0])
    found = []
    for application in config(release).applications:
        environment = {**base, **application.runtime_env.get("env_vars", {})}
        settings = read(environment)
        if application.name == "penstock":
            assert application.args["gateway"] is None, "gateways are not Ray's"
            for service in ("retrieval", "tokenizer", "router"):
                its = application.args.get(service, {})
                ray = its.get("ray") or settings.of_service(service).ray.model_dump()
                found.append((its.get("replicas") or settings.replicas_of(service), ray))
        else:
            spec = ModelSpec.model_validate(application.args)
            for role in spec.pools:
                own = settings.of_worker(spec, role).worker
                found.append((own.replicas, own.ray.model_dump()))
    return found

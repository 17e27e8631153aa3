"""Models in the chart: what is refused, what changes in place, how checkpoints come to workers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python import Chart, HelmError
from pydantic import SecretStr

from deploy.helm import settings_schema
from services.common.config import Settings
from tests.deploy.environment import variables
from tests.deploy.manifests import CHART, NAME, NAMESPACE, Release, Thing, render

FOLDER = {"name": "a", "enabled": True, "path": "/opt/a", "decode": {"replicas": 2}}
HUB = {
    "name": "Org/B",
    "enabled": True,
    "download": {"repo": "org/b", "revision": "0123abc", "include": ["*.safetensors", "*.json"]},
    "prefill": {"replicas": 1},
    "decode": {"replicas": 1, "worker": {"max_running": 7}},
}


def chart(*models: Thing, **values: Any) -> Release:
    return render(None, {"models": list(models), "modelCache": {"enabled": True}, **values})


def applications(release: Release) -> dict[str, Thing]:
    told = yaml.safe_load(release.ray["serveConfigV2"])["applications"]
    return {application["name"]: application for application in told}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"download": HUB["download"]}, "path or download, not both"),
        ({"path": None}, "needs path"),
        ({"path": "org/name"}, "absolute folder"),
        ({"decode": None}, "decode: needed"),
        (
            {"worker": {"tensor_parallel": 2}, "decode": {"replicas": 1, "gpus": 1}},
            r"models\[a\]: tensor_parallel 2, gpus: 1: each rank has one GPU",
        ),
        (
            {"worker": {"tensor_parallel": 2, "placement_group_strategy": "PACK"}},
            r"models\[a\]: placement_group_strategy PACK: ranks of a worker are in one pod here",
        ),
        (
            {"decode": {"replicas": 1, "worker": {"placement_group_strategy": "SPREAD"}}},
            r"models\[a\]: placement_group_strategy SPREAD: ranks of a worker are in one pod here",
        ),
    ],
)
def test_a_model_that_cannot_be_is_refused(changes: Thing, told: str) -> None:
    with pytest.raises(HelmError, match=told):
        chart({**FOLDER, **changes})


def test_a_download_without_a_cache_is_refused() -> None:
    with pytest.raises(HelmError, match=r"models\[Org/B\].download: needs modelCache.enabled"):
        chart(HUB, modelCache={"enabled": False})


def test_two_names_that_kubernetes_cannot_tell_apart_are_refused() -> None:
    with pytest.raises(HelmError, match="the same name to Kubernetes"):
        chart({**FOLDER, "name": "Llama-3.1"}, {**FOLDER, "name": "llama:3:1"})


def test_a_model_more_changes_nothing_of_what_runs() -> None:
    """KubeRay adds groups at the end to a running cluster; a change before means a second one."""
    before, after = chart(FOLDER), chart(FOLDER, HUB)
    were = list(before.groups().values())
    assert list(after.groups().values())[: len(were)] == were
    assert (
        before.ray["rayClusterConfig"]["headGroupSpec"]
        == (after.ray["rayClusterConfig"]["headGroupSpec"])
    )
    assert applications(before).items() <= applications(after).items()


def test_a_model_that_is_switched_off_keeps_its_place_without_pods() -> None:
    on, off = chart(FOLDER, HUB), chart({**FOLDER, "enabled": False}, HUB)
    counts = ("replicas", "minReplicas", "maxReplicas")  # what KubeRay changes in place
    for name, group in on.groups().items():
        ours = off.groups()[name]
        assert {k: v for k, v in ours.items() if k not in counts} == (
            {k: v for k, v in group.items() if k not in counts}
        )
        assert {ours[count] for count in counts} == {0 if name == "both-a" else ours["replicas"]}
    assert set(applications(off)) == {"penstock", "penstock:Org~B"}


def test_a_model_is_enabled_where_nothing_is_said() -> None:
    silent = {name: value for name, value in FOLDER.items() if name != "enabled"}
    assert chart(silent).ray == chart(FOLDER).ray


def test_settings_go_to_the_applications_that_they_concern() -> None:
    """A change of what the router does restarts no worker."""
    settings = {
        "LOG_LEVEL": "DEBUG",
        "GATEWAY__MAX_REQUESTS": 7,
        "RETRIEVAL__TOP_K": 5,
        "ROUTER__QUEUE_LIMIT": 9,
        "ROUTER__STALL_TIMEOUT_S": 11,
        "WORKER__THREADS": 3,
        "WORKER__MAX_MODEL_LEN": 512,
    }
    release = chart(FOLDER, settings=settings)
    found = applications(release)
    [gateway], [cli] = release.pods_of("gateway"), release.pods_of("cli")
    told = {
        "gateway": variables(gateway.spec["containers"][0]),
        "cli": variables(cli.spec["containers"][0]),
        "services": found["penstock"]["runtime_env"]["env_vars"],
        "model": found["penstock:a"]["runtime_env"]["env_vars"],
    }
    # Beside its own: gateways search, tokenizers know windows, workers tell when they stall.
    wanted = {
        "gateway": {"LOG_LEVEL", "GATEWAY__MAX_REQUESTS", "RETRIEVAL__TOP_K"},
        "cli": set(settings),  # the doctor looks at all
        "services": {
            "LOG_LEVEL",
            "RETRIEVAL__TOP_K",
            "ROUTER__QUEUE_LIMIT",
            "ROUTER__STALL_TIMEOUT_S",
            "WORKER__MAX_MODEL_LEN",
        },
        "model": {
            "LOG_LEVEL",
            "ROUTER__STALL_TIMEOUT_S",
            "WORKER__THREADS",
            "WORKER__MAX_MODEL_LEN",
        },
    }
    for audience, variables_of in told.items():
        set_here = {n for n in settings if f"PENSTOCK_{n}" in variables_of}
        assert set_here == wanted[audience], audience
        for name in set_here:
            assert variables_of[f"PENSTOCK_{name}"] == str(settings[name])


OF_A_POOL = {"WORKER__ROLE", "WORKER__MODEL", "WORKER__DEVICE"}


def derived() -> list[str]:
    """Settings that pods have from the chart's other values, and all that are secret."""
    release = render(None, {"models": [FOLDER], "collector": {"enabled": False}})
    told = {
        entry["name"].removeprefix("PENSTOCK_")
        for pod in release.pods
        for container in pod.containers
        for entry in container.get("env", [])
        if entry["name"].startswith("PENSTOCK_")
    }
    fields = Settings.model_fields.items()
    secret = {name.upper() for name, field in fields if field.annotation is SecretStr}
    return sorted(
        told | secret | {"RAY_TOKEN_FILE", "WORKER__REPLICAS", "ROUTER__RAY", "MODELS"} | OF_A_POOL
    )


def likely(schema: Thing) -> Any:
    """What the schema takes."""
    of_type = {"integer": 1, "number": 1, "array": [], "object": {}}
    return schema["enum"][0] if "enum" in schema else of_type.get(schema["type"], "cpu")


SETTINGS = settings_schema.definitions()["settings"]["properties"]


@pytest.mark.parametrize("name", derived())
def test_a_setting_that_the_chart_derives_is_not_set_twice(name: str) -> None:
    with pytest.raises(HelmError, match=f"settings.{name}: the chart sets this one"):
        chart(FOLDER, settings={name: likely(SETTINGS[name])})


def test_workers_wait_for_what_the_job_writes_last_and_load_it() -> None:
    release = chart(FOLDER, HUB)
    [job] = release.of("Job")
    [container] = job["spec"]["template"]["spec"]["containers"]
    told = {entry["name"]: entry.get("value") for entry in container["env"]}
    script = container["args"][0]
    assert script.index("hf download") < script.index('touch "$FOLDER/.complete"')
    assert container["args"][2:] == ["--include", "*.safetensors", "--include", "*.json"]
    assert applications(release)["penstock:Org~B"]["args"]["path"] == told["FOLDER"]
    for name, group in release.groups().items():
        waits = group["template"]["spec"].get("initContainers", [])
        assert bool(waits) == name.endswith("-org-b")
        for init in waits:
            assert init["env"] == [{"name": "CHECKPOINT", "value": told["FOLDER"]}]
            assert "$CHECKPOINT/.complete" in init["args"][0]


def test_another_revision_is_another_job_and_folder() -> None:
    """A Job cannot be changed."""
    newer = {**HUB, "download": {**HUB["download"], "revision": "4567def"}}
    [one], [other] = chart(HUB).of("Job"), chart(newer).of("Job")
    assert one["metadata"]["name"] != other["metadata"]["name"]
    assert "4567def" in json.dumps(other["spec"])
    assert chart(HUB).of("Job")[0]["metadata"]["name"] == one["metadata"]["name"]


def test_gpus_are_asked_of_kubernetes_of_ray_and_of_the_engine() -> None:
    pools = {"prefill": None, "decode": {"replicas": 1, "gpus": 1}}
    release = chart({**FOLDER, **pools})
    group = release.groups()["both-a"]
    [container] = group["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert group["rayStartParams"]["num-gpus"] == "1"
    told = applications(release)["penstock:a"]["args"]["decode"]
    assert told["ray"]["num_gpus"] == 1
    assert told["worker"] == {"device": "cuda"}
    tolerated = group["template"]["spec"]["tolerations"]
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in tolerated


def test_several_gpus_are_ranks_of_one_worker() -> None:
    pools = {"prefill": None, "decode": {"replicas": 1, "gpus": 4}}
    release = chart({**FOLDER, **pools})
    group = release.groups()["both-a"]
    [container] = group["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    told = applications(release)["penstock:a"]["args"]["decode"]
    assert told["ray"]["num_gpus"] == 4
    assert told["worker"] == {"device": "cuda", "tensor_parallel": 4}


def test_another_version_of_the_chart_makes_no_new_pods(tmp_path: Path) -> None:
    """With the same image: what is in a pod's template makes a new cluster when it changes."""
    copied = tmp_path / "penstock"
    shutil.copytree(CHART, copied, symlinks=False)
    about = copied / "Chart.yaml"
    about.write_text(about.read_text().replace("\nversion: ", "\nversion: 9"))
    with Chart.load(copied) as newer:
        [file] = [
            text
            for name, text in newer.render(
                {"models": [FOLDER]}, name=NAME, namespace=NAMESPACE
            ).items()
            if name.endswith("rayservice.yaml")
        ]
    assert yaml.safe_load(file)["spec"] == render(None, {"models": [FOLDER]}).ray


def test_a_pod_of_services_has_time_for_both_waves_of_its_drain() -> None:
    """`penstock drain --wait` ends tokenizer and retrieval first, then the router."""
    release = chart(FOLDER, requestTimeoutSeconds=100, lameDuckSeconds=5)
    seconds = {pod.component: pod.spec.get("terminationGracePeriodSeconds") for pod in release.pods}
    assert seconds["gateway"] > 5 + 100
    assert seconds["services"] > 5 + 2 * 100


def test_adapters_are_the_models() -> None:
    release = chart({**FOLDER, "adapters": {"pirate": "/adapters/pirate"}})
    assert applications(release)["penstock:a"]["args"]["adapters"] == {"pirate": "/adapters/pirate"}
    with pytest.raises(HelmError, match="adapters"):
        chart({**FOLDER, "adapters": {"a#b": "/adapters/pirate"}})

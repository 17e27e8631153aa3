"""skaffold.yaml: by its schema, and with what the chart and the Dockerfile really have."""

import copy
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.deploy.dockerfile import stages
from tests.deploy.manifests import CHART, Release, render

ROOT = Path(__file__).parents[2]
SCHEMA = Path(__file__).parent / "schemas/skaffold-v4beta13.json"
IMAGE = "ghcr.io/penstock/penstock"
CHOICES = ((), ("debug",), ("gpu",), ("gpu", "debug"))
Thing = dict[str, Any]


@pytest.fixture(scope="module")
def skaffold() -> Thing:
    loaded: Thing = yaml.safe_load((ROOT / "skaffold.yaml").read_text())
    return loaded


def _with(skaffold: Thing, profiles: tuple[str, ...]) -> Thing:
    """What Skaffold would do with these profiles: their patches (RFC 6902) on the whole."""
    made = copy.deepcopy(skaffold)
    for name in profiles:
        [profile] = [p for p in skaffold["profiles"] if p["name"] == name]
        for patch in profile["patches"]:
            _patch(made, copy.deepcopy(patch))
    return made


def _patch(target: Any, patch: Thing) -> None:
    *parents, last = (int(p) if p.isdecimal() else p for p in patch["path"].split("/")[1:])
    for parent in parents:
        target = target[parent]
    if patch["op"] == "add" and isinstance(target, list):
        target.insert(last, patch["value"])
        return
    if patch["op"] != "add":
        target[last]  # what is replaced or removed must be there
    if patch["op"] == "remove":
        del target[last]
    else:
        target[last] = patch["value"]


def _release(skaffold: Thing) -> Thing:
    [release] = [r for r in skaffold["deploy"]["helm"]["releases"] if r["name"] == "penstock"]
    found: Thing = release
    return found


def _rendered(skaffold: Thing) -> Release:
    release = _release(skaffold)
    values: Thing = {}
    templates = dict.fromkeys(release["setValueTemplates"], "built-now")
    for name, value in {**release["setValues"], **templates}.items():
        *parents, last = name.split(".")
        into = values
        for parent in parents:
            into = into.setdefault(parent, {})
        into[last] = value
    [file] = release["valuesFiles"]
    profile = Path(file).stem.removeprefix("values-")
    assert (ROOT / file).samefile(ROOT / release["chartPath"] / f"values-{profile}.yaml")
    return render(profile, values)


def _settings(release: Release) -> list[Thing]:
    """What each application gets of the settings."""
    served = yaml.safe_load(release.ray["serveConfigV2"])["applications"]
    return [a.get("runtime_env", {}).get("env_vars", {}) for a in served]


def test_it_is_as_its_schema_says(skaffold: Thing) -> None:
    jsonschema.Draft7Validator(json.loads(SCHEMA.read_text())).validate(skaffold)


@pytest.mark.parametrize("profiles", CHOICES)
def test_it_still_is_with_profiles(profiles: tuple[str, ...], skaffold: Thing) -> None:
    made = _with(skaffold, profiles)
    jsonschema.Draft7Validator(json.loads(SCHEMA.read_text())).validate(made)


def test_the_schema_would_tell_a_wrong_name(skaffold: Thing) -> None:
    wrong = {**skaffold, "deploy": {"helm": {"releases": [{"name": "x", "chartpath": "y"}]}}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft7Validator(json.loads(SCHEMA.read_text())).validate(wrong)


@pytest.mark.parametrize("profiles", CHOICES)
def test_the_image_is_built_of_a_target_that_exists(
    profiles: tuple[str, ...], skaffold: Thing
) -> None:
    [artifact] = _with(skaffold, profiles)["build"]["artifacts"]
    known = stages((ROOT / artifact["docker"]["dockerfile"]).read_text())
    wanted = "cuda" if "gpu" in profiles else "dev"
    assert artifact["image"] == IMAGE
    assert artifact["docker"]["target"] == wanted
    assert wanted in known
    assert ("sync" in artifact) is (wanted == "dev")  # in others its user may write nothing


def test_files_are_synced_to_where_the_image_has_them(skaffold: Thing) -> None:
    [artifact] = skaffold["build"]["artifacts"]
    known = stages((ROOT / "deploy/docker/Dockerfile").read_text())
    [owned] = [rest for rest in known["dev"].said("RUN") if rest.startswith("chown")]
    for rule in artifact["sync"]["manual"]:
        top = rule["src"].split("/")[0]
        assert rule["dest"] == "/opt/penstock"  # the source's folders are kept below it
        assert list(ROOT.glob(rule["src"])), rule["src"]
        assert f"/opt/penstock/{top}" in owned.split()


def test_what_follows_a_sync_ends_replicas_and_nothing_else(
    skaffold: Thing, tmp_path: Path
) -> None:
    """Ray Serve starts a replica again whose process has ended; a gateway's container does."""
    [artifact] = skaffold["build"]["artifacts"]
    [hook] = artifact["sync"]["hooks"]["after"]
    python, *arguments = hook["container"]["command"]
    assert python == "python"
    named = (  # as Ray names the processes of its actors
        "import sys; from ray._raylet import setproctitle; setproctitle(sys.argv[1]); "
        "print('ready', flush=True); sys.stdin.read()"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", named, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for name in (
            "ray::ServeReplica:test:router",
            "python -m services.gateway",
            "ray::ServeController",
            "bash -c while :; do python -m services.gateway; done",
        )
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        mine = f"psutil.pids = lambda: {[p.pid for p in processes]}"
        code = arguments[1].replace("import psutil", f"import psutil; {mine}", 1)
        subprocess.run([sys.executable, arguments[0], code], check=True)
        for ended in processes[:2]:
            assert ended.wait(timeout=30) == -15
        for left in processes[2:]:
            left.communicate(timeout=30)
            assert left.returncode == 0, "it ended when it was told to, not by a signal"
    finally:
        for process in processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()


def test_a_gateway_that_is_ended_starts_again_and_its_container_can_be_stopped(
    skaffold: Thing, tmp_path: Path
) -> None:
    """In the dev loop: a container that ended would start from the image, without the new files."""
    [pod] = _rendered(skaffold).pods_of("gateway")
    [container] = pod.spec["containers"]
    assert container["command"] == ["tini", "--", "bash", "-c"]
    log = tmp_path / "log"
    log.touch()
    (tmp_path / "python").write_text(
        f"#!/bin/sh\ntrap 'echo ended >> {log}; exit 0' TERM\necho $$ >> {log}\n"
        "while :; do sleep 0.05; done\n"
    )
    (tmp_path / "python").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    bash = subprocess.Popen(["bash", "-c", *container["args"]], env=environment)

    def said(lines: int) -> list[str]:
        deadline = time.monotonic() + 30
        while len(told := log.read_text().split()) < lines:
            assert time.monotonic() < deadline, told
            time.sleep(0.01)
        return told

    try:
        [first] = said(1)
        os.kill(int(first), signal.SIGTERM)
        [_, ended, second] = said(3)
        assert ended == "ended"
        assert second != first
        bash.terminate()
        assert bash.wait(timeout=30) == 0
        assert said(4)[-1] == "ended", "it has drained"
    finally:
        bash.kill()
        bash.wait()


@pytest.mark.parametrize("profiles", CHOICES)
def test_the_chart_takes_its_values(profiles: tuple[str, ...], skaffold: Thing) -> None:
    release = _rendered(_with(skaffold, profiles))
    pods = release.pods_of("gateway")
    assert pods
    for pod in pods:
        [container] = pod.spec["containers"]
        assert container["image"] == "built-now:built-now"
        locked = container["securityContext"]["readOnlyRootFilesystem"]
        assert locked is ("gpu" in profiles)
    for environment in _settings(release):
        told = environment.get("PENSTOCK_LOG_LEVEL"), environment.get("PENSTOCK_REFLECTION")
        assert (told == ("DEBUG", "true")) is ("debug" in profiles)


@pytest.mark.parametrize("profiles", CHOICES)
def test_what_is_forwarded_exists(profiles: tuple[str, ...], skaffold: Thing) -> None:
    made = _with(skaffold, profiles)
    release = render("laptop")
    # Installed as "penstock", the release's full name is "penstock" too.
    names = {
        thing["metadata"]["name"].replace("demo-penstock", "penstock")
        for thing in release.of("Service")
    }
    names |= {"penstock-head-svc"}  # KubeRay's, for the head of RayService "penstock"
    assert release.one("RayService")["metadata"]["name"] == "demo-penstock"
    for forwarded in made["portForward"]:
        assert forwarded["resourceName"] in names
    local = [forwarded["localPort"] for forwarded in made["portForward"]]
    assert len(set(local)) == len(local)
    assert (8265 in local) is ("debug" in profiles)


def test_the_operator_is_of_the_version_whose_schema_the_chart_is_held_to(skaffold: Thing) -> None:
    [operator] = [
        r for r in skaffold["deploy"]["helm"]["releases"] if r["name"] == "kuberay-operator"
    ]
    readme = (SCHEMA.parent / "README.md").read_text()
    [line] = [line for line in readme.splitlines() if "ray.io_v1_RayService" in line]
    assert f"v{operator['version']}" in line
    assert _release(skaffold)["dependsOn"] == ["kuberay-operator"]


def test_the_operator_runs_where_the_network_policies_let_it_in(skaffold: Thing) -> None:
    [operator] = [
        r for r in skaffold["deploy"]["helm"]["releases"] if r["name"] == "kuberay-operator"
    ]
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert operator["namespace"] == values["networkPolicy"]["kuberayOperator"]["namespace"]


def test_bare_make_tells_what_there_is_to_make() -> None:
    done = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True)
    text = (ROOT / "Makefile").read_text()
    [targets] = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    told = dict(re.findall(r"^make (\S+) +(\S.*)$", done.stdout, re.MULTILINE))
    assert set(told) == set(targets.split())


def test_make_dev_says_which_tool_is_missing(tmp_path: Path) -> None:
    for tool in ("sh", "make"):
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / tool).symlink_to(found)
    done = subprocess.run(
        [tmp_path / "make", "dev"],
        cwd=ROOT,
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "make dev needs kind" in done.stdout + done.stderr

"""README, docs/operations.md and the runbooks: what their commands name is what the chart makes."""

import re
from pathlib import Path

import pytest

from tests.deploy.manifests import NAME, Release, notes, of_profile, render

ROOT = Path(__file__).parents[2]
OPERATIONS = ROOT / "docs/operations.md"
PAGES = [OPERATIONS, *sorted((ROOT / "docs/runbooks").glob("*.md"))]
# Beside the chart's own: what Kubernetes, KubeRay and cert-manager make of it.
OF_OTHERS = {"pods", "events", "pvc", "rayclusters", "certificaterequests"}


@pytest.fixture(scope="module")
def installed() -> Release:
    return render("gpu+production")


def commands(page: Path) -> list[str]:
    return [line.strip() for line in page.read_text().splitlines() if "kubectl" in line]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_name_objects_of_the_chart(page: Path, installed: Release) -> None:
    """By a variable that is right for any release."""
    made = {thing["metadata"]["name"] for thing in (*installed.things, *render().things)}
    made |= {f"{thing['metadata']['name']}-0" for thing in installed.of("StatefulSet")}
    text = page.read_text()
    for name in re.findall(r"\$NAME((?:-[a-z0-9]+)*)", text):
        assert f"{NAME}-penstock{name}" in made, f"$NAME{name}"
    assert set(re.findall(r"RELEASE-\w+", text)) <= {"RELEASE-penstock"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_ask_for_what_is_there(page: Path, installed: Release) -> None:
    kinds = {thing["kind"].lower() for thing in installed.things}
    kinds |= {f"{kind}s" for kind in kinds} | {"networkpolicies"} | OF_OTHERS
    components = {pod.component for pod in installed.pods}
    for command in commands(page):
        for asked in re.findall(r"kubectl -n \S+ (?:get|describe) ([a-z,]+)", command):
            for kind in asked.split(","):
                assert kind in kinds | {"pod"}, command
        for one, several in re.findall(r"component(?:=(\w+)| in \(([\w,]+)\))", command):
            assert set((one or several).split(",")) <= components, command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_charts_redis_is_asked_by_its_own_script(page: Path) -> None:
    """It wants TLS and a user's password, of which only the script knows."""
    assert not [command for command in commands(page) if "redis-cli" in command]


def test_the_pages_say_which_secrets_are_made_before() -> None:
    def wanted(profile: str) -> set[str]:
        said = re.findall(
            r"create secret generic (\S+) --from-literal=(\S+)=", notes(of_profile(profile))
        )
        return {f"`{part}`" for pair in said for part in pair}

    operations, readme = OPERATIONS.read_text(), (ROOT / "README.md").read_text()
    assert len(wanted("gpu+production")) == 9  # five Secrets, two with a key of one name
    for name in wanted("gpu+production"):
        assert name in operations
    for name in wanted("gpu"):
        assert name.strip("`") in readme


def test_the_readme_loads_the_image_that_pods_want() -> None:
    [image] = {
        container["image"]
        for pod in render("laptop").pods
        for container in pod.containers
        if "/penstock/" in container["image"]
    }
    readme = (ROOT / "README.md").read_text()
    assert f" -t {image} ." in readme
    assert f"kind load docker-image {image} " in readme

"""What a rendered release holds, as plain objects, and the questions that the tests ask of it."""

import base64
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from helm_python import Chart

CHART = Path(__file__).parents[2] / "deploy/helm/penstock"
NAME, NAMESPACE = "demo", "llm"
Thing = dict[str, Any]


class Pod(NamedTuple):
    """The template of pods: its owner, and what it is to be."""

    owner: str  # Kind/name, and the group within a RayService
    labels: dict[str, str]
    annotations: dict[str, str]
    spec: Thing
    replicas: int

    @property
    def containers(self) -> list[Thing]:
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]

    @property
    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    @property
    def secrets(self) -> set[str]:
        """Names of all Secrets that it mounts or reads."""
        return set(_secrets(self.spec))

    @property
    def ports(self) -> dict[str, int]:
        """Of its containers, by name, or by their number where they have none."""
        return {
            port.get("name", str(port["containerPort"])): port["containerPort"]
            for container in self.containers
            for port in container.get("ports", ())
        }


@dataclass(frozen=True)
class Release:
    """The objects of one rendering."""

    things: list[Thing]

    def of(self, kind: str) -> list[Thing]:
        return [thing for thing in self.things if thing["kind"] == kind]

    def one(self, kind: str, name: str | None = None) -> Thing:
        [found] = [t for t in self.of(kind) if name is None or t["metadata"]["name"] == name]
        return found

    @property
    def pods(self) -> list[Pod]:
        return [pod for thing in self.things for pod in _pods(thing)]

    def pods_of(self, component: str) -> list[Pod]:
        return [pod for pod in self.pods if pod.component == component]

    @property
    def ray(self) -> Thing:
        spec: Thing = self.one("RayService")["spec"]
        return spec

    def groups(self) -> dict[str, Thing]:
        """The groups of worker pods, by name."""
        return {g["groupName"]: g for g in self.ray["rayClusterConfig"]["workerGroupSpecs"]}

    def secrets_used(self) -> set[str]:
        """Names of all Secrets that pods mount or read."""
        return {name for pod in self.pods for name in pod.secrets}


def notes(values: Thing) -> str:
    """What Helm shows after an install with these values."""
    [text] = [text for file, text in _rendered(values).items() if file.endswith("NOTES.txt")]
    return text


def render(profile: str | None = None, values: Thing | None = None) -> Release:
    """The chart with values of profiles (`values-<profile>.yaml`; "gpu+production": one over the
    other) and more over them."""
    documents = (
        document
        for file, text in _rendered(merge(of_profile(profile), values or {})).items()
        if not file.endswith("NOTES.txt")
        for document in yaml.load_all(text, Loader=yaml.CSafeLoader)
    )
    return Release([document for document in documents if document])


def _rendered(values: Thing) -> dict[str, str]:
    with Chart.load(CHART) as chart:
        return dict(chart.render(values, name=NAME, namespace=NAMESPACE))


def secret_value(release: Release, entry: Thing) -> str | None:
    """What a variable has of a Secret of the release; None where that is optional and not there."""
    reference = entry["valueFrom"]["secretKeyRef"]
    data = release.one("Secret", reference["name"])["data"]
    if reference["key"] not in data:
        assert reference["optional"]
        return None
    return base64.b64decode(data[reference["key"]]).decode()


def profiles() -> list[str]:
    return sorted(path.stem.removeprefix("values-") for path in CHART.glob("values-*.yaml"))


def of_profile(profile: str | None) -> Thing:
    values: Thing = {}
    for name in profile.split("+") if profile else ():
        values = merge(values, yaml.safe_load((CHART / f"values-{name}.yaml").read_text()))
    return values


def merge(under: Thing, over: Thing) -> Thing:
    """As Helm does: maps key by key, all else replaced."""
    made = dict(under)
    for key, value in over.items():
        both_maps = isinstance(value, dict) and isinstance(made.get(key), dict)
        made[key] = merge(made[key], value) if both_maps else value
    return made


def selects(selector: Thing, labels: dict[str, str]) -> bool:
    """Whether a label selector chooses these labels."""
    exact = all(labels.get(k) == v for k, v in selector.get("matchLabels", {}).items())
    return exact and all(_meets(own, labels) for own in selector.get("matchExpressions", ()))


def _meets(expression: Thing, labels: dict[str, str]) -> bool:
    value = labels.get(expression["key"])
    match expression["operator"]:
        case "In":
            return value in expression["values"]
        case "NotIn":
            return value not in expression["values"]
        case "Exists":
            return value is not None
        case _:  # DoesNotExist
            return value is None


def _pods(thing: Thing) -> Iterator[Pod]:
    owner, spec = f"{thing['kind']}/{thing['metadata']['name']}", thing.get("spec", {})
    if thing["kind"] == "RayService":
        cluster = spec["rayClusterConfig"]
        yield _pod(f"{owner}/head", cluster["headGroupSpec"]["template"], 1)
        for group in cluster["workerGroupSpecs"]:
            yield _pod(f"{owner}/{group['groupName']}", group["template"], group["replicas"])
    elif thing["kind"] == "Pod":
        yield _pod(owner, thing, 1)
    elif "template" in spec and thing["kind"] in ("Deployment", "StatefulSet", "Job", "DaemonSet"):
        yield _pod(owner, spec["template"], spec.get("replicas", 1))


def _pod(owner: str, template: Thing, replicas: int) -> Pod:
    metadata = template["metadata"]
    return Pod(
        owner,
        metadata.get("labels", {}),
        metadata.get("annotations", {}),
        template["spec"],
        replicas,
    )


def _secrets(part: Any) -> Iterable[str]:
    if isinstance(part, list):
        for own in part:
            yield from _secrets(own)
    elif isinstance(part, dict):
        for key, own in part.items():
            if key in ("secretKeyRef", "secretRef") and "name" in own:
                yield own["name"]
            elif key == "secret" and isinstance(own, dict):  # of a volume, plain or projected
                yield own.get("secretName") or own["name"]
            else:
                yield from _secrets(own)

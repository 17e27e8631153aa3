"""Whether a cluster would take an object: its kind's published schema, unknown fields refused."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate

# The oldest and the newest Kubernetes that the chart is for.
KUBERNETES = ("1.30", "1.37")
_SCHEMAS = Path(__file__).parent / "schemas"


def errors(thing: dict[str, Any]) -> list[str]:
    """What is wrong with an object, as lines that name the field; none: it is taken."""
    return list(_errors(json.dumps(thing, sort_keys=True)))


def pod_errors(template: dict[str, Any]) -> list[str]:
    """What is wrong with a pod template of a custom resource, held to Kubernetes' own schema."""
    metadata = {"name": "pod", **template.get("metadata", {})}
    return errors(
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
    )


@cache  # most objects are the same in several renderings
def _errors(text: str) -> tuple[str, ...]:
    thing = json.loads(text)
    group = str(thing["apiVersion"]).replace("/", "_")
    file = _SCHEMAS / f"{group}_{thing['kind']}.json"
    found = _of_custom(thing, file) if file.exists() else _of_core(thing)
    return tuple(f"{thing['kind']} {thing['metadata'].get('name')}: {line}" for line in found)


def _of_core(thing: dict[str, Any]) -> list[str]:
    found = []
    for version in KUBERNETES:
        try:
            kubernetes_validate.validate(thing, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            found.append(f"{_where(error)}: {error.message} (Kubernetes {version})")
        except kubernetes_validate.SchemaNotFoundError as error:
            found.append(f"no schema is known: {error.message}")
    return found


def _of_custom(thing: dict[str, Any], file: Path) -> list[str]:
    return [f"{_where(error)}: {error.message}" for error in _validator(file).iter_errors(thing)]


@cache
def _validator(file: Path) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads(file.read_text()))


def _where(error: jsonschema.ValidationError) -> str:
    return ".".join(str(part) for part in error.path) or "(top)"

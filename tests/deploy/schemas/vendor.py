"""Makes the schemas beside this file from the published custom resource definitions.

    python tests/deploy/schemas/vendor.py FOLDER

FOLDER holds the published files under their own names (README.md says where each is from). What is
kept is the `openAPIV3Schema` of the versions that the chart uses, as JSON Schema: without texts,
with unknown fields refused (as the API server's strict validation does), and with a part that
stands in several places (a pod's template) written once, under `$defs`.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
USED = {  # file: the version of its kind that is used
    "ray.io_rayservices.yaml": "v1",
    "gateway.networking.k8s.io_httproutes.yaml": "v1",
    "gateway.networking.k8s.io_grpcroutes.yaml": "v1",
    "gateway.networking.k8s.io_backendtlspolicies.yaml": "v1",
    "cert-manager.io_certificates.yaml": "v1",
    "cert-manager.io_issuers.yaml": "v1",
    "monitoring.coreos.com_servicemonitors.yaml": "v1",
    "monitoring.coreos.com_podmonitors.yaml": "v1",
    "monitoring.coreos.com_prometheusrules.yaml": "v1",
}
_TEXTS = {"description", "example", "externalDocs", "title", "default"}
_SHARED_FROM = 2000  # characters


def strict(schema: Any) -> Any:
    """The same schema for JSON Schema 2020-12, unknown fields refused."""
    if not isinstance(schema, dict):
        return schema
    made = {k: v for k, v in schema.items() if k not in _TEXTS and not k.startswith("x-")}
    for key in ("items", "not", "additionalProperties"):
        if key in made:
            made[key] = strict(made[key])
    for key in ("allOf", "anyOf", "oneOf"):
        if key in made:  # such branches only narrow what stands beside them
            made[key] = [_open(strict(branch)) for branch in made[key]]
    if "properties" in made:
        made["properties"] = {name: strict(own) for name, own in made["properties"].items()}
        open_end = schema.get("x-kubernetes-preserve-unknown-fields")
        made.setdefault("additionalProperties", bool(open_end))
    if schema.get("x-kubernetes-embedded-resource"):
        made.setdefault("required", ["apiVersion", "kind"])
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("anyOf", None)
        made["type"] = ["integer", "string"]
    if made.pop("nullable", False) and "type" in made:
        kinds = made["type"] if isinstance(made["type"], list) else [made["type"]]
        made["type"] = [*kinds, "null"]
    return made


def _open(branch: Any) -> Any:
    if isinstance(branch, dict) and branch.get("additionalProperties") is False:
        return {k: v for k, v in branch.items() if k != "additionalProperties"}
    return branch


def share(schema: dict[str, Any]) -> dict[str, Any]:
    """Large parts that stand more than once, once."""
    seen: dict[str, int] = {}

    def count(part: Any) -> None:
        if isinstance(part, dict):
            text = json.dumps(part, sort_keys=True)
            if len(text) >= _SHARED_FROM:
                seen[text] = seen.get(text, 0) + 1
                if seen[text] > 1:  # its own parts are counted
                    return
        for own in part.values() if isinstance(part, dict) else part:
            if isinstance(own, dict | list):
                count(own)

    def put(part: Any, top: bool = False) -> Any:
        if isinstance(part, list):
            return [put(own) for own in part]
        if not isinstance(part, dict):
            return part
        text = json.dumps(part, sort_keys=True)
        if top or seen.get(text, 0) < 2:
            return {key: put(own) for key, own in part.items()}
        name = hashlib.sha256(text.encode()).hexdigest()[:8]
        if name not in shared:
            shared[name] = {}
            shared[name] = put(part, top=True)
        return {"$ref": f"#/$defs/{name}"}

    shared: dict[str, Any] = {}
    count(schema)
    return {**put(schema, top=True), "$defs": shared}


def main(folder: Path) -> None:
    for file, version in USED.items():
        definition = yaml.safe_load((folder / file).read_text())["spec"]
        [found] = [v for v in definition["versions"] if v["name"] == version]
        schema = strict(found["schema"]["openAPIV3Schema"])
        schema["properties"]["metadata"] = {"type": "object"}
        schema["required"] = sorted({*schema.get("required", ()), "apiVersion", "kind", "metadata"})
        schema["properties"] |= {
            "apiVersion": {"const": f"{definition['group']}/{version}"},
            "kind": {"const": definition["names"]["kind"]},
        }
        name = f"{definition['group']}_{version}_{definition['names']['kind']}.json"
        text = json.dumps(share(schema), sort_keys=True, separators=(",", ":"))
        (HERE / name).write_text(text + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""`python -m deploy.helm.settings_schema`: the settings in the chart's values.schema.json.

Made from services/common/config/, so that Helm refuses what no service would take.
"""

import json
import sys
from pathlib import Path
from typing import Any

from services.common.config import Section, Settings, WorkerSettings
from services.common.config.models import NOT_OVERRIDDEN, OF_BOTH_POOLS, ModelSpec
from services.common.policy.schema import PolicySpec

DOCUMENT = Path(__file__).parent / "penstock/values.schema.json"
Schema = dict[str, Any]

# Of a model's workers, which the chart sets from its other values.
_OF_THE_CHART = {"device", "internal_port", "metrics_port", "health_port"}
_KEPT = {
    "type",
    "enum",
    "const",
    "pattern",
    "minLength",
    "maxLength",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "minItems",
    "required",
}


def definitions() -> dict[str, Schema]:
    """What `settings`, `policy`, a model's and a pool's `worker` take, by their names in $defs."""
    worker = _properties(WorkerSettings.model_json_schema())
    of_model = {n: s for n, s in worker.items() if n not in NOT_OVERRIDDEN | _OF_THE_CHART}
    of_pool = {n: s for n, s in of_model.items() if n not in OF_BOTH_POOLS}
    return {
        "settings": _object(_variables()),
        "policy": _object(_properties(PolicySpec.model_json_schema())),
        "adaptersOfModel": _properties(ModelSpec.model_json_schema())["adapters"],
        "workerOfModel": _object(of_model),
        "workerOfPool": _object(of_pool),
    }


def document(text: str) -> str:
    """The whole file, from the one that stands."""
    whole = json.loads(text)
    whole["$defs"] |= definitions()
    return json.dumps(whole, indent=2) + "\n"


def _variables() -> dict[str, Schema]:
    """Every setting as its variable is called, without PENSTOCK_."""
    found: dict[str, Schema] = {}
    properties = _properties(Settings.model_json_schema(by_alias=False))
    for name, field in Settings.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            own = properties[name]["properties"].items()
            found |= {f"{name}__{inner}".upper(): schema for inner, schema in own}
        else:
            found[name.upper()] = properties[name]
    return found


def _properties(model: Schema) -> dict[str, Schema]:
    return {name: _plain(own, model.get("$defs", {})) for name, own in model["properties"].items()}


def _object(properties: dict[str, Schema]) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _plain(schema: Schema, known: dict[str, Schema]) -> Schema:
    """Without references, descriptions and defaults; without null, which is to say nothing."""
    if "$ref" in schema:
        return _plain(known[schema["$ref"].rsplit("/", 1)[1]], known)
    if "anyOf" in schema:
        [only] = [own for own in schema["anyOf"] if own != {"type": "null"}]
        return _plain(only, known)
    made = {key: value for key, value in schema.items() if key in _KEPT}
    if "items" in schema:
        made["items"] = _plain(schema["items"], known)
    if "properties" in schema:
        made["properties"] = {n: _plain(own, known) for n, own in schema["properties"].items()}
    if patterns := schema.get("patternProperties"):  # of names that have a form
        made["patternProperties"] = {n: _plain(own, known) for n, own in patterns.items()}
        made["additionalProperties"] = False
    match schema.get("additionalProperties"):
        case bool(open_):
            made["additionalProperties"] = open_
        case dict(values):
            made["additionalProperties"] = _plain(values, known)
    return made


if __name__ == "__main__":
    DOCUMENT.write_text(document(DOCUMENT.read_text()))
    print(DOCUMENT, file=sys.stderr)

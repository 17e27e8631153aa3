"""Requests that are held to a form, as the tests of structured output have them."""

import json
from typing import Any

from services.worker.engine import Sampling
from services.worker.engine.messages import Constraint

VOCAB, EOS = 320, 2
PROMPT = list(range(10, 40))


def schema(of: Any) -> Constraint:
    return Constraint("json_schema", json.dumps(of))


def sampling(constraint: Constraint | None, seed: int = 0, **more: Any) -> Sampling:
    return Sampling(
        **{"max_tokens": 400, "temperature": 2.0, **more}, seed=seed, constraint=constraint
    )


HOSTILE = {
    "memory": schema(
        {
            "$defs": {
                **{f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(30)},
                "a30": {"type": "string", "pattern": "a+"},
            },
            "$ref": "#/$defs/a0",
        }
    ),
    "stack": Constraint(
        "grammar",
        "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1} | r{i + 1}' for i in range(5000))
        + '\nr5000: "b"',
    ),
    "later": Constraint("regex", "ab((a{1000}){1000}){1000}"),
    "broken": Constraint("json_schema", '{"type": "strin'),
    "unknown": schema({"type": "array", "uniqueItems": True}),
}  # fmt: skip

"""Bodies of POST /v1/moderations."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from services.common.errors import PenstockError
from services.gateway.api.messages_schema import MAX_PARTS, TextPart
from services.gateway.api.schema import Body, bad_value, validated

MAX_TEXTS = 2048
POLICY = "policy"  # what judges, as a model's name

Judge = Literal[
    "policy",
    "omni-moderation-latest",
    "omni-moderation-2024-09-26",
    "text-moderation-latest",
    "text-moderation-stable",
]
_Parts = Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS)]
_Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS)]


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


class ModerationRequest(Body):
    model: Judge | None = Field(None, description="whichever is named, the operator's rules judge")
    input: Annotated[
        list[Any],
        Field(min_length=1, max_length=MAX_TEXTS),
        BeforeValidator(_as_list, json_schema_input_type=str | _Texts | _Parts),
    ]

    def texts(self) -> list[str]:
        """What gets a result each: texts, or the parts of a single one. Raises INVALID_ARGUMENT."""
        if isinstance(self.input[0], dict):
            if len(self.input) > MAX_PARTS:
                raise bad_value("input", f"there may be at most {MAX_PARTS} parts")
            parts = [_part(one, f"input[{index}]") for index, one in enumerate(self.input)]
            return ["".join(part.text for part in parts)]
        for index, one in enumerate(self.input):
            if not isinstance(one, str):
                raise bad_value(f"input[{index}]", "must be a text")
        return self.input


def _part(given: Any, at: str) -> TextPart:
    if not isinstance(given, dict):
        raise bad_value(at, "must be a part as those before it are")
    try:
        return validated(TextPart, given)
    except PenstockError as error:
        param = f"{at}.{error.param}"
        error.message = error.message.replace(f"'{error.param}'", f"'{param}'")
        error.param = param
        raise

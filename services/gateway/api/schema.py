"""Reading request bodies: strict models, and errors that name the field as OpenAI's do.

What a model declares is honoured. Parameters of OpenAI's API that are not supported are listed in
the model's NEUTRAL table with the values that ask for nothing (`n: 1`, `logit_bias: {}`, and null
always): these are accepted because doing nothing is what they mean. Any other value is refused, and
so is every unknown field.
"""

import asyncio
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

import jiter
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError

from services.common.config import GatewaySettings
from services.common.errors import PenstockError, invalid
from services.gateway.faults import words_of

M = TypeVar("M", bound="Body")
T = TypeVar("T")

UNSUPPORTED = "unsupported_parameter"
UNKNOWN = "unknown_parameter"
INVALID = "invalid_value"
_REASONS = {
    "extra_forbidden": UNKNOWN,
    "missing": "missing_required_parameter",
    "literal_error": "unsupported_value",
    UNKNOWN: UNKNOWN,
    UNSUPPORTED: UNSUPPORTED,
}
_LARGE_BODY = 64 * 1024  # parsing takes about 0.1 ms up to here
_MIN, _MAX = -(2**63), 2**64 - 1
_BYTES_PER_MARK = 64  # of JSON: {"a":0} has three, of which a dict is made
MAX_DEPTH = 100  # of JSON that others read: each level is a call in some of them
_SENT_DEPTH = 21  # with what lies innermost; a gRPC message of an item may have some 30
_METADATA_MAX = 16  # entries
_TWICE = re.compile(r'Detected duplicate key "(.*)" at (line \d+ column \d+)', re.DOTALL)  # jiter's
_NAME_SHOWN = 64  # characters of a client's field name that an error repeats


class Body(BaseModel):
    """A JSON object of a request: exact types, no unknown fields, no numbers such as 1e999."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        for name in value.keys() & cls.NEUTRAL.keys():
            if value[name] is not None and not _is_one_of(value[name], cls.NEUTRAL[name]):
                accepted = " or ".join(map(json.dumps, (*cls.NEUTRAL[name], None)))
                message = f"not supported here, except as {accepted}"
                raise PydanticCustomError(UNSUPPORTED, "{message}", at(name, message))
        own = {name: v for name, v in value.items() if name not in cls.NEUTRAL}
        if len(own) > len(cls.model_fields):  # one is told; a hundred thousand would be found first
            known = {field.alias or name for name, field in cls.model_fields.items()}
            raise refuse(next(name for name in own if name not in known), "unknown", UNKNOWN)
        return own

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """With what is accepted because it asks for nothing."""
        told = handler(core)
        fields = handler.resolve_ref_schema(told).setdefault("properties", {})
        for name, accepted in cls.NEUTRAL.items():
            fields[name] = {"enum": [*accepted, None], "description": "nothing else is supported"}
        return told


def at(field: str, message: str) -> dict[str, Any]:
    """Context of a PydanticCustomError about `field` of the object under validation."""
    return {"field": field, "message": message}


def refuse(field: str, message: str, reason: str = INVALID) -> PydanticCustomError:
    """To raise in a validator of a whole object: `field` is at fault."""
    return PydanticCustomError(reason, "{message}", at(field, message))


def missing(field: str) -> PydanticCustomError:
    return PydanticCustomError("missing", "{message}", at(field, "missing"))


def at_most(setting: str) -> BeforeValidator:
    """Of a list: how many entries the limits' `setting` allows; more are refused unseen."""

    def check(value: Any, info: ValidationInfo) -> Any:
        most = getattr(info.context, setting) if info.context is not None else math.inf
        if isinstance(value, list) and len(value) > most:
            raise PydanticCustomError(INVALID, "there may be at most {most}", {"most": most})
        return value

    return BeforeValidator(check)


def _few_entries(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > _METADATA_MAX:
        raise PydanticCustomError(INVALID, "there may be at most {most}", {"most": _METADATA_MAX})
    return value


_Pairs = dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]]
_FewPairs = Annotated[_Pairs, Field(max_length=_METADATA_MAX)]
Metadata = Annotated[_Pairs, BeforeValidator(_few_entries, json_schema_input_type=_FewPairs)]


def max_marks(limits: GatewaySettings) -> int:
    """Commas, colons and brackets in one request's JSON, in lists or in text."""
    return 2 * limits.max_prompt_tokens


def too_many_values(body: bytes, limits: GatewaySettings) -> bool:
    """Hardly a prompt within the limit of tokens has as many of these marks; that many values would
    hold the interpreter while they are parsed and looked at."""
    most = max_marks(limits)
    return len(body) > most and _marks(body) > most


def _marks(json: bytes) -> int:
    return sum(map(json.count, (b",", b":", b"[", b"{")))


def parsed_bytes(json: bytes) -> int:
    """About what its values take, beside its texts: there is hardly one without such a mark."""
    return _BYTES_PER_MARK * _marks(json)


def too_deep(value: Any) -> bool:
    """More than MAX_DEPTH objects and lists lie in each other."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for one in level for inner in _held_by(one)]
    return any(isinstance(one, dict | list) for one in level)


def _plain(value: Any) -> Any:
    level, depth = [value], 0
    while level:
        if (depth := depth + 1) > _SENT_DEPTH:
            why = "more than {most} lists and objects lie in each other"
            raise PydanticCustomError(INVALID, why, {"most": _SENT_DEPTH - 1})
        if any(isinstance(one, int | float) and not _MIN <= one <= _MAX for one in level):
            raise PydanticCustomError(INVALID, "a number in it is larger than 64 bits hold")
        level = [inner for one in level for inner in _held_by(one)]
    return value


AsSent = Annotated[list[Any], AfterValidator(_plain)]
"""What is kept and told again as it is: numbers and depths that other readers of JSON have, too."""


def _held_by(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _is_one_of(value: Any, accepted: tuple[Any, ...]) -> bool:
    # 1 and 1.0 are one number in JSON; true and 1 are not.
    return any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in accepted)


def bad_value(field: str, message: str) -> PenstockError:
    """As `refuse`, for what is looked at after the model was validated."""
    return invalid(f"Invalid '{field}': {message}.", field, reason=INVALID, stage="gateway")


async def parse_body(model: type[M], body: bytes) -> M:
    """As `parse`; a large body does not hold up the other requests' tokens."""
    return await read_aside(len(body), lambda: parse(model, body))


async def read_aside(size: int, read: Callable[[], T]) -> T:
    """What `read` makes of so many bytes: in a thread when they are many."""
    return await asyncio.to_thread(read) if size > _LARGE_BODY else read()


def parse(model: type[M], body: bytes, limits: GatewaySettings | None = None) -> M:
    """The body as `model`. Raises INVALID_ARGUMENT that names the first field at fault.

    `limits` are those of the settings, for models that hold to some: `at_most`.
    """
    try:
        fields = read_json(body)
    except ValueError as error:
        raise wrong_json(error) from None
    if not isinstance(fields, dict):
        raise _no_json("The body must be a JSON object.")
    return validated(model, fields, limits)


def read_json(text: str | bytes) -> Any:
    """JSON without NaN or infinities, which are none of it, and with each name of an object once:
    of two, one would be taken and the other ignored. Raises ValueError."""
    told = text.encode() if isinstance(text, str) else text
    return jiter.from_json(told, allow_inf_nan=False, catch_duplicate_keys=True)


def wrong_json(error: ValueError) -> PenstockError:
    """Of `read_json`, whose errors tell the position and the kind, and a name that is there
    twice."""
    if twice := _TWICE.fullmatch(str(error)):
        name = twice[1][:_NAME_SHOWN]
        message = f"The parameter '{name}' is there twice in one object ({twice[2]})."
        return invalid(message, name, stage="gateway")
    return _no_json(f"The body is not valid JSON: {error}")


def _no_json(message: str) -> PenstockError:
    return invalid(message, "", reason="invalid_json", stage="gateway")


def validated(
    model: type[M], fields: Mapping[str, Any], limits: GatewaySettings | None = None
) -> M:
    """As `parse`, for fields that came another way (gRPC, a query string)."""
    try:
        return model.model_validate(fields, context=limits)
    except ValidationError as error:
        raise _explain(error.errors(include_url=False, include_input=False)[0]) from None


def _explain(error: ErrorDetails) -> PenstockError:
    context = error.get("ctx", {})
    path = field_path((*error["loc"], context["field"]) if context.get("field") else error["loc"])
    reason = _REASONS.get(error["type"], INVALID)
    if reason == UNKNOWN:
        message = f"Unknown parameter: '{path}'."
    elif error["type"] == "missing":
        message = f"Missing required parameter: '{path}'."
    elif reason == UNSUPPORTED:
        message = f"Unsupported parameter: '{path}': {words_of(error)}."
    else:
        message = f"Invalid '{path}': {words_of(error)}."
    return invalid(message, path, reason=reason, stage="gateway")


def field_path(location: tuple[int | str, ...]) -> str:
    """("messages", 1, "content") → "messages[1].content"."""
    path = ""
    for step in location:
        if step == "[key]":  # pydantic's word for a name of an object, behind that name
            continue
        path += f"[{step}]" if isinstance(step, int) else f".{step[:_NAME_SHOWN]}"
    return path.removeprefix(".")

"""Messages as the JSON that REST has, for its rules."""

from typing import Any

from google.protobuf.message import Message
from google.protobuf.struct_pb2 import ListValue, Struct, Value

Fields = dict[str, Any]


def fields_of(request: Message, *besides: str) -> Fields:
    """Those that are set, for REST's rules."""
    return {
        field.name: plain(value)
        for field, value in request.ListFields()
        if field.name not in besides
    }


def plain(value: Any) -> Any:
    match value:
        case bool() | int() | float() | str() | None:
            return value
        case Value():
            kind = value.WhichOneof("kind")
            return plain(getattr(value, kind)) if kind and kind != "null_value" else None
        case Struct():
            return plain(value.fields)
        case ListValue():
            return plain(value.values)
        case Message():
            return fields_of(value)
    if hasattr(value, "items"):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value]


def count_values(json: Any, most: int) -> int:
    """How many there are, in lists and objects too; where there are more than `most`, not all are
    looked at."""
    left, count = [json], 0
    while left and count + len(left) <= most:
        one = left.pop()
        count += 1
        if isinstance(one, dict):
            left.extend(one.values())
        elif isinstance(one, list):
            left.extend(one)
    return count + len(left)

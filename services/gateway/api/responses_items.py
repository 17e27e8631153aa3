"""Items of the Responses API: what a conversation is made of."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from services.gateway.api.messages_schema import MAX_PARTS
from services.gateway.api.schema import AsSent, Body, missing, refuse
from services.gateway.api.tools_schema import CallId, FunctionName

PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
    "file_search_call": "fs",
}
"""How items' ids begin, by their type."""


class Part(Body):
    """Of a message, a tool's output or of reasoning."""

    NEUTRAL: ClassVar = {"prompt_cache_breakpoint": ()}

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str
    annotations: AsSent | None = Field(None, description="of an earlier answer; no effect")
    logprobs: AsSent | None = Field(None, description="of an earlier answer; no effect")
    parsed: Any = Field(None, description="an earlier answer's, of OpenAI's client; no effect")


def _as_parts(value: Any) -> Any:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


_Parts = Annotated[list[Part], Field(max_length=MAX_PARTS)]
Parts = Annotated[_Parts, BeforeValidator(_as_parts, json_schema_input_type=str | _Parts)]


class Item(Body):
    """A message, a call, its output, what the model said to itself, or a search that was made."""

    NEUTRAL: ClassVar = {
        "encrypted_content": (),
        "namespace": (),
        "caller": (),
        "async": (),
        "async_": (),
        "agent": (),
    }

    type: Literal[
        "message", "function_call", "function_call_output", "reasoning", "file_search_call"
    ] = "message"
    id: Annotated[str, Field(max_length=128)] | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Parts | None = None
    phase: Literal["commentary", "final_answer"] | None = Field(None, description="no effect")
    call_id: CallId | None = None
    name: FunctionName | None = None
    arguments: str | None = None
    parsed_arguments: Any = Field(None, description="of OpenAI's client; no effect")
    output: Parts | None = None
    summary: Parts | None = None
    queries: list[str] | None = Field(None, description="of an earlier search; no effect")
    results: AsSent | None = Field(None, description="of an earlier search; no effect")

    @model_validator(mode="after")
    def _of_its_type(self) -> "Item":
        needs: dict[str, tuple[str, ...]] = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
            "reasoning": (),
            "file_search_call": (),
        }
        for field in needs[self.type]:
            if getattr(self, field) is None:
                raise missing(field)
        may = {*needs[self.type], *({"summary", "content"} if self.type == "reasoning" else ())}
        for field in ("role", "content", "call_id", "name", "arguments", "output", "summary"):
            if field not in may and getattr(self, field) is not None:
                raise refuse(field, f"an item of type {self.type!r} has none")
        return self


def text_of(parts: Sequence[Part] | None) -> str:
    return "".join(part.text for part in parts or ())

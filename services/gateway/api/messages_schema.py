"""Messages of a chat."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from protos.common_pb2 import ContentPart, Message
from services.gateway.api.schema import UNSUPPORTED, Body, missing, refuse
from services.gateway.api.tools_schema import MAX_CALLS, Call, CallId

MAX_PARTS = 256  # of one message's content


def _as_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class TextPart(Body):
    type: Literal["text"]
    text: str


_Parts = Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS)]
Content = Annotated[_Parts, BeforeValidator(_as_parts, json_schema_input_type=str | _Parts)]


_OF_AN_ANSWER = (
    "annotations",
    "tool_calls",
    "reasoning_content",
    "parsed",
    "provider_specific_fields",
)


class ChatMessage(Body):
    # An answer may be sent back as it came: what an assistant message carries beside its content
    # and calls says nothing to the model.
    NEUTRAL: ClassVar = {"refusal": (), "function_call": (), "audio": ()}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Annotated[str, Field(max_length=64)] | None = None
    tool_calls: Annotated[list[Call], Field(max_length=MAX_CALLS)] | None = None
    tool_call_id: CallId | None = None
    reasoning_content: str | None = Field(
        None, description="extension: of an earlier answer, for templates that show it"
    )
    parsed: Any = Field(None, description="an earlier answer's, of OpenAI's client; no effect")
    annotations: list[Any] | None = Field(None, description="of an earlier answer; no effect")
    provider_specific_fields: Any = Field(
        None, description="an earlier answer's, of litellm; no effect"
    )

    @model_validator(mode="after")
    def _of_its_role(self) -> "ChatMessage":
        if self.role != "assistant":
            for field in _OF_AN_ANSWER:
                if getattr(self, field) is not None:
                    raise refuse(field, f"only an assistant message has {field}", UNSUPPORTED)
        if self.role == "tool" and self.tool_call_id is None:
            raise missing("tool_call_id")
        if self.role != "tool" and self.tool_call_id is not None:
            raise refuse("tool_call_id", "only a tool message has it", UNSUPPORTED)
        if self.content is None and not self.tool_calls:
            raise missing("content")
        return self

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or ())

    def told(self) -> Message:
        return Message(
            role=self.role,
            content=[ContentPart(text=part.text) for part in self.content or ()],
            name=self.name or "",
            tool_calls=[call.told() for call in self.tool_calls or ()],
            tool_call_id=self.tool_call_id or "",
            reasoning=self.reasoning_content or "",
        )


def unasked_result(messages: Sequence[ChatMessage]) -> int | None:
    """The first message of a tool that no assistant message before it called, if there is one."""
    called: set[str] = set()
    for index, message in enumerate(messages):
        called.update(call.id for call in message.tool_calls or ())
        if message.tool_call_id is not None and message.tool_call_id not in called:
            return index
    return None

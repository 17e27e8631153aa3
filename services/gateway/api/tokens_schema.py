"""Bodies of POST /tokenize and /detokenize, vLLM's."""

from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from protos.common_pb2 import TokenIds
from protos.tokenizer_pb2 import PromptRequest
from services.common.config import GatewaySettings
from services.gateway.api.generation_schema import (
    ChatCompletionRequest,
    Ids,
    Name,
    TemplateOptions,
    token_ids,
)
from services.gateway.api.messages_schema import ChatMessage
from services.gateway.api.schema import Body, at_most, bad_value, missing, refuse, validated
from services.gateway.api.tools_schema import ToolsField


class TokenizeRequest(Body):
    """A text, or a chat as the model's template has it."""

    NEUTRAL: ClassVar = {
        "add_special_tokens": (),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "return_token_strs": (False,),
        "chat_template": (),
        "mm_processor_kwargs": (),
    }

    model: Name
    prompt: Annotated[str, Field(min_length=1)] | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1), at_most("max_messages")] | None = (
        None
    )
    tools: ToolsField | None = None
    chat_template_kwargs: TemplateOptions | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> "TokenizeRequest":
        if self.prompt is None and self.messages is None:
            raise missing("prompt")
        for name in ("messages", "tools", "chat_template_kwargs"):
            if self.prompt is not None and getattr(self, name) is not None:
                raise refuse(name, "excludes 'prompt'")
        return self

    def request(self, limits: GatewaySettings) -> PromptRequest:
        """Raises INVALID_ARGUMENT for what a chat may not hold."""
        if self.prompt is not None:
            return PromptRequest(model=self.model, text=self.prompt)
        fields = self.model_dump(exclude_none=True, by_alias=True)
        request = validated(ChatCompletionRequest, fields, limits).prompt(0).request
        request.chat.whole = True
        return request


class DetokenizeRequest(Body):
    model: Name
    tokens: Ids

    def request(self, limits: GatewaySettings) -> PromptRequest:
        """Raises INVALID_ARGUMENT for more than the limits allow."""
        if len(self.tokens) > limits.max_prompt_tokens:
            raise bad_value("tokens", f"at most {limits.max_prompt_tokens} token ids are taken")
        ids = TokenIds(ids=token_ids(self.tokens, "tokens"))
        return PromptRequest(model=self.model, token_ids=ids)

"""Bodies of POST /v1/chat/completions and /v1/completions."""

import json
import math
import re
import secrets
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    FailFast,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from protos.common_pb2 import Passage, Sampling, TokenBias, TokenIds
from protos.tokenizer_pb2 import Chat, PromptRequest
from services.common.config import GatewaySettings
from services.common.text.titles import is_plain
from services.gateway.api.messages_schema import ChatMessage, unasked_result
from services.gateway.api.schema import INVALID, Body, Metadata, at_most, bad_value, refuse
from services.gateway.api.structured_schema import Structured
from services.gateway.api.tools_schema import (
    ChoiceField,
    Tool,
    ToolsField,
    check_tools,
    chosen,
    functions,
)
from services.gateway.runs.prompt import Prompt

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions
MAX_STOPS = 4
MAX_DOCUMENTS = 64
MAX_OPTIONS = 16  # of a chat template
MAX_OPTION = 256  # characters of one
_ID = re.compile(r"0|-?[1-9][0-9]{0,18}")  # written in one way: none hides another
_NAME = re.compile(r"[a-zA-Z]\w{0,63}", re.ASCII)
MAX_BIAS = 300  # OpenAI's own bound
MAX_BAD_WORDS = 64
MAX_STOP_IDS = 64
MAX_TOP_LOGPROBS = 20
MAX_COMPLETION_LOGPROBS = 5  # OpenAI's own bounds, both
_COUNT_MAX = 2**31 - 1
_SEED_RANGE = 2**64

Name = Annotated[str, Field(min_length=1, max_length=256)]
Tag = Annotated[str, Field(max_length=512)]


def as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _by_token(value: Any) -> Any:
    """A JSON object's names are strings, these are token ids."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_BIAS:
        raise PydanticCustomError(INVALID, "there may be at most {most}", {"most": MAX_BIAS})
    if not all(map(_ID.fullmatch, value)):
        raise PydanticCustomError(INVALID, "its names must be token ids")
    return {int(token): bias for token, bias in value.items()}


def _few_and_plain(value: Any) -> Any:
    """Templates get them as they are."""
    if isinstance(value, dict) and (
        len(value) > MAX_OPTIONS
        or any(not _NAME.fullmatch(name) for name in value)
        or any(not isinstance(v, bool | int | float | str | None) for v in value.values())
        or any(len(v) > MAX_OPTION for v in value.values() if isinstance(v, str))
    ):
        why = "may have up to {n} booleans, numbers and texts, of up to {m} characters, by names"
        raise PydanticCustomError(INVALID, why, {"n": MAX_OPTIONS, "m": MAX_OPTION})
    return value


_Plain = bool | float | Annotated[str, Field(max_length=MAX_OPTION)] | None
_Options = dict[Annotated[str, Field(pattern=rf"^{_NAME.pattern}$")], _Plain]
TemplateOptions = Annotated[
    dict[str, Any],
    BeforeValidator(
        _few_and_plain,
        json_schema_input_type=Annotated[_Options, Field(max_length=MAX_OPTIONS)],
    ),
]
Id = Annotated[int, Field(ge=0, lt=2**32)]
Ids = Annotated[list[Id], Field(min_length=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_Biases = dict[Annotated[str, Field(pattern=rf"^({_ID.pattern})$")], _Bias]
Bias = Annotated[
    dict[Id, _Bias],
    BeforeValidator(
        _by_token, json_schema_input_type=Annotated[_Biases, Field(max_length=MAX_BIAS)]
    ),
]
_Stop = Annotated[str, Field(min_length=1, max_length=256)]
_Stops = Annotated[list[_Stop], Field(max_length=MAX_STOPS)]
Stops = Annotated[
    _Stops | None, BeforeValidator(as_list, json_schema_input_type=_Stop | _Stops | None)
]


# Of these a checkpoint may have defaults of its own (generation_config.json).
_CHECKPOINTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def _plain(title: str) -> str:
    if not is_plain(title):
        raise PydanticCustomError(INVALID, "must not hold line ends or other control characters")
    return title


class Document(Body):
    """Extension: a passage that the client brings itself."""

    title: Annotated[str, Field(max_length=500), AfterValidator(_plain)] = ""
    text: Annotated[str, Field(min_length=1)]


class StreamOptions(Body):
    NEUTRAL: ClassVar = {"include_obfuscation": (False,)}

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: so far, on every chunk

    @model_validator(mode="after")
    def _continuous_needs_usage(self) -> "StreamOptions":
        if self.continuous_usage_stats and not self.include_usage:
            raise refuse("include_usage", "must be true for 'continuous_usage_stats'")
        return self


class Generation(Structured):
    """What chat and plain completions share. None means the checkpoint's default, or OpenAI's."""

    model: Name
    max_tokens: Annotated[int, Field(ge=1, le=_COUNT_MAX)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=_COUNT_MAX)] | None = Field(
        None, description="extension; 0: off"
    )
    seed: Annotated[int, Field(ge=-(2**63), lt=_SEED_RANGE)] | None = None
    stop: Stops = None
    ignore_eos: bool | None = Field(None, description="extension: run to max_tokens")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(None, description="extension")
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = Field(
        None, description="extension; 1: off"
    )
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Bias | None = None
    bad_words: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=64)]],
            Field(max_length=MAX_BAD_WORDS),
        ]
        | None
    ) = Field(None, description="extension")
    min_tokens: Annotated[int, Field(ge=0, le=_COUNT_MAX)] | None = Field(
        None, description="extension"
    )
    stop_token_ids: Annotated[list[Id], Field(max_length=MAX_STOP_IDS)] | None = Field(
        None, description="extension"
    )
    n: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    delivery: Literal["stream", "hybrid", "hold"] | None = Field(
        None, description="extension: of a stream"
    )
    user: Tag | None = Field(None, description="shown in the request's record")
    metadata: Metadata | None = Field(None, description="shown in the request's record")

    @field_validator("n")
    @classmethod
    def _few(cls, n: int | None, info: ValidationInfo) -> int | None:
        most = info.context.max_choices if info.context is not None else math.inf
        if n is not None and n > most:
            raise PydanticCustomError(INVALID, "there may be at most {most}", {"most": most})
        return n

    @model_validator(mode="after")
    def _options_need_stream(self) -> "Generation":
        if self.stream_options is not None and not self.stream:
            raise refuse("stream_options", "only allowed when 'stream' is true")
        if self.delivery is not None and not self.stream:
            raise refuse("delivery", "only allowed when 'stream' is true")
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def choices(self) -> int:
        return self.n or 1

    def sampling(self, max_tokens: int, top: int | None) -> Sampling:
        """`top`: logprobs are wanted, and of so many best tokens."""
        if max_tokens and (self.min_tokens or 0) > max_tokens:
            raise bad_value("min_tokens", f"must not exceed 'max_tokens', which is {max_tokens}")
        seed = secrets.randbits(64) if self.seed is None else self.seed % _SEED_RANGE
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            seed=seed,
            max_tokens=max_tokens,
            ignore_eos=bool(self.ignore_eos),
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            logit_bias=[TokenBias(id=id, bias=b) for id, b in (self.logit_bias or {}).items()],
            min_tokens=self.min_tokens or 0,
            stop_token_ids=self.stop_token_ids or (),
            logprobs=top,
            unnamed=[name for name in _CHECKPOINTS if getattr(self, name) is None],
        )

    def _constrained(self, prompt: Prompt) -> Prompt:
        if (wanted := self.constraint()) is not None:
            prompt.form, constraint = wanted
            prompt.request.sampling.constraint.CopyFrom(constraint)
        return prompt

    def tags(self) -> dict[str, str]:
        return {**(self.metadata or {}), **({"user": self.user} if self.user else {})}


class ChatCompletionRequest(Generation):
    NEUTRAL: ClassVar = {
        "modalities": (["text"],),
        "service_tier": ("auto", "default"),
        "functions": (),
        "function_call": ("none",),
        "audio": (),
        "prediction": (),
        "reasoning_effort": (),
        "verbosity": (),
        "web_search_options": (),
    }

    store: bool | None = Field(None, description="the answer is kept, and listed")
    messages: Annotated[list[ChatMessage], Field(min_length=1), FailFast(), at_most("max_messages")]
    max_completion_tokens: Annotated[int, Field(ge=1, le=_COUNT_MAX)] | None = None
    tools: ToolsField | None = None
    tool_choice: ChoiceField | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateOptions | None = Field(
        None, description="extension, as vLLM's: what the model's chat template is given"
    )
    documents: Annotated[list[Document], Field(max_length=MAX_DOCUMENTS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "ChatCompletionRequest":
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise refuse("max_tokens", "contradicts 'max_completion_tokens'")
        if self.top_logprobs and not self.logprobs:
            raise refuse("top_logprobs", "only allowed when 'logprobs' is true")
        check_tools(self.tools or (), self.tool_choice)
        if self.parallel_tool_calls is not None and not self.tools:
            raise refuse("parallel_tool_calls", "only allowed when 'tools' is given")
        if self._search is not None and not self.question.strip():
            raise refuse("tools", "file_search needs a user message to search for")
        if (index := unasked_result(self.messages)) is not None:
            raise refuse(f"messages[{index}].tool_call_id", "no message before it has such a call")
        return self

    @property
    def question(self) -> str:
        """The last user message."""
        return next((m.text for m in reversed(self.messages) if m.role == "user"), "")

    @property
    def _search(self) -> Tool | None:
        if self.tool_choice is not None and self.tool_choice.type == "none":
            return None
        return next((tool for tool in self.tools or () if tool.vector_store_ids), None)

    def prompt(self, default_chunks: int) -> Prompt:
        """The request for the pipeline; `default_chunks` are searched when it does not say."""
        messages = [message.told() for message in self.messages]
        documents = [Passage(title=d.title, text=d.text) for d in self.documents or ()]
        # No limit given: as many tokens as the window leaves.
        limit = self.max_completion_tokens or self.max_tokens or 0
        request = PromptRequest(
            model=self.model,
            chat=Chat(
                messages=messages,
                passages=documents,
                tools=functions(self.tools or ()),
                tool_choice=chosen(self.tool_choice),
                one_call=self.parallel_tool_calls is False,
                template_options=(
                    json.dumps(self.chat_template_kwargs) if self.chat_template_kwargs else ""
                ),
            ),
            sampling=self.sampling(limit, (self.top_logprobs or 0) if self.logprobs else None),
            stop=self.stop or (),
            choices=self.choices,
            bad_words=self.bad_words or (),
        )
        prompt = self._constrained(Prompt(request, tags=self.tags(), delivery=self.delivery or ""))
        if (search := self._search) is not None:
            prompt.stores = tuple(dict.fromkeys(search.vector_store_ids or ()))
            prompt.max_chunks = search.max_num_results or default_chunks
            prompt.question = self.question
            prompt.filter = search.filters.told() if search.filters is not None else None
            if search.ranking_options is not None:
                prompt.score_threshold = search.ranking_options.score_threshold or 0.0
                prompt.ranking = search.ranking_options.told()
        return prompt


def _as_prompts(value: Any) -> list[Any]:
    """OpenAI's four forms of `prompt` (a text, token ids, a list of either) as a list.

    What is in it is looked at in `CompletionRequest.prompts`, which knows how much there may be.
    """
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        return value
    return [value]


class CompletionRequest(Generation):
    NEUTRAL: ClassVar = {"best_of": (1,), "suffix": ("",)}

    given: Annotated[
        list[Any],
        BeforeValidator(_as_prompts, json_schema_input_type=str | list[str] | Ids | list[Ids]),
    ] = Field(alias="prompt")
    logprobs: Annotated[int, Field(ge=0, le=MAX_COMPLETION_LOGPROBS)] | None = None
    echo: bool | None = None

    def prompts(self, limits: GatewaySettings) -> list[Prompt]:
        """The requests for the pipeline. Raises INVALID_ARGUMENT for more prompts, or more token
        ids in all, than the limits allow, unseen.
        """
        if len(self.given) > limits.max_prompts:
            raise bad_value("prompt", f"a list must hold at most {limits.max_prompts} prompts")
        most = max(limits.max_prompts, limits.max_choices)
        if len(self.given) * self.choices > most:
            raise bad_value("n", f"at most {most} answers are made to one request")
        ids = sum(len(given) for given in self.given if isinstance(given, list))
        if ids > limits.max_prompt_tokens:
            raise bad_value("prompt", f"at most {limits.max_prompt_tokens} token ids are taken")
        if len(self.given) == 1:
            return [self._prompt(self.given[0], "prompt")]
        prompts = []
        for index, given in enumerate(self.given):
            prompts.append(self._prompt(given, f"prompt[{index}]"))
            prompts[-1].param = f"prompt[{index}]"
        return prompts

    def _prompt(self, given: Any, param: str) -> Prompt:
        request = PromptRequest(
            model=self.model,
            sampling=self.sampling(self.max_tokens or COMPLETION_MAX_TOKENS, self.logprobs),
            stop=self.stop or (),
            choices=self.choices,
            bad_words=self.bad_words or (),
            echo=bool(self.echo),
        )
        if not isinstance(given, str | list):
            raise bad_value(param, "must be a string or a list of token ids")
        if not given:
            raise bad_value(param, "must not be empty")
        if isinstance(given, str):
            request.text = given
        else:
            request.token_ids.CopyFrom(TokenIds(ids=token_ids(given, param)))
        return self._constrained(Prompt(request, tags=self.tags(), delivery=self.delivery or ""))


def token_ids(given: list[Any], param: str) -> list[int]:
    """Ids as they come from a client: integers that fit 32 bits, or INVALID_ARGUMENT."""
    if {*map(type, given)} == {int} and min(given) >= 0 and max(given) < 2**32:
        return given
    raise bad_value(param, "a list must hold token ids, integers of 32 bits")

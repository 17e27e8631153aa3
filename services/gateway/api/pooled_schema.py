"""Bodies of POST /v1/embeddings, /v1/score, /v1/rerank and /v1/classify."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, FailFast, Field, model_validator

from protos.common_pb2 import Pooling, TokenIds
from protos.tokenizer_pb2 import Pool, PromptRequest
from services.gateway.api.generation_schema import Ids, Name, Tag, as_list, token_ids
from services.gateway.api.schema import Body, missing, refuse
from services.gateway.runs.pooling import Ask

MAX_INPUTS = 2048
_COUNT_MAX = 2**31 - 1


def _said(one: Any) -> str | list[Any]:
    if not isinstance(one, str | list):
        raise refuse("", "must be a text, or a list of token ids")
    if not one or (isinstance(one, str) and not one.strip()):
        raise refuse("", "must not be empty")
    return one


def _as_inputs(value: Any) -> Any:
    """OpenAI's four forms of `input` (a text, token ids, a list of either) as a list."""
    many = isinstance(value, list) and value and isinstance(value[0], str | list)
    return value if many else [_said(value)]


class TextAlone(Body):
    text: str


def _as_text(one: Any) -> Any:
    """A document's text: it may be an object of that alone."""
    return one["text"] if isinstance(one, dict) and one.keys() == {"text"} else one


Few = Field(min_length=1, max_length=MAX_INPUTS)
Text = Annotated[str, AfterValidator(_said)]
Inputs = Annotated[
    list[Annotated[Any, AfterValidator(_said)]],
    Few,
    FailFast(),
    BeforeValidator(
        _as_inputs, json_schema_input_type=Text | Ids | Annotated[list[Text | Ids], Few]
    ),
]
_Texts = Annotated[list[Text], Few]
Texts = Annotated[_Texts, BeforeValidator(as_list, json_schema_input_type=Text | _Texts)]
Document = Annotated[Text, BeforeValidator(_as_text, json_schema_input_type=Text | TextAlone)]
Documents = Annotated[list[Document], Few, FailFast()]


class Pooled(Body, ABC):
    """What they share."""

    # What vLLM's clients may send, with the values that ask for what is done anyway.
    NEUTRAL: ClassVar = {
        "truncate_prompt_tokens": (),
        "add_special_tokens": (True,),
        "normalize": (True,),
        "priority": (0,),
    }

    model: Name
    user: Tag | None = Field(None, description="shown in the request's record")

    @abstractmethod
    def ask(self) -> Ask:
        """Raises INVALID_ARGUMENT for what are no token ids."""

    def _ask(self, pool: Pool, inputs: str, queries: str = "", one_query: bool = False) -> Ask:
        tags = {"user": self.user} if self.user else {}
        called = [("inputs", inputs)]
        if queries:
            called.insert(0, ("queries[0]" if one_query else "queries", queries))
        return Ask(PromptRequest(model=self.model, pool=pool), tags, called)


class EmbeddingsRequest(Pooled):
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=_COUNT_MAX)] | None = None
    pooling: Literal["last", "mean"] | None = Field(
        None, description="extension; the checkpoint's own without it"
    )

    def ask(self) -> Ask:
        pool = Pool(task=Pool.EMBED, inputs=_given(self.input), dimensions=self.dimensions or 0)
        if self.pooling is not None:
            pool.pooling = Pooling.MEAN if self.pooling == "mean" else Pooling.LAST
        return self._ask(pool, "input")


class ClassifyRequest(Pooled):
    input: Inputs

    def ask(self) -> Ask:
        return self._ask(Pool(task=Pool.CLASSIFY, inputs=_given(self.input)), "input")


class ScoreRequest(Pooled):
    """By one of two pairs of names: vLLM's clients use both."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None

    @model_validator(mode="after")
    def _pairs(self) -> "ScoreRequest":
        first, second = self._names
        if any(getattr(self, name) is not None for name in {*_FIRST, *_SECOND} - {first, second}):
            raise refuse(second, f"{first} and {second} go together")
        for name in (first, second):
            if getattr(self, name) is None:
                raise missing(name)
        queries, documents = (getattr(self, name) for name in (first, second))
        if len(queries) not in (1, len(documents)):
            raise refuse(first, f"must be one text, or as many as there are in {second}")
        return self

    @property
    def _names(self) -> tuple[str, str]:
        given = self.queries is not None or self.documents is not None
        return _FIRST[given], _SECOND[given]

    def ask(self) -> Ask:
        first, second = self._names
        queries, documents = (getattr(self, name) for name in (first, second))
        pool = Pool(task=Pool.SCORE, inputs=_given(documents), queries=_given(queries))
        return self._ask(pool, second, first)


_FIRST, _SECOND = ("text_1", "queries"), ("text_2", "documents")


class RerankRequest(Pooled):
    NEUTRAL: ClassVar = Pooled.NEUTRAL | {
        "max_tokens_per_doc": (),
        "max_chunks_per_doc": (),
        "rank_fields": (["text"],),
    }

    query: Text
    documents: Documents
    top_n: Annotated[int, Field(ge=1, le=_COUNT_MAX)] | None = None
    return_documents: bool | None = None

    def ask(self) -> Ask:
        pool = Pool(
            task=Pool.SCORE, inputs=_given(self.documents), queries=[Pool.Input(text=self.query)]
        )
        return self._ask(pool, "documents", "query", one_query=True)


def _given(inputs: Sequence[str | list[Any]]) -> list[Pool.Input]:
    return [
        Pool.Input(text=one)
        if isinstance(one, str)
        else Pool.Input(token_ids=TokenIds(ids=token_ids(one, f"input[{index}]")))
        for index, one in enumerate(inputs)
    ]

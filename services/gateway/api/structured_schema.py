"""What an answer must look like: OpenAI's `response_format`, and what vLLM's clients send."""

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from protos.common_pb2 import Constraint
from services.common.text.json_schema import closed
from services.gateway.api.schema import MAX_DEPTH, Body, bad_value, read_json, too_deep
from services.gateway.api.tools_schema import FunctionName

MAX_TEXT = 64 * 1024  # characters of a schema, an expression or a grammar
MAX_CHOICES = 1024

Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]
Texts = Annotated[
    list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES)
]
Schema = dict[str, Any] | Text


class JsonSchema(Body):
    name: FunctionName
    description: str | None = Field(
        None, description="not shown to the model; taken, as clients send it"
    )
    definition: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(None, description="answers match the schema in any case")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """vLLM's."""

    NEUTRAL: ClassVar = {
        "disable_fallback": (False, True),
        "disable_any_whitespace": (False,),
        "disable_additional_properties": (False,),
        "whitespace_pattern": (),
        "structural_tag": (),
    }

    json_text: Schema | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Texts | None = None
    grammar: Text | None = None
    json_object: bool | None = None


class Structured(Body):
    """What chat and plain completions take of it."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = Field(None, description="extension, as vLLM's")
    guided_json: Schema | None = Field(None, description="extension, as vLLM's")
    guided_regex: Text | None = Field(None, description="extension, as vLLM's")
    guided_choice: Texts | None = Field(None, description="extension, as vLLM's")
    guided_grammar: Text | None = Field(
        None, description="extension, as vLLM's: in Lark's notation or GBNF"
    )

    def constraint(self) -> tuple[str, Constraint] | None:
        """The field that says what is wanted, and what. Raises INVALID_ARGUMENT for two of them."""
        found = [*self._of_format(), *self._of_guided(), *self._of_structured()]
        if len(found) > 1:
            raise bad_value(found[1][0], f"excludes '{found[0][0]}'")
        return found[0] if found else None

    def _of_format(self) -> list[tuple[str, Constraint]]:
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return []
        if wanted.type == "json_object":
            return [("response_format", Constraint(json_object=True))]
        if wanted.json_schema is None:
            raise bad_value("response_format.json_schema", "the type 'json_schema' needs it")
        at = "response_format.json_schema.schema"
        return [(at, _json_schema(wanted.json_schema.definition, at))]

    def _of_guided(self) -> list[tuple[str, Constraint]]:
        found = []
        if self.guided_json is not None:
            found.append(("guided_json", _json_schema(self.guided_json, "guided_json")))
        if self.guided_regex is not None:
            found.append(("guided_regex", Constraint(regex=self.guided_regex)))
        if self.guided_choice is not None:
            found.append(("guided_choice", _choice(self.guided_choice)))
        if self.guided_grammar is not None:
            found.append(("guided_grammar", Constraint(grammar=self.guided_grammar)))
        return found

    def _of_structured(self) -> list[tuple[str, Constraint]]:
        wanted, found = self.structured_outputs, []
        if wanted is None:
            return []
        at = "structured_outputs"
        if wanted.json_text is not None:
            found.append((f"{at}.json", _json_schema(wanted.json_text, f"{at}.json")))
        if wanted.regex is not None:
            found.append((f"{at}.regex", Constraint(regex=wanted.regex)))
        if wanted.choice is not None:
            found.append((f"{at}.choice", _choice(wanted.choice)))
        if wanted.grammar is not None:
            found.append((f"{at}.grammar", Constraint(grammar=wanted.grammar)))
        if wanted.json_object:
            found.append((f"{at}.json_object", Constraint(json_object=True)))
        if not found:
            raise bad_value(at, "names no form")
        return found


def _choice(texts: list[str]) -> Constraint:
    return Constraint(choice=Constraint.Options(texts=texts))


def _json_schema(schema: dict[str, Any] | str, param: str) -> Constraint:
    deep = f"may be nested at most {MAX_DEPTH} deep"
    if isinstance(schema, dict) and too_deep(schema):
        raise bad_value(param, deep)
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    if len(text) > MAX_TEXT:
        raise bad_value(param, f"a schema may have at most {MAX_TEXT} characters")
    try:
        parsed = read_json(text)
    except ValueError:
        raise bad_value(param, "must be a JSON schema") from None
    if not isinstance(parsed, dict):
        raise bad_value(param, "must be a JSON schema, an object")
    if too_deep(parsed):
        raise bad_value(param, deep)
    return Constraint(json_schema=json.dumps(closed(parsed), ensure_ascii=False))

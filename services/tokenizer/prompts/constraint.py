"""What an answer is held to, as one grammar.

It is where calls are forced (`required`, or one by its name), where the client asks for a form,
and where a function that may be called is `strict`. Where both calls and text may come, the grammar
is of both, and where the model reasons first, of that, too. Rules are in Lark's notation, as
llguidance reads it.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from protos.common_pb2 import Constraint, ToolChoice
from protos.tokenizer_pb2 import Chat, PromptRequest
from services.common.errors import invalid
from services.common.text.json_schema import closed
from services.common.text.lark import literal
from services.tokenizer.answers.answer_shape import Reasoning, ReasoningMarks, Shape
from services.tokenizer.checkpoints.models import ServedModel
from services.tokenizer.prompts.context import Prompt
from services.tokenizer.prompts.offers import callable_tools, offered
from services.tokenizer.tool_parsers import Way, without

_WHITE_SPACE = r"( |\n[ \t]{0,16})?"  # between JSON's parts, as the engine bounds it elsewhere
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "additionalProperties": False}
_SLASH = re.compile(r"\\.|/", re.DOTALL)  # and what is escaped, which a slash may be already


def shape_of(request: PromptRequest, model: ServedModel, prompt: Prompt) -> Shape | None:
    """What tells an answer's parts apart; None: all of it is text."""
    if not request.HasField("chat"):
        return None
    marks, tools = model.reasoning_marks, offered(request.chat)
    if not (marks or tools):
        return None
    return Shape(
        Reasoning(marks, prompt.reasons) if marks else None,
        _way(model).reader() if tools else None,
        request.chat.one_call,
    )


def constraint_of(request: PromptRequest, model: ServedModel, prompt: Prompt) -> Constraint | None:
    """Raises INVALID_ARGUMENT for what does not go together."""
    sampling, chat = request.sampling, request.chat
    wanted = sampling.constraint if sampling.HasField("constraint") else None
    forced = chat.tool_choice.mode in (ToolChoice.REQUIRED, ToolChoice.NAMED)
    # Of some only, or strict: then what the model may write is not left to it.
    strict = bool(chat.tool_choice.allowed) or any(tool.strict for tool in offered(chat))
    marks = model.reasoning_marks if request.HasField("chat") else None
    if not (wanted or forced or strict):
        return None
    if offered(chat):
        rules = [*_tool_rules(chat, _way(model), wanted, forced)]
    elif marks and wanted:
        rules = [f"body: {_form(wanted)}"]
    else:
        return wanted
    return Constraint(grammar="\n".join([*_start(marks, prompt.reasons, model.way), *rules]))


def _way(model: ServedModel) -> Way:
    if model.way is None:
        raise invalid(f"how {model.name!r} writes calls of tools is not known here", "tools")
    return model.way


def _start(marks: ReasoningMarks | None, reasons: bool, way: Way | None) -> Iterator[str]:
    if marks is None:
        yield "start: body"
        return
    opens = way.marker(marks.opens) if way else literal(marks.opens)
    yield "start: reasoning GAP body" if reasons else f"start: ({opens} reasoning GAP)? body"
    yield r"GAP: /[ \n]{0,8}/"
    if way is not None and way.is_token(marks.closes):
        yield f"reasoning: REASONING {way.marker(marks.closes)}"
        yield f"REASONING: {without(marks.closes)}"
    else:
        yield f"reasoning[suffix={literal(marks.closes)}]: /(?s:.*)/"


def _tool_rules(chat: Chat, way: Way, wanted: Constraint | None, forced: bool) -> Iterator[str]:
    if forced:
        yield "body: calls"
    elif wanted is not None:
        yield f"body: calls | {_form(wanted)}"
    elif not way.tells_apart:
        raise invalid(
            "with the tool_choice 'auto' this model's calls cannot be held to a schema, or to some "
            "of the tools: its marks of calls are no tokens; a function must not be strict",
            "tool_choice" if chat.tool_choice.allowed else "tools",
        )
    else:
        yield f"body: {way.either}"
        yield f"TEXT: {way.text()}"
    yield f"calls: {way.calls(chat.one_call)}"
    tools = callable_tools(chat)
    yield "call: " + " | ".join(f"call_{n}" for n in range(len(tools)))
    for n, tool in enumerate(tools):
        yield f"call_{n}: {way.call(tool.name, f'arguments_{n}')}"
        parameters = json.loads(tool.parameters) if tool.parameters else _NO_PARAMETERS
        yield f"arguments_{n}: {_json(parameters)}"


def _form(wanted: Constraint) -> str:
    """The rule of an answer in the form that the client asks for."""
    match wanted.WhichOneof("kind"):
        case "json_object":
            return _json({"type": "object"})
        case "json_schema":
            return _json(json.loads(wanted.json_schema))
        case "regex":
            return "/" + _SLASH.sub(lambda m: r"\/" if m[0] == "/" else m[0], wanted.regex) + "/"
        case "choice":
            return "(" + " | ".join(map(literal, wanted.choice.texts)) + ")"
    raise invalid("a grammar of one's own goes neither with tools nor with reasoning", "grammar")


def _json(schema: Any) -> str:
    options = {"x-guidance": {"whitespace_pattern": _WHITE_SPACE}}
    whole = {**closed(schema), **options} if isinstance(schema, dict) else schema
    return f"%json {json.dumps(whole, ensure_ascii=False)}"

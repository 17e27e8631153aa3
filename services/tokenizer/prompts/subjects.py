"""Every text that a prompt may hold, for the policy to look at, and what it made of them."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from protos.common_pb2 import Constraint, ContentPart, Message
from protos.tokenizer_pb2 import Pool, PromptRequest
from services.common.policy import Subject
from services.common.policy.schema import Place
from services.common.text.content import text_of

Ids = Sequence[int]
_Put = Callable[[str], None]
_OURS = re.compile("call_[0-9a-f]{24}")  # as Answer.call_id makes them


def subjects(request: PromptRequest, decode: Callable[[Ids], str]) -> list[Subject]:
    """`decode` turns a completion's token ids into text: ids are no way around the policy."""
    return [subject for subject, _ in _all(request, decode)]


def edit(request: PromptRequest, edits: Mapping[int, str]) -> None:
    """Puts other texts in the place of those that have these numbers."""
    if not edits:
        return
    puts = [put for _, put in _all(request, lambda _: "")]
    for number, text in edits.items():
        puts[number](text)


def _all(request: PromptRequest, decode: Callable[[Ids], str]) -> list[tuple[Subject, _Put]]:
    return [*_of_input(request, decode), *_of_constraint(request.sampling.constraint)]


def _of_input(request: PromptRequest, decode: Callable[[Ids], str]) -> list[tuple[Subject, _Put]]:
    match request.WhichOneof("input"):
        case "chat":
            return _of_chat(request)
        case "text":
            subject = Subject("prompt", "input", request.text, "user", spoken=True)
            return [(subject, _setter(request, "text"))]
        case "token_ids":
            text = decode(request.token_ids.ids)
            return [(Subject("prompt", "input", text, "user", fixed=True), _never)]
        case "pool":
            of_documents: Place = "retrieved" if request.pool.task == Pool.SCORE else "input"
            queries = _of_pool("queries", request.pool.queries, "input", decode)
            if request.pool.judged:
                return [*queries]
            return [*queries, *_of_pool("inputs", request.pool.inputs, of_documents, decode)]
    return []


def _of_constraint(wanted: Constraint) -> Iterator[tuple[Subject, _Put]]:
    """What an answer is to look like: the model does not read it, but says what it holds."""
    kind = wanted.WhichOneof("kind")
    is_json = kind == "json_schema"
    texts = wanted.choice.texts if kind == "choice" else []
    if kind in ("json_schema", "regex", "grammar"):
        texts = [getattr(wanted, kind)]
    for text in texts:
        yield Subject("constraint", "input", text, "system", fixed=True, json=is_json), _never


def _of_pool(
    name: str, inputs: Iterable[Pool.Input], place: Place, decode: Callable[[Ids], str]
) -> Iterator[tuple[Subject, _Put]]:
    for index, one in enumerate(inputs):
        is_text = one.HasField("text")
        text = one.text if is_text else decode(one.token_ids.ids)
        subject = Subject(f"{name}[{index}]", place, text, "user", fixed=not is_text)
        yield subject, _setter(one, "text") if is_text else _never


def _of_chat(request: PromptRequest) -> list[tuple[Subject, _Put]]:
    found: list[tuple[Subject, _Put]] = []
    for index, message in enumerate(request.chat.messages):
        at, role = f"messages[{index}]", message.role
        spoken = Subject(f"{at}.content", "input", text_of(message), role, spoken=True)
        found.append((spoken, _content_setter(message)))
        if message.name:
            found.append((Subject(f"{at}.name", "input", message.name, role, fixed=True), _never))
        if _is_foreign(message.tool_call_id):
            of_result = Subject(
                f"{at}.tool_call_id", "input", message.tool_call_id, role, fixed=True
            )
            found.append((of_result, _never))
        if message.reasoning:
            thought = Subject(f"{at}.reasoning_content", "input", message.reasoning, role)
            found.append((thought, _setter(message, "reasoning")))
        for number, call in enumerate(message.tool_calls):
            of_call = f"{at}.tool_calls[{number}]"
            if _is_foreign(call.id):
                found.append((Subject(of_call, "input", call.id, role, fixed=True), _never))
            found.append((Subject(of_call, "input", call.name, role, fixed=True), _never))
            asked = Subject(of_call, "input", call.arguments, role, json=True)
            found.append((asked, _setter(call, "arguments")))
    for index, tool in enumerate(request.chat.tools):
        at = f"tools[{index}]"
        found.append((Subject(at, "input", tool.name, "system", fixed=True), _never))
        told = Subject(at, "input", tool.description, "system")
        found.append((told, _setter(tool, "description")))
        takes = Subject(at, "input", tool.parameters, "system", json=True)
        found.append((takes, _setter(tool, "parameters")))
    if options := request.chat.template_options:
        given = Subject("chat_template_kwargs", "input", options, "system", json=True)
        found.append((given, _setter(request.chat, "template_options")))
    for index, passage in enumerate(request.chat.passages):
        for name in ("title", "text"):
            text = getattr(passage, name)
            subject = Subject(f"documents[{index}]", "retrieved", text)
            found.append((subject, _setter(passage, name)))
    return found


def _is_foreign(id: str) -> bool:
    """Whether a call's id may say something: ours are digits of a hash."""
    return bool(id) and not _OURS.fullmatch(id)


def _setter(message: object, field: str) -> _Put:
    return lambda text: setattr(message, field, text)


def _content_setter(message: Message) -> _Put:
    def put(text: str) -> None:
        del message.content[:]
        message.content.append(ContentPart(text=text))

    return put


def _never(text: str) -> None:
    raise AssertionError("what is fixed is refused, not redacted")

"""The checkpoint's chat template.

Rendering is as transformers' own (`apply_chat_template` with `documents` and
`add_generation_prompt`), but for an end (bounded_jinja.py). Where a template lacks something:

- `documents` not used: the passages go to the end of the leading system message (made if there is
  none; before the last user message if the template takes no system message), in this form:

      Passages:

      [1] title
      text

      [2] …

- role `developer` not known: rendered as `system`.
- It has no place for tools, or for calls of them: the request that has some is refused.
- A role or an order of roles that the template refuses, or a message that it would silently leave
  out, is the client's error.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from time import thread_time
from typing import Any

from jinja2 import TemplateError, meta, nodes

from protos.common_pb2 import Message, Passage, Tool, ToolCall
from services.common.text.content import said, text_of
from services.common.text.titles import one_line
from services.tokenizer.templates.bounded_jinja import BUDGET_S, BoundedTemplate, TooMuchError
from services.tokenizer.templates.breaks import BREAK, Breaks
from services.tokenizer.templates.control_tokens import answer_tokens, control_tokens
from services.tokenizer.templates.rendered import MARK, Rendered, locate, mark
from services.tokenizer.templates.traced import Tracer, Written
from services.tokenizer.tool_parsers import mistral

_QUICK_S = 0.01
_LITTLE_BYTES = 1024
_SHORT_ID = re.compile("[A-Za-z0-9]{9}")
_KNOWN_SHAPES, _KNOWN_TURNS = 128, 32
_WRITTEN = 2**23  # characters: no template was stopped for so few
_Shape = tuple[tuple[str, bool], ...]
"""Of each message its role, and whether it says something."""
_UNSTEADY = {"strftime_now", "lipsum", "random"}
"""Functions and filters that do not always give the same."""
_NO_PARAMETERS = '{"type": "object", "properties": {}}'
# Given by Penstock and by transformers: no option of a client's.
_OURS = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception"}
_OURS |= {"strftime_now", "continue_final_message", "tokenize", "chat_template"}
_NO_TOOLS = "the model's chat template has no place for tools"


class NotRenderableError(Exception):
    """The template does not take message `index`, or (None) cannot be pinned to one; `why` holds
    no prompt text.
    """

    def __init__(self, index: int | None, why: str, param: str = "messages") -> None:
        super().__init__(why)
        self.index = index
        self.why = why
        self.param = param


class ChatTemplate:
    """A tokenizer's template. Safe to use from several threads."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: a transformers tokenizer that has a chat template.

        Raises ValueError when there are several templates and none is the default.
        """
        self._given = tokenizer.special_tokens_map
        source: str = tokenizer.get_chat_template()
        self._plain = BoundedTemplate(source)
        self._tracer = Tracer(source)
        tree = self._plain.tree
        variables = meta.find_undeclared_variables(tree)
        constants = [constant.value for constant in tree.find_all(nodes.Const)]
        self._knows_developer = any(
            value == "developer" or (isinstance(value, list | tuple) and "developer" in value)
            for value in constants  # the parser folds a list of constants into one
        )
        self._uses_documents = "documents" in variables
        self.takes_pairs = {"query", "document"} <= {c for c in constants if isinstance(c, str)}
        """It is of a cross-encoder: for one message of role query and one of role document."""
        self.source: str = tokenizer.get_chat_template(tools=[_definition(Tool(name="a"))])
        """Of the template that is used where there are tools."""
        self.control = control_tokens(tokenizer, source + self.source)
        """Tokens that nobody but the template may write, the longest first."""
        added = {token.content for token in tokenizer.added_tokens_decoder.values()}
        self._breaks = Breaks(self.control, added - {*self.control}, MARK)
        self.reads_by(answer_tokens(added, source + self.source))
        other = self.source != source
        self._with_tools = BoundedTemplate(self.source) if other else self._plain
        self._short_ids = mistral.MARK in self.source
        of_tools = meta.find_undeclared_variables(self._with_tools.tree)
        self.takes_tools = "tools" in of_tools
        variables |= of_tools
        self._options = variables - _OURS - {*self._given}
        names = {name.name for name in tree.find_all(nodes.Name)}
        names |= {one.name for one in tree.find_all(nodes.Filter)}
        self._is_steady = not names & _UNSTEADY
        self._known_skeleton = lru_cache(_KNOWN_SHAPES)(self._skeleton_of_roles)
        self._known_writing = lru_cache(_KNOWN_SHAPES)(self._writing_of_roles)
        self._takes_system = self._can_render(["system", "user"])

    def reads_by(self, marks: Iterable[str]) -> None:
        """By these answers are read, too: where they are tokens, others' words make none."""
        self._breaks.keep(marks)

    @property
    def is_quick(self) -> bool:
        """Whether it always was with a short chat, from when it was read on."""
        return max(self._plain.slowest_s, self._tracer.slowest_s) < _QUICK_S

    def render(
        self,
        messages: Sequence[Message],
        passages: Sequence[Passage] = (),
        tools: Sequence[Tool] = (),
        options: Mapping[str, Any] | None = None,
        *,
        sought: bool = False,
    ) -> Rendered:
        """The prompt's text, open for the assistant's answer. `options`: what else the template is
        given, by its own names for it. `sought`: where there are no passages, some were looked for;
        the template gets an empty list. Raises NotRenderableError."""
        offered = self._offer(tools, options or {})
        if sought and not passages:
            offered["documents"] = []
        turns = [self._turn(index, message) for index, message in enumerate(messages)]
        fields = [
            *(
                self._breaks.by_others(said) if m.role == "tool" else said
                for m, said in zip(messages, map(text_of, messages), strict=True)
            ),
            *(
                self._breaks.by_others(said)
                for one in passages
                for said in (one_line(one.title), one.text)
            ),
        ]
        shape = self._shape(turns, fields, offered)
        if shape and (written := self._known_writing(shape)) and sum(map(len, fields)) <= _WRITTEN:
            return written.of(fields).joined()
        turns, offered = self._breaks.by_clients(turns), self._breaks.by_clients(offered)
        marks = [mark(number) if field else "" for number, field in enumerate(fields)]
        given = sum(one.ByteSize() for one in (*messages, *passages))
        little = not tools and given <= _LITTLE_BYTES
        try:
            if shape is None:
                skeleton = self._apply(turns, marks, offered, little)
            else:  # known from the last chat of the same shape
                skeleton = self._known_skeleton(shape)
        except TooMuchError as error:
            raise _too_much(error) from None
        except TemplateError as error:
            why = str(error)  # with its breaks: each try has them, too

            def refuses(count: int, offered: dict[str, Any] = offered) -> bool:
                try:
                    self._apply(turns[:count], marks[:count], offered, little)
                except TemplateError as error:
                    return str(error) == why
                return False

            refused = f"the model's chat template refuses: {why.replace(BREAK, '')}"
            if tools and not refuses(len(turns), {**offered, "tools": None}):
                raise NotRenderableError(None, refused, "tools") from None
            raise NotRenderableError(_last_of_least(len(turns), refuses), refused) from None
        shown = {int(number) for number in MARK.findall(skeleton)}
        for index, message in enumerate(messages):
            # What was said beside calls some templates leave out.
            if fields[index] and index not in shown and not message.tool_calls:
                why = (
                    f"the model's chat template leaves out a message of role {message.role!r} here"
                )
                raise NotRenderableError(index, why)
        try:
            text = self._apply(turns, fields, offered, little)
        except TooMuchError as error:
            raise _too_much(error) from None
        except TemplateError:  # its words may quote the content
            why = "the model's chat template refuses the content of the messages"
            raise NotRenderableError(None, why) from None
        return locate(text, skeleton, fields, len(messages)).joined()

    def _shape(
        self, turns: Sequence[dict[str, Any]], fields: Sequence[str], offered: dict[str, Any]
    ) -> _Shape | None:
        """Of a chat of nothing but roles and contents, as most are, in a template that does the
        same each time."""
        plain = len(fields) == len(turns) <= _KNOWN_TURNS and all(len(turn) == 1 for turn in turns)
        if not (plain and self._is_steady and offered == {"tools": None}):
            return None
        return tuple((turn["role"], bool(f)) for turn, f in zip(turns, fields, strict=True))

    def _writing_of_roles(self, shape: _Shape) -> Written | None:
        turns = [{"role": role} for role, _ in shape]
        if self._breaks.by_clients(turns) != turns:
            return None
        given = {**self._given, "tools": None, "documents": None, "add_generation_prompt": True}
        return self._tracer.written(turns, [says for _, says in shape], given)

    def _skeleton_of_roles(self, shape: _Shape) -> str:
        marks = [mark(number) if says else "" for number, (_, says) in enumerate(shape)]
        turns = self._breaks.by_clients([{"role": role} for role, _ in shape])
        return self._apply(turns, marks, {"tools": None}, True)

    def _apply(
        self,
        messages: Sequence[dict[str, Any]],
        fields: Sequence[str],
        offered: dict[str, Any],
        little: bool,
    ) -> str:
        """Renders with `fields` for the contents, then each passage's title and text."""
        count = len(messages)
        turns = [
            {**turn, "content": content} for turn, content in zip(messages, fields, strict=False)
        ]
        titles, texts = fields[count::2], fields[count + 1 :: 2]
        documents = [{"title": a, "text": b} for a, b in zip(titles, texts, strict=True)]
        if documents and not self._uses_documents:
            self._put_into_messages(documents, turns)
            documents = []
        template = self._with_tools if offered["tools"] else self._plain
        given = {**self._given, "documents": None, **offered, "add_generation_prompt": True}
        if documents:
            given["documents"] = documents
        return template.render({**given, "messages": turns}, little)

    def _turn(self, index: int, message: Message) -> dict[str, Any]:
        """What the template gets beside the content."""
        turn: dict[str, Any] = {"role": self._role(message)}
        if message.name:
            turn["name"] = message.name
        if message.reasoning:
            turn["reasoning_content"] = turn["thinking"] = message.reasoning
        if message.tool_call_id:
            turn["tool_call_id"] = self._call_id(message.tool_call_id)
        if message.tool_calls:
            if not self.takes_tools:
                raise NotRenderableError(index, _NO_TOOLS)
            turn["tool_calls"] = [
                _call(index, call, self._call_id(call.id)) for call in message.tool_calls
            ]
        return turn

    def _call_id(self, id: str) -> str:
        """Mistral's templates take ids of nine letters and digits only, which may be any."""
        if not self._short_ids or _SHORT_ID.fullmatch(id):
            return id
        return hashlib.blake2b(id.encode(), digest_size=5).hexdigest()[:9]

    def _offer(self, tools: Sequence[Tool], options: Mapping[str, Any]) -> dict[str, Any]:
        """What the template gets beside messages and passages."""
        if tools and not self.takes_tools:
            raise NotRenderableError(None, _NO_TOOLS, "tools")
        for name in options:
            if name not in self._options:
                why = f"the model's chat template knows no {name!r}"
                raise NotRenderableError(None, why, f"chat_template_kwargs.{name}")
        return {"tools": [_definition(tool) for tool in tools] or None, **options}

    def _role(self, message: Message) -> str:
        if message.role == "developer" and not self._knows_developer:
            return "system"
        return message.role

    def _put_into_messages(
        self, documents: list[dict[str, str]], turns: list[dict[str, str]]
    ) -> None:
        blocks = ["Passages:"]
        for number, document in enumerate(documents, 1):
            lines = (document["title"], document["text"])
            blocks.append(f"[{number}] " + "\n".join(line for line in lines if line))
        block = "\n\n".join(blocks)
        if not self._takes_system:
            users = [turn for turn in turns if turn["role"] == "user"]
            host = users[-1] if users else turns[-1]
            host["content"] = f"{block}\n\n{host['content']}"
        elif turns[0]["role"] == "system":
            turns[0]["content"] += f"\n\n{block}"
        else:
            turns.insert(0, {"role": "system", "content": block})

    def _can_render(self, roles: list[str]) -> bool:
        try:
            self.render([said(role, role) for role in roles])
        except NotRenderableError:
            return False
        return True


def _too_much(error: TooMuchError) -> NotRenderableError:
    return NotRenderableError(None, f"the model's chat template is stopped: {error}")


def _last_of_least(count: int, refuses: Callable[[int], bool]) -> int | None:
    """The last of the fewest of `count` messages that are refused, where all of them are. None: the
    tries took what a rendering may."""
    low, high = 0, count
    ends = thread_time() + BUDGET_S
    while high - low > 1:
        if thread_time() > ends:
            return None
        middle = (low + high) // 2
        if refuses(middle):
            high = middle
        else:
            low = middle
    return high - 1


def _definition(tool: Tool) -> dict[str, Any]:
    """As OpenAI has it, which is what templates expect."""
    function: dict[str, Any] = {"name": tool.name, "description": tool.description}
    function["parameters"] = json.loads(tool.parameters or _NO_PARAMETERS)
    return {"type": "function", "function": function}


def _call(index: int, call: ToolCall, id: str) -> dict[str, Any]:
    """With arguments as an object: templates write them out themselves."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError:
        why = f"the arguments of a call of {call.name!r} are no JSON"
        raise NotRenderableError(index, why) from None
    function = {"name": call.name, "arguments": arguments}
    return {"type": "function", "id": id, "function": function}

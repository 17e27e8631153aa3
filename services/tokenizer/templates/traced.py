"""What a chat template does with contents, where it only writes them down.

Most templates look at roles, and write each content where it belongs, as it is or trimmed. Then a
prompt is put together from what the template writes itself and from the contents, without executing
it anew for each chat. That it does no more is seen by executing it once for chats of that shape
(roles, and which contents say something) with texts in place of the contents that can be written,
joined and trimmed, and asked whether they are texts; whatever else is done to one ends the trial,
and chats of that shape are rendered as all others. What the template does cannot depend on what it
never saw.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from secrets import token_hex
from typing import Any, NamedTuple

from jinja2 import TemplateError, TemplateRuntimeError, Undefined, nodes
from jinja2.runtime import Macro

from services.tokenizer.templates.bounded_jinja import (
    BoundedEnvironment,
    BoundedTemplate,
    Looks,
    joined,
)
from services.tokenizer.templates.rendered import Rendered, Span

_BEGINS = f"\ue000{token_hex(8)}:"
"""What stands for a content begins so: no template, and no role, can have it of its own."""
_PLAIN, _TRIMMED = "\ue001", "\ue004"  # end a content's number
_PLACE = re.compile(f"{_BEGINS}([0-9]+)([{_PLAIN}{_TRIMMED}])")
_HANDS_ON = {"length", "count", "first", "last", "list", "default", "d"}
"""Filters that look at nothing within a list or an object, and hand on what is in it."""
_OF_KIND = {"string", "none", "defined", "undefined", "mapping", "number", "boolean", "callable"}
"""Tests that ask only what kind of thing it is."""

_SCOPES = ("_loop_vars", "_block_vars")  # that Jinja gives each call itself


class LooksCloserError(TemplateRuntimeError):
    """The template does more with a content than to write it."""


class Written(NamedTuple):
    """What a template writes for chats of one shape: its own texts, and between them contents."""

    own: list[str]  # one more than there are places
    places: list[tuple[int, bool]]  # of each content its number, and whether it is trimmed

    def of(self, contents: Sequence[str]) -> Rendered:
        """The prompt of a chat of this shape with these contents."""
        parts, own, spans, at = [self.own[0]], [self.own[0]], [], len(self.own[0])
        for (number, trimmed), after in zip(self.places, self.own[1:], strict=True):
            content = contents[number].strip() if trimmed else contents[number]
            if content:
                spans.append(Span(at, at + len(content), "message", number))
                own.append("")
            own[-1] += after
            parts += (content, after)
            at += len(content) + len(after)
        return Rendered("".join(parts), spans, own)


class Tracer:
    """Of one template. Safe to use from several threads."""

    def __init__(self, source: str) -> None:
        self._template = BoundedTemplate(source, _Environment, _Looks)

    @property
    def slowest_s(self) -> float:
        """Of its trials, of the processor."""
        return self._template.slowest_s

    def written(
        self, turns: Sequence[Mapping[str, Any]], says: Sequence[bool], given: Mapping[str, Any]
    ) -> Written | None:
        """What it writes for messages of these `turns` (without their contents), of which those
        that say something have any content; None where that depends on the content, where it
        leaves one out or writes it twice, and where it fails. `given`: what it gets beside."""
        contents = [_Content(f"{_BEGINS}{n}{_PLAIN}") if say else "" for n, say in enumerate(says)]
        messages = [{**turn, "content": c} for turn, c in zip(turns, contents, strict=True)]
        try:
            text = self._template.render({**given, "messages": messages})
        except TemplateError:
            return None
        pieces = _PLACE.split("".join((text, "")))
        places = [
            (int(n), end == _TRIMMED) for n, end in zip(pieces[1::3], pieces[2::3], strict=True)
        ]
        if sorted(n for n, _ in places) != [n for n, say in enumerate(says) if say]:
            return None
        return Written(pieces[0::3], places)


class _Content(str):
    """A content, or a text in which one is: a mark that stands for it. That it says something is
    known, unless it was trimmed."""

    def __str__(self) -> str:
        return self

    def __bool__(self) -> bool:
        if _TRIMMED in str.__getitem__(self, slice(-1, None)):
            raise LooksCloserError
        return True

    def __add__(self, other: str) -> str:
        return _joined((self, other))

    def __radd__(self, other: str) -> str:
        return _joined((other, self))

    def strip(self, *of: object) -> str:
        found = _PLACE.fullmatch("".join((self, "")))
        if of not in ((), (None,)) or found is None:
            raise LooksCloserError
        return _Content(f"{_BEGINS}{found[1]}{_TRIMMED}")


def _refusing(_self: object, *_: object, **__: object) -> Any:
    raise LooksCloserError


_KEPT = {
    *("__new__", "__init__", "__init_subclass__", "__subclasshook__", "__class__", "__dir__"),
    *("__getattribute__", "__setattr__", "__delattr__", "__doc__", "__sizeof__"),
}
for _name in dir(str):
    if _name not in _KEPT and _name not in vars(_Content):
        setattr(_Content, _name, _refusing)


def _joined(parts: Iterable[Any]) -> str:
    """Of texts, and with a content in it one itself. A `Markup` is none: it escapes the rest."""
    texts = list(parts)
    if not all(type(text) in (str, _Content) for text in texts):
        raise LooksCloserError
    text = joined(texts)
    return _Content(text) if any(isinstance(one, _Content) for one in texts) else text


def _is_plain(value: object) -> bool:
    """It is no content, and has none in it."""
    return value is None or (
        isinstance(value, str | int | float | Undefined) and not isinstance(value, _Content)
    )


class _Environment(BoundedEnvironment):
    """Hands contents on as they are, and nothing else that could look into them."""

    concat = staticmethod(_joined)

    def bound(self, dialect: Any) -> None:
        super().bound(dialect)
        self.filters = {name: _blind(name, f, _may_filter) for name, f in self.filters.items()}
        self.tests = {name: _blind(name, t, _may_test) for name, t in dialect.tests.items()}

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, _Content) or isinstance(right, _Content):
            if operator != "+":
                raise LooksCloserError
            return _joined((left, right))
        if operator != "+" and not (_is_plain(left) and _is_plain(right)):
            raise LooksCloserError  # a text that is formatted looks into lists and objects
        return super().call_binop(context, operator, left, right)

    def joined(self, *parts: Any) -> str:
        return _joined(map(str, parts))

    def seen(self, value: Any) -> Any:
        """What is looked for in something else, which would see it."""
        return value  # `call` lets no content through to here

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, _Content) and attribute != "strip":
            raise LooksCloserError
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(obj, _Content) or isinstance(argument, _Content):
            raise LooksCloserError
        return super().getitem(obj, argument)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        is_kept = isinstance(__obj, Macro) or __obj is __self.globals["namespace"]
        hands_on = is_kept or __obj == __self.joined
        given = [*args, *(value for name, value in kwargs.items() if name not in _SCOPES)]
        if not hands_on and not all(_is_plain(one) or isinstance(one, Macro) for one in given):
            raise LooksCloserError  # what a macro writes is a content for whoever calls it, too
        return super().call(__context, __obj, *args, **kwargs)


class _Looks(Looks):
    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """A text looks through another without asking it."""
        self.generic_visit(node)
        lefts: list[Any] = [node, *node.ops]
        for left, one in zip(lefts, node.ops, strict=False):
            if one.op in ("in", "notin"):
                seen = nodes.EnvironmentAttribute("seen")
                left.expr = nodes.Call(seen, [left.expr], [], None, None, lineno=node.lineno)
        return node


def _may_filter(name: str, args: Sequence[Any]) -> bool:
    if isinstance(args[0], _Content):
        return name in ("trim", "default", "d") and all(map(_is_plain, args[1:]))
    return name in _HANDS_ON and all(map(_is_plain, args[1:]))


def _may_test(name: str, args: Sequence[Any]) -> bool:
    return name in _OF_KIND


def _blind(
    name: str, real: Callable[..., Any], may: Callable[[str, Sequence[Any]], bool]
) -> Callable[..., Any]:
    @wraps(real)
    def blind(*args: Any, **kwargs: Any) -> Any:
        values = [*(args[1:] if hasattr(real, "jinja_pass_arg") else args), *kwargs.values()]
        if not all(map(_is_plain, values)) and not may(name, values):
            raise LooksCloserError
        return real(*args, **kwargs)

    return blind

"""A chat template as transformers compiles it, with an end: whatever a checkpoint or a client's
options make it do, it takes so much processor time and makes texts of so many characters.

The sandbox keeps templates from the process, but lets them loop for ever: `range` is bounded, and
not what is in it. So each pass of a loop and each call of a macro looks at the clock (of the
thread, so that a busy machine does not count), and what makes long texts of short ones is looked at
before it does.
"""

import re
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from time import monotonic, thread_time
from typing import Any

from jinja2 import Template, TemplateError, TemplateRuntimeError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

BUDGET_S = 1.0
"""Of the processor. A chat of a hundred messages takes a millisecond."""
_CHARACTERS = 32 * 2**20
_NUMBER = 2**20
_ITEMS = 2**20  # of a list that is made of others
_BITS = 4096  # of a whole number
_WIDE = re.compile(r"[0-9]{7,}|%[^a-zA-Z%]*\*|:[^}]*\{")
"""In a format: a large number, or one that is given beside it."""
_PADS = ("batch", "center", "format", "indent", "join", "replace", "slice", "wordwrap")
"""Filters and methods that make texts or lists as long as they are told."""
_PADDERS = frozenset((*_PADS, "expandtabs", "format_map", "ljust", "rjust", "zfill"))


class TooMuchError(TemplateRuntimeError):
    """Of time, or of text."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**", "%", "//"))
    _ends = threading.local()

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Of what a macro, a block or the template itself has written."""
        return joined(list(parts))

    def bound(self, dialect: Any) -> None:
        """Its filters are the dialect's, with an end."""
        self.filters = dict(dialect.filters)
        for name in _PADS:
            if name in self.filters:
                self.filters[name] = _bounded(name, self.filters[name])

    def begin(self) -> float:
        """The thread's time now."""
        began = thread_time()
        self._ends.at, self._ends.soonest = began + BUDGET_S, monotonic() + BUDGET_S
        return began

    @property
    def spent(self) -> None:
        """Looked at in each pass of a loop and each call of a macro. The thread's time, which only
        the kernel knows, goes no faster than the clock."""
        if monotonic() > self._ends.soonest and thread_time() > self._ends.at:
            raise TooMuchError("it takes too long")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            _check_number(operator, left, right)
        elif operator == "+":
            if hasattr(left, "__len__") and hasattr(right, "__len__"):
                _check_length(left, len(left) + len(right))
        elif operator == "*":
            for one, times in ((left, right), (right, left)):
                if hasattr(one, "__len__") and isinstance(times, int):
                    _check_length(one, len(one) * times)
        elif operator == "%" and isinstance(left, str):
            _check_format(left, _values(right))
        return super().call_binop(context, operator, left, right)

    def joined(self, *parts: Any) -> str:
        """Of `~`."""
        return joined([str(part) for part in parts])

    def wrap_str_format(self, value: Any) -> Any:
        if (wrapped := super().wrap_str_format(value)) is None:
            return None
        form = value.__self__

        @wraps(wrapped)
        def bounded(*args: Any, **kwargs: Any) -> str:
            given = [*args, *kwargs.values()]
            _check_format(form, [one for value in given for one in _values(value)])
            return wrapped(*args, **kwargs)

        return bounded

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        name = getattr(__obj, "__name__", "")
        if name in _PADDERS and isinstance(getattr(__obj, "__self__", None), str):
            _check_padding(name, __obj.__self__, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)


class Looks(NodeTransformer):
    """Puts the looks at the clock, and at `~`, into a template's tree."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.test is not None:  # which may let nothing through
            look = nodes.Not(nodes.EnvironmentAttribute("spent"), lineno=node.lineno)
            node.test = nodes.And(look, node.test, lineno=node.lineno)
        return self._looking(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._looking(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._looking(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        joined = nodes.EnvironmentAttribute("joined")
        return nodes.Call(joined, node.nodes, [], None, None, lineno=node.lineno)

    def _looking(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        look = nodes.ExprStmt(nodes.EnvironmentAttribute("spent"), lineno=node.lineno)
        node.body.insert(0, look)
        return node  # type: ignore[no-any-return]


class BoundedTemplate:
    """Safe to use from several threads."""

    def __init__(
        self,
        source: str,
        of: type[BoundedEnvironment] = BoundedEnvironment,
        looks: type[Looks] = Looks,
    ) -> None:
        """Raises jinja2's TemplateError for what is no template."""
        from transformers.utils.chat_template_utils import _compile_jinja_template

        # Not of `source`, whose constants would be computed as it is compiled, without a bound.
        dialect = _compile_jinja_template("").environment
        environment = dialect.overlay()
        environment.__class__ = of
        environment.bound(dialect)
        self.tree: nodes.Template = environment.parse(source)
        looking = looks().visit(environment.parse(source))
        code = environment.compile(looking)
        self.slowest_s = 0.0  # that it has taken for little, of the processor
        self._environment = environment
        self._template = Template.from_code(environment, code, environment.make_globals(None))

    def render(self, given: Mapping[str, Any], little: bool = True) -> str:
        """`little`: what is given is short, and says what the template takes by itself. Raises
        TemplateError, TooMuchError among them."""
        began = self._environment.begin()
        try:
            return self._template.render(given)
        except TemplateError:
            raise
        except Exception as error:  # of its expressions: of any kind
            raise TemplateRuntimeError(f"{type(error).__name__} in it") from error
        finally:
            if little:
                self.slowest_s = max(self.slowest_s, thread_time() - began)


def _bounded(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(real)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        values = args[1:] if hasattr(real, "jinja_pass_arg") else args
        if values:
            _check_padding(name, values[0], values[1:], kwargs)
        return real(*args, **kwargs)

    return bounded


def _check_padding(name: str, value: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    for one in (*args, *kwargs.values()):
        if isinstance(one, int) and one > _NUMBER:
            raise TooMuchError("it pads a text too far")
    if name in ("format", "format_map") and isinstance(value, str):
        _check_format(value, [*args, *kwargs.values()])
    if name == "replace" and len(args) > 1:
        old, new = str(args[0]), str(args[1])
        _check(len(value) + (value.count(old) if old else len(value) + 1) * len(new))
    if name == "join":
        separator, parts = (value, args[0]) if isinstance(value, str) else (args[:1], value)
        parts = list(parts)
        _check(sum(len(str(part)) for part in parts) + len(parts) * len(str(separator)))


def _check_format(form: str, values: Iterable[Any]) -> None:
    """Each of its fields may be the longest of the values."""
    if _WIDE.search(form):
        raise TooMuchError("it pads a text too far")
    longest = max((len(one) for one in values if isinstance(one, str)), default=0)
    _check(len(form) + (form.count("%") + form.count("{")) * longest)


def _values(given: Any) -> list[Any]:
    """That a format may be given as one."""
    if isinstance(given, Mapping):
        return list(given.values())
    return list(given) if isinstance(given, list | tuple) else [given]


def joined(texts: list[str]) -> str:
    _check(sum(map(str.__len__, texts)))
    return "".join(texts)


def _check_length(of: Any, size: int) -> None:
    _check(size)
    if size > _ITEMS and not isinstance(of, str):
        raise TooMuchError("it makes too long a list")


def _check_number(operator: str, left: int, right: int) -> None:
    bits, others = left.bit_length(), right.bit_length()
    least = {"*": bits + others, "**": (bits - 1) * right}.get(operator, 0)
    if max(bits, others, least) > _BITS:
        raise TooMuchError("it makes too large a number")


def _check(size: int) -> None:
    if size > _CHARACTERS:
        raise TooMuchError("it makes too long a text")

"""Chat templates that do not end, or fill the memory, cost the request that renders them alone."""

from time import thread_time
from typing import Any

import pytest
from jinja2 import TemplateError

from services.tokenizer.templates import bounded_jinja
from services.tokenizer.templates.bounded_jinja import BoundedTemplate, TooMuchError
from services.tokenizer.templates.template import ChatTemplate, NotRenderableError
from tests.unit.tokenizer.test_chat_template import chat, tokenizer

GROWS = (
    "{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{% set ns = namespace(x='ab') %}"
    "{% for i in range(60) %}{% set ns.x = GROWN %}{% endfor %}"
)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        *(
            GROWS.replace("GROWN", grown)
            for grown in (
                "ns.x ~ ns.x",
                "ns.x + ns.x",
                "ns.x * 9",
                "ns.x.replace('ab', ns.x * 9)",
                "ns.x|replace('a', ns.x)",
                "[ns.x, ns.x]|join(',')",
                "ns.x.join([ns.x, ns.x])",
                "'%s%s' % (ns.x, ns.x)",
                "'%(a)s%(a)s' % {'a': ns.x}",
                "'%s%s' | format(ns.x, ns.x)",
                "'{}{}'.format(ns.x, ns.x)",
                "'{a}{a}'.format_map({'a': ns.x})",
                "twice(ns.x)",
            )
        ),
        "{{ 'x' * 10**10 }}",
        "{{ 2 ** (10 ** 10) }}",
        "{{ 2 ** 5000 }}",
        "{% set x = 2 ** 3000 %}{{ x * x }}",
        "{% set x = '9' * 2000 %}{{ (x|int) // 3 }}",
        "{{ ([0] * 2000000)|length }}",
        "{% set x = [0] * 1000000 %}{{ (x + x)|length }}",
        "{{ '%1000000000d' % 5 }}",
        "{{ '%*d' % (10**9, 5) }}",
        "{{ '%1000000000d'|format(5) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10**9) }}",
        "{{ 'a'.center(10**9) }}",
        "{{ 'a'|center(10**9) }}",
        "{{ [1]|batch(10**9, 'x')|list }}",
    ],
)
def test_what_does_not_end_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_jinja, "BUDGET_S", 0.05)
    template = BoundedTemplate(source)
    began = thread_time()
    with pytest.raises(TooMuchError):
        template.render({})
    assert thread_time() - began < 0.5


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{{ range(10**9)|list }}", "OverflowError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages.nothing.at_all }}", "nothing"),
    ],
)
def test_what_fails_in_it_is_the_templates(source: str, why: str) -> None:
    with pytest.raises(TemplateError, match=why):
        BoundedTemplate(source).render({"messages": []})


def test_what_is_bounded_does_as_before() -> None:
    source = (
        "{% macro two(x) %}{{ x ~ x }}{% endmacro %}{{ two('a') }}{% for i in [1, 2] if i > 1 %}"
        "{{ i + 1 }}{{ 'b' * i }}{{ '%02d' % i }}{% else %}none{% endfor %}{{ [1, 'c']|join('-') }}"
        "{{ 'ab'|replace('a', 'd') }}{{ '{:>3}'.format(7) }}{{ 'e'.center(3) }}{{ [1] + [2] }}"
        "{% for i in [] %}{% else %}empty{% endfor %}{{ 'x\ny'|indent(2) }}{{ 7 % 4 }}{{ 2 ** 3 }}"
    )
    text = "aa3bb021-cdb  7 e [1, 2]emptyx\n  y38"
    assert BoundedTemplate(source).render({}) == text


def test_a_client_hears_that_it_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an option of its own, which the template loops over."""
    monkeypatch.setattr(bounded_jinja, "BUDGET_S", 0.05)
    source = "{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}"
    template = ChatTemplate(tokenizer(source + "{{ messages[0].content }}"))

    def rendered(**options: Any) -> str:
        return template.render(chat(("user", "Hi")), options=options).text

    assert rendered(n=2) == "Hi"
    assert template.is_quick
    with pytest.raises(NotRenderableError, match="stopped: it takes too long") as stopped:
        rendered(n=99_999)
    assert stopped.value.index is None
    assert not template.is_quick, "it may do so again"
    with pytest.raises(NotRenderableError, match="refuses: TypeError"):
        rendered(n="many")


def test_a_long_chat_says_nothing_of_short_ones() -> None:
    template = ChatTemplate(tokenizer("{% for m in messages %}{{ m.content | upper }}{% endfor %}"))
    template._plain.slowest_s = 0.0
    template.render(chat(*[("user", "Hello there")] * 5000))
    assert template._plain.slowest_s == 0.0
    template.render(chat(("user", "Hi")))
    assert template._plain.slowest_s > 0.0


def test_finding_what_is_refused_takes_no_longer_than_a_rendering(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each try may take as long as one: then it is told without its message."""
    source = (
        "{% for m in messages %}{% for i in range(2000) %}{% endfor %}"
        "{% if m.role == 'tool' %}{{ raise_exception('No tools here') }}{% endif %}{% endfor %}"
    )
    talk = chat(("user", "a"), ("tool", "b"), *[("user", "c")] * 30)
    tries: list[int] = []
    real = BoundedTemplate.render

    def render(self: BoundedTemplate, given: Any, little: bool = True) -> str:
        tries.append(len(given["messages"]))
        return real(self, given, little)

    template = ChatTemplate(tokenizer(source))
    monkeypatch.setattr(BoundedTemplate, "render", render)
    for budget_s, index, count in ((60.0, 1, 7), (0.0, None, 1)):  # one of them traced, once
        monkeypatch.setattr("services.tokenizer.templates.template.BUDGET_S", budget_s)
        tries.clear()
        with pytest.raises(NotRenderableError, match="No tools here") as refused:
            template.render(talk)
        assert (refused.value.index, len(tries)) == (index, count)

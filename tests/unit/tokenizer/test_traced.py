"""What a template writes is known without executing it only where it looks at no content."""

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.tokenizer.templates.bounded_jinja import BoundedTemplate
from services.tokenizer.templates.template import ChatTemplate
from services.tokenizer.templates.traced import Tracer, Written
from tests.unit.tokenizer.test_chat_template import CHATML, TALK, as_dicts, chat, tokenizer

DEMO = Path("models/demo/chat_template.jinja").read_text()
LLAMA = """\
{%- set loop_messages = messages -%}
{%- if messages[0]['role'] == 'system' -%}
  {%- set system_message = messages[0]['content'] | trim -%}
  {%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set system_message = '' -%}{%- endif -%}
{{- '<|start|>system\\n\\nCutting: 2023\\n' + system_message + '<|eot|>' -}}
{%- for message in loop_messages -%}
  {%- if message.content is string -%}
    {%- set content = '<|start|>' ~ message['role'] ~ '\\n\\n' ~ message['content'].strip() -%}
    {{- content + '<|eot|>' -}}
  {%- endif -%}
{%- endfor -%}
{{- '<|start|>assistant' -}}"""
NAMED = """\
{%- set ns = namespace(first=messages[0].content) -%}
<|{{ messages[0].role }}|>{{ ns.first }}
{%- for message in messages[1:] -%}<|{{ message.role }}|>{{ message.content | trim }}{%- endfor -%}
<|assistant|>"""
TRAINED = """\
{%- for message in messages -%}
  <|{{ message.role }}|>
  {%- generation -%}{{ message.content | trim }}<|end|>{%- endgeneration -%}
{%- endfor -%}
<|assistant|>"""
GIVEN = {"tools": None, "documents": None, "add_generation_prompt": True}
BEHIND = "{{ messages[0].content }}{{ messages[1].content }}"


def written(source: str, says: tuple[bool, bool] = (True, True)) -> Written | None:
    turns = [{"role": "system"}, {"role": "user"}]
    return Tracer(source).written(turns, says, GIVEN)


@pytest.mark.parametrize("source", [DEMO, CHATML, LLAMA, NAMED, TRAINED])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["user", "assistant", "system", "tool"]),
            st.text(st.sampled_from(" \n\ta<|eot|>é\ue0000\ue001"), max_size=8),
        ),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=60, deadline=None)
def test_a_prompt_put_together_is_the_one_rendered(source: str, turns: Any) -> None:
    known, rendering = ChatTemplate(tokenizer(source)), ChatTemplate(tokenizer(source))
    rendering._known_writing = lambda shape: None  # type: ignore[assignment]
    talk = chat(*turns)
    assert known.render(talk).text == rendering.render(talk).text
    if not any("\ue000" in content for _, content in turns):
        assert known.render(talk) == rendering.render(talk)


@pytest.mark.parametrize("source", [DEMO, CHATML, LLAMA, NAMED, TRAINED])
def test_common_templates_are_executed_once_for_chats_of_a_shape(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = ChatTemplate(tokenizer(source))
    template.render(TALK)
    monkeypatch.setattr(BoundedTemplate, "render", None)
    other = chat(*((one.role, "another") for one in TALK))
    assert template.render(other).text.count("another") == len(TALK)


@pytest.mark.parametrize(
    "looks",
    [
        "{% if messages[0].content == 'a' %}!{% endif %}",
        "{% if 'a' != messages[0].content %}!{% endif %}",
        "{% if messages[0].content < messages[1].content %}!{% endif %}",
        "{% if 'a' in messages[0].content %}!{% endif %}",
        "{% if messages[0].content in 'abc' %}!{% endif %}",
        "{% if 1 in [1] and 2 not in [1] and messages[0].content not in 'abc' %}!{% endif %}",
        "{% if messages[0].content in ['a', 'b'] %}!{% endif %}",
        "{% if messages[0].content in {'a': 1} %}!{% endif %}",
        "{{ {'a': 1}[messages[0].content] }}",
        "{% if messages[0].content | length > 3 %}!{% endif %}",
        "{% if messages[0].content | trim %}!{% endif %}",
        "{% set x = 'a' ~ messages[0].content | trim %}{% if x %}!{% endif %}",
        "{% set x %}{{ messages[0].content }}{% endset %}{% if x == 'a' %}!{% endif %}",
        "{% macro f(x) %}{{ x }}{% endmacro %}{% if f(messages[0].content) == 'a' %}!{% endif %}",
        "{% set ns = namespace(x=messages[0].content) %}{% if ns.x == 'a' %}!{% endif %}",
        "{% if (messages[0].content + 'a').startswith('b') %}!{% endif %}",
        "{% if (messages[0].content ~ 'a')[0] == 'b' %}!{% endif %}",
        "{% for c in messages[0].content %}!{% endfor %}",
        "{% for m in messages | selectattr('content', 'equalto', 'a') %}!{% endfor %}",
        "{{ messages | map(attribute='content') | join | length }}",
        "{{ messages | tojson | length }}",
        "{{ messages[0] | string | length }}",
        "{{ ('%s' % messages[0].content)[0] }}",
        "{{ '{}'.format(messages[0].content)[0] }}",
        "{{ 'abc'.find(messages[0].content) }}",
        "{{ messages[0].content.split('a')[0] }}",
        "{{ messages[0].content * 2 }}",
        "{{ messages[0].content[1:] }}",
        "{{ messages[0].content | upper }}",
        "{{ messages[0].content.strip('a') }}",
        "{{ messages[0].content | trim('a') }}",
        "{{ (messages[0].content + 'a') | trim }}",
        "{% filter upper %}{{ messages[0].content }}{% endfilter %}",
        "{% if messages[0] == {'role': 'system', 'content': 'a'} %}!{% endif %}",
        "{{ messages[0].content }}",  # twice, with what stands behind
        "{% if 'ma' in '%(role)s%(content)s' % messages[0] %}!{% endif %}",
        "{% if '%s.%s' % (messages[0].content, 1) == 'a' %}!{% endif %}",
        "{% macro f() %}{{ messages[0].content }}{% endmacro %}{% if f() == 'a' %}!{% endif %}",
        "{% macro f() %}{{ messages[0].content }}{% endmacro %}{{ [1] | map(f) | list }}",
        "{% macro f(g) %}{{ g() | upper }}{% endmacro %}{% macro h() %}{{ messages[0].content }}"
        "{% endmacro %}{{ f(h) }}",
        "{% macro f() %}{{ caller() | length }}{% endmacro %}"
        "{% call f() %}{{ messages[0].content }}{% endcall %}",
    ],
)
def test_a_template_that_looks_at_a_content_is_executed_for_each_chat(looks: str) -> None:
    assert written(looks + BEHIND) is None


@pytest.mark.parametrize(
    "source",
    [
        "{% autoescape true %}" + BEHIND + "{% endautoescape %}",
        "{% autoescape true %}{% set x %}{{ messages[0].content }}{% endset %}{{ x }}"
        "{{ messages[1].content }}{% endautoescape %}",
        "{{ ('<b>' | e) + messages[0].content }}{{ messages[1].content }}",
        "{{ messages[0].content + ('<b>' | safe) }}{{ messages[1].content }}",
        "{{ '%(content)-9s' % messages[0] }}{{ messages[1].content }}",
    ],
)
def test_a_template_that_changes_a_content_unasked_is_executed_for_each_chat(source: str) -> None:
    assert written(source) is None
    talk = chat(("system", "<a&b>"), ("user", "x"))
    right = BoundedTemplate(source).render({"messages": as_dicts(talk)})
    assert ChatTemplate(tokenizer(source)).render(talk).text == right != "<a&b>x"


@pytest.mark.parametrize("signs", ["\ue0000\ue001", "\\ue0000\\ue001", "\ue0000\ue004"])
def test_no_template_can_write_what_stands_for_a_content(signs: str) -> None:
    found = written("{{ '" + signs + "' }}{{ messages[1].content }}", (False, True))
    shown = signs.replace("\\ue000", "\ue000").replace("\\ue001", "\ue001")
    assert found is not None
    assert found.of(["", "b"]).text == shown + "b"
    assert written("{{ '" + signs + "' }}{{ messages[1].content }}") is None


@pytest.mark.parametrize("grown", ["ns.x ~ ns.x", "ns.x + ns.x", "f(ns.x)"])
@pytest.mark.parametrize("what", ["'ab'", "messages[0].content"])
def test_what_grows_without_end_ends_the_trial(grown: str, what: str) -> None:
    source = (
        "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}"
        f"{{% set ns = namespace(x={what}) %}}{{% for i in range(60) %}}"
        f"{{% set ns.x = {grown} %}}{{% endfor %}}"
    )
    tracemalloc.start()
    try:
        assert written(source + BEHIND) is None
        assert tracemalloc.get_traced_memory()[1] < 512 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "looks",
    [
        "{% if messages[0].content is string and messages[0].content is not none %}a{% endif %}",
        "{{ 'a' if messages[0].content else 'b' }}",
        "{{ 'a' if messages | length == 2 and messages[0].role in ('system', 'user') else 'b' }}",
        "{% set m = messages | first %}{{ 'a' if m.get('content') else 'b' }}",
    ],
)
def test_what_a_shape_tells_may_be_looked_at(looks: str) -> None:
    assert written(looks + BEHIND) == (["a", "", ""], [(0, False), (1, False)])


def test_a_content_left_out_is_none_of_what_is_written() -> None:
    assert written("{{ messages[1].content }}") is None
    assert written("{{ messages[1].content }}", (False, True)) == (["", ""], [(1, False)])


def test_contents_may_stand_in_another_order() -> None:
    found = written("<{{ messages[1].content }}|{{ messages[0].content | trim }}>")
    assert found == (["<", "|", ">"], [(1, False), (0, True)])
    assert found is not None
    assert found.of([" a ", " b "]).text == "< b |a>"

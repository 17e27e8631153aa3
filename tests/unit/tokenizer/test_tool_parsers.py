"""Calls in an answer's text: each way of writing them, whole and cut anywhere."""

import itertools
import json
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.tokenizer.answers.answer_shape import Reasoning, ReasoningMarks, Shape
from services.tokenizer.tool_parsers import CallReader, way_of
from services.tokenizer.tool_parsers.demo import Demo
from services.tokenizer.tool_parsers.hermes import Hermes, HermesReader
from services.tokenizer.tool_parsers.llama3 import Llama3, Llama3Reader
from services.tokenizer.tool_parsers.mistral import Mistral, MistralReader
from services.tokenizer.tool_parsers.pythonic import Pythonic, PythonicReader

THINK = ReasoningMarks("<think>", "</think>")


@dataclass
class Heard:
    """What a client puts together from what it gets."""

    text: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)

    @property
    def told(self) -> tuple[str, str, list[list[str]]]:
        return self.text, self.reasoning, self.calls


def hear(shape: Shape, pieces: list[str]) -> Heard:
    heard = Heard()
    for said in [*map(shape.push, pieces), shape.flush()]:
        heard.text += said.text
        heard.reasoning += said.reasoning
        for call in said.calls:
            if call.name:
                assert call.index == len(heard.calls)
                heard.calls.append([call.name, ""])
            heard.calls[call.index][1] += call.arguments
    assert shape.called is bool(heard.calls)
    return heard


def calls_of(reader: type[CallReader], text: str) -> tuple[str, list[list[str]]]:
    heard = hear(Shape(None, reader()), [text])
    return heard.text, heard.calls


A = '{"name": "look", "arguments": {"at": "a \\"b\\" {", "n": [1, {"x": null}]}}'
LOOK = ["look", '{"at": "a \\"b\\" {", "n": [1, {"x": null}]}']
B = '{"arguments": {}, "name": "go"}'
GO = ["go", "{}"]


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        ("Just words < here.\n", "Just words < here.\n", []),
        (f"<tool_call>\n{A}\n</tool_call>", "", [LOOK]),
        (f"<tool_call>{A}</tool_call>\n<tool_call>\n{B}\n</tool_call>\n", "", [LOOK, GO]),
        (f"I look.\n<tool_call>{A}</tool_call> Done.", "I look. Done.", [LOOK]),
        ('<tool_call>{"name": "go"}</tool_call>', "", [GO]),
        ('<tool_call>{"name": "go", "id": 7, "arguments": "{\\"a\\": 1}"}</tool_call>', "",
         [["go", '{"a": 1}']]),
        # What was told cannot be taken back; what was not is text.
        ('<tool_call>{"name": "go", "arguments": {"a": 1', "", [["go", '{"a": 1']]),
        ('<tool_call>{"name": "go", "arguments": {"a": 1}, oops</tool_call> x', " x",
         [["go", '{"a": 1}']]),
        ('<tool_call>{"nam', '<tool_call>{"nam', []),
        ('<tool_call>{"what": 1}</tool_call>', '<tool_call>{"what": 1}</tool_call>', []),
        (f"<tool_call><tool_call>{B}</tool_call>", "<tool_call>", [GO]),
        ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
        ("a < b <tool_cal", "a < b <tool_cal", []),
        # Names that no tool has, and half of a surrogate pair.
        *((text, text, []) for text in ('<tool_call>{"name": "", "arguments": {}}</tool_call>',
                                        '<tool_call>{"name": "to go"}</tool_call>',
                                        '<tool_call>{"name": "\\ud800"}</tool_call>')),
        ('<tool_call>{"name": "go", "arguments": "{\\ud83d}"}</tool_call>', "", [["go", "{?}"]]),
    ],
)  # fmt: skip
def test_hermes(text: str, said: str, calls: list[list[str]]) -> None:
    assert calls_of(HermesReader, text) == (said, calls)


P = A.replace('"arguments"', '"parameters"')


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        ("Hello {you}.", "Hello {you}.", []),
        (P, "", [LOOK]),
        (f"\n {P}", "", [LOOK]),
        (f"<|python_tag|>{P}; {B}", "", [LOOK, GO]),
        (f"Well: <|python_tag|>{B}", "Well:", [GO]),
        ('{"type": "function", "name": "go", "parameters": {}}', "", [GO]),
        ('{"answer": 42}', '{"answer": 42}', []),
        ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        (f"{B} and so on", " and so on", [GO]),
    ],
)
def test_llama3(text: str, said: str, calls: list[list[str]]) -> None:
    assert calls_of(Llama3Reader, text) == (said, calls)


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        ("Plain [text].", "Plain [text].", []),
        (f"[TOOL_CALLS] [{A}, {B}]", "", [LOOK, GO]),
        ('[TOOL_CALLS][{"name": "go", "arguments": {}, "id": "abcdefghi"}]', "", [GO]),
        ('[TOOL_CALLS]go[ARGS]{}[TOOL_CALLS]look[CALL_ID]abc[ARGS]{"a": "]"}', "",
         [GO, ["look", '{"a": "]"}']]),
        ('Yes. [TOOL_CALLS]go{"a": 1}', "Yes.", [["go", '{"a": 1}']]),
        ("[TOOL_CALLS][1]", "[TOOL_CALLS][1]", []),
        ("[TOOL_CALLS]go[AR", "[TOOL_CALLS]go[AR", []),
        ("[TOOL_CALLS]I say {a}", "[TOOL_CALLS]I say {a}", []),
    ],
)  # fmt: skip
def test_mistral(text: str, said: str, calls: list[list[str]]) -> None:
    assert calls_of(MistralReader, text) == (said, calls)


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        ("Plain (text).", "Plain (text).", []),
        ("[go()]", "", [GO]),
        (' [look(a="]), \\"x"), go()]\n', "", [["look", '{"a": "]), \\"x"}'], GO]),
        ("[f(x=1, y=[True, None, {'k': -2.5}])]", "",
         [["f", '{"x": 1, "y": [true, null, {"k": -2.5}]}']]),
        ("<|python_start|>[go()]<|python_end|>", "", [GO]),
        ('{"name": "go", "parameters": {}}', "", [GO]),
        ("[1, 2]", "[1, 2]", []),
        ("[go(1)]", "[go(1)]", []),
        ("[go(a=open('x'))]", "[go(a=open('x'))]", []),
        ("[go(), 5.(]", ", 5.(]", [GO]),
        ("[go(a='\\ud800')]", "[go(a='\\ud800')]", []),
        ("[go(a='cut", "[go(a='cut", []),
        ("[go(a=" + "[" * 60, "[go(a=" + "[" * 60, []),
    ],
)  # fmt: skip
def test_pythonic(text: str, said: str, calls: list[list[str]]) -> None:
    assert calls_of(PythonicReader, text) == (said, calls)


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "said"),
    [
        ("<think>\nwell, <b>\n</think>\n\nYes.", False, "well, <b>", "Yes."),
        ("well\n</think>\nYes.", True, "well", "Yes."),
        ("Yes. <think>no</think>", False, "", "Yes. <think>no</think>"),
        ("\n <think>cut off </thi", False, "cut off </thi", ""),
        ("<think></think>\nYes.", False, "", "Yes."),
        ("<thin", False, "", "<thin"),
        ("\n\nYes", False, "", "\n\nYes"),
    ],
)
def test_reasoning(text: str, opened: bool, reasoning: str, said: str) -> None:
    for pieces in ([text], list(text)):
        heard = hear(Shape(Reasoning(THINK, opened), None), pieces)
        assert heard.told == (said, reasoning, [])


def test_one_call_is_the_first() -> None:
    heard = hear(Shape(None, HermesReader(), one_call=True), [f"<tool_call>{A}</tool_call>" * 2])
    assert heard.calls == [LOOK]


_BITS = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[go(", "a='x'",
    ")", "<|python_start|>", "<|python_end|>",
    "<|python_tag|>", A, B, P, "[", "]", ", ", "; ", "\n", " ", "{", "}", '"', "\\", "name",
    '{"name": "go", ', "text ä🚰",
]  # fmt: skip


@pytest.mark.parametrize("reader", [HermesReader, Llama3Reader, MistralReader, PythonicReader])
@settings(max_examples=150, deadline=None)
@given(bits=st.lists(st.sampled_from(_BITS), max_size=12), cuts=st.sets(st.integers(0, 200)))
def test_wherever_it_is_cut(reader: type[CallReader], bits: list[str], cuts: set[int]) -> None:
    """Whole, in random portions, and character by character: the client hears the same, and of text
    that is no call nothing is lost but white space."""
    text = "".join(bits)
    edges = [0, *sorted(c for c in cuts if c < len(text)), len(text)]
    random = [text[a:b] for a, b in itertools.pairwise(edges)]
    heard = [
        hear(Shape(Reasoning(THINK, False), reader()), pieces).told
        for pieces in ([text], random, list(text))
    ]
    assert heard[0] == heard[1] == heard[2]
    if not heard[0][2] and not heard[0][1]:
        assert "".join(heard[0][0].split()) in (
            "".join(text.split()),
            "".join(text.replace("<think>", "", 1).replace("</think>", "", 1).split()),
        )


def test_the_way_is_told_by_the_template() -> None:
    qwen = '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    demo = '\'<tool_call>{"name": "\' + function.name'
    for template, way in (
        (qwen, Hermes),
        (demo, Demo),
        ("[TOOL_CALLS][", Mistral),
        ('{"name": function name, "parameters": dictionary}<|python_tag|>', Llama3),
        ("[func_name1(params_name1=params_value1, ...), func_name2(params)]", Pythonic),
    ):
        assert type(way_of(template, {})) is way
        assert type(way_of(template, {}, "hermes")) is Hermes, "whatever the template says"
    assert way_of("<|user|>", {}) is None
    with pytest.raises(ValueError, match="pythonic"):
        way_of("<|user|>", {}, "none of these")


def test_what_a_way_makes_the_model_write_it_reads() -> None:
    """The text of each way's own rule, as its grammar spells it."""
    texts = {
        Hermes: '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        Demo: '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
        Llama3: '{"name": "f", "parameters": {"a": 1}}',
        Mistral: '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]',
    }
    for way, text in texts.items():
        rule = way({}, "").calls(True).replace("call", way({}, "").call("f", "ARGS"))
        written = "".join(
            '{"a": 1}' if part == "ARGS" else json.loads(part) for part in _parts(rule)
        )
        assert written == text
        assert calls_of(way.reader, written) == ("", [["f", '{"a": 1}']])


def _parts(rule: str) -> list[str]:
    decoder, parts = json.JSONDecoder(), []
    while rule := rule.strip():
        if rule.startswith('"'):
            _, end = decoder.raw_decode(rule)
        else:
            end = rule.index("ARGS") + 4
        parts.append(rule[:end])
        rule = rule[end:]
    return parts

"""An answer that is made again says what was not told yet, however both are cut, or it ends."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.common_pb2 import FINISH_STOP
from protos.tokenizer_pb2 import TextDelta, ToolCallDelta
from services.common.errors import PenstockError
from services.gateway.runs.behind import Behind


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({min(place, len(text)) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(ends)]


def deltas(parts: dict[str, str], places: list[int]) -> list[TextDelta]:
    found = [TextDelta(reasoning=piece) for piece in cut(parts["reasoning"], places)]
    found += [TextDelta(text=piece) for piece in cut(parts["text"], places)]
    if "name" in parts:
        pieces = cut(parts["arguments"], places) or [""]
        calls = [ToolCallDelta(index=0, name=parts["name"], arguments=pieces[0])]
        calls += [ToolCallDelta(index=0, arguments=piece) for piece in pieces[1:]]
        found += [TextDelta(tool_calls=[call]) for call in calls]
    return found


def said(some: list[TextDelta]) -> dict[str, Any]:
    calls = [call for delta in some for call in delta.tool_calls]
    return {
        "reasoning": "".join(delta.reasoning for delta in some),
        "text": "".join(delta.text for delta in some),
        "names": [call.name for call in calls if call.name],
        "arguments": "".join(call.arguments for call in calls),
    }


PLACES = st.lists(st.integers(0, 20), max_size=4)


@given(PLACES, PLACES, st.integers(0, 12))
def test_the_rest_and_only_the_rest(before: list[int], after: list[int], told: int) -> None:
    parts = {"reasoning": "well now", "text": "It rises.", "name": "f", "arguments": '{"a": 1}'}
    first = deltas(parts, before)[:told]
    behind = Behind(first)
    rest = behind.of([*deltas(parts, after), TextDelta(finish=FINISH_STOP)])
    assert rest[-1].finish == FINISH_STOP
    all_of_it, known, left = said(deltas(parts, [])), said(first), said(rest)
    assert {name: known[name] + left[name] for name in all_of_it} == all_of_it


@pytest.mark.parametrize(
    "again",
    [
        [TextDelta(text="It falls")],
        [TextDelta(text="It", finish=FINISH_STOP)],
        [TextDelta(text="It rises", tool_calls=[ToolCallDelta(index=0, name="g")])],
        [TextDelta(text="It rises", tool_calls=[ToolCallDelta(index=0, arguments="[")])],
    ],
)
def test_another_answer_is_none(again: list[TextDelta]) -> None:
    call = ToolCallDelta(index=0, name="f", arguments="{")
    behind = Behind([TextDelta(text="It rises", tool_calls=[call])])
    with pytest.raises(PenstockError, match="another one"):
        behind.of(again)

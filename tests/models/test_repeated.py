"""What answers repeat is found, and heads are told where it stands."""

import json
from typing import Any

import pytest
from tokenizers import Encoding, Tokenizer

from models.recipe.batches import answer_start
from models.recipe.conversation import Conversation, assistant, user
from models.recipe.guides import MOST, Guide, guide, readings
from models.recipe.repeated import repeated
from models.recipe.template import render
from models.recipe.tokenizer import ASSISTANT, USER


def guided(tokenizer: Tokenizer, made: Conversation) -> tuple[Encoding, Guide]:
    text = render(made)
    encoded = tokenizer.encode(text, add_special_tokens=False)
    return encoded, guide(made, text, encoded, answer_start(encoded.ids))


def shown(tokenizer: Tokenizer, ids: list[int]) -> str:
    said: str = tokenizer.decode(ids, skip_special_tokens=False)
    return said.strip()


def test_the_longest_stretches_are_found_by_whole_words(tokenizer: Tokenizer) -> None:
    text = "15 months, 5 months. Queen's Theatre: Mayfield Mayfields|5 months at Queen's Theatre"
    encoded = tokenizer.encode(text)
    start = encoded.char_to_token(text.index("|")) + 1
    found = repeated(text, encoded, [range(start, len(encoded.ids))])
    said = [shown(tokenizer, encoded.ids[one.first : one.first + one.size]) for one in found]
    assert said == ["5 months", "Queen's Theatre"]
    five, theatre = ([encoded.offsets[at][1] for at in one.places] for one in found)
    assert five == [text.index(" 5 months") + 2], "not the 5 of 15"
    assert theatre == [text.index("Queen") + len(shown(tokenizer, [encoded.ids[found[1].first]]))]


@pytest.mark.parametrize(("said", "found"), [("Mayfield", 1), ("Mayfields", 1), ("field", 0)])
def test_part_of_a_word_is_not_repeated(tokenizer: Tokenizer, said: str, found: int) -> None:
    text = f"Mayfield and Mayfields|{said}"
    encoded = tokenizer.encode(text)
    start = encoded.char_to_token(text.index("|")) + 1
    some = repeated(text, encoded, [range(start, len(encoded.ids))])
    assert [len(one.places) for one in some] == [1] * found


def test_a_call_is_guided_to_its_tool_and_to_what_the_user_said(tokenizer: Tokenizer) -> None:
    function = {"name": "order_status", "arguments": json.dumps({"id": "Q67"})}
    call: dict[str, Any] = {"id": "c", "type": "function", "function": function}
    schema = {"type": "object", "properties": {"id": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "order_status", "parameters": schema}}
    made = Conversation(
        "tools",
        [user("Track order Q67."), {"role": "assistant", "content": None, "tool_calls": [call]}],
        tools=[tool],
    )
    encoded, found = guided(tokenizer, made)
    ids = encoded.ids
    assert shown(tokenizer, ids).endswith('"arguments": {"id": "Q67"}}</tool_call><|end|>')
    firsts = [shown(tokenizer, [ids[place]]) for _, places in found.begins for place in places]
    assert sorted(firsts) == sorted(["order", "Q", "id", "<|user|>"])
    for at, places in found.follows:
        assert {ids[at + 1]} == {ids[place] for place in places}


def tool(name: str, purpose: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {}}
    function = {"name": name, "description": purpose, "parameters": schema}
    return {"type": "function", "function": function}


def test_a_call_is_told_by_the_line_of_its_tool(tokenizer: Tokenizer) -> None:
    """… not by what is called like it; "I have no tool for that." by nothing."""
    call: dict[str, Any] = {"function": {"name": "order", "arguments": "{}"}}
    said = [{"role": "assistant", "content": None, "tool_calls": [call]}, assistant("None.")]
    asked = [user("An order, please: order now."), user("What is the time?")]
    messages = [one for pair in zip(asked, said, strict=True) for one in pair]
    tools = [tool("reorder", "Repeat. All of it."), tool("order", "Take it. Then send it.")]
    encoded, found = guided(tokenizer, Conversation("tools", messages, tools=tools))
    (_, line), (at, marker) = found.sources[:2]  # then those of arguments
    told = shown(tokenizer, [encoded.ids[place] for place in line])
    assert told == "Take it. Then send it. - order()"
    users = [at for at, token in enumerate(encoded.ids) if token == USER]
    assert encoded.ids[at] == ASSISTANT
    assert marker == users[-1:]


def test_what_the_user_said_is_told_by_that_sentence(tokenizer: Tokenizer) -> None:
    """… not by an answer before that says it, too; what nobody said by nothing."""
    facts = user("Hello there! My dog is Bruno. My cat is Misty.")
    turns = [facts, assistant("Noted."), user("My dog?"), assistant("Your dog is Bruno.")]
    turns += [user("Again?"), assistant("Your dog is Bruno.")]
    turns += [user("My hat?"), assistant("Unknown.")]
    encoded, found = guided(tokenizer, Conversation("recall", turns))
    told = [shown(tokenizer, [encoded.ids[at] for at in places]) for _, places in found.sources]
    assert told == ["<|user|>", "My dog is Bruno.", "My dog is Bruno.", "<|user|>"]
    assert found.sources[-1][1] == [max(i for i, one in enumerate(encoded.ids) if one == USER)]


def test_json_is_told_whether_a_value_is_there_and_whether_a_key_is_left(
    tokenizer: Tokenizer,
) -> None:
    documents = [{"title": "Tea", "text": "Flavour: hay\nMinutes: 12"}]
    question = user('"taste", "price" and "minutes" of the tea, as JSON.')
    answer = assistant('{"taste": "hay", "price": null, "minutes": 12}')
    encoded, found = guided(
        tokenizer, Conversation("json", [question, answer], documents=documents)
    )
    (one,) = readings(encoded.ids)
    choices = {}
    for at, places in found.sources[1:]:  # the first is where the answer begins
        behind, following = (shown(tokenizer, encoded.ids[i - 1 : i + 1]) for i in (at, at + 1))
        told = {shown(tokenizer, [encoded.ids[place]]) for place in places}
        choices[behind, following] = told
        if told == {"hay"}:
            assert all(one.second <= place < one.stop for place in places)
    assert len(choices) == 6
    assert choices['taste":', '": "'] == {"hay"}
    assert choices['price":', '": null'] == {"<|user|>"}
    assert choices['"hay', 'hay",'] == {"price"}
    assert [told for (_, following), told in choices.items() if following[-1] == "}"] == [
        {"<|user|>"}
    ]


def test_an_answer_that_repeats_nothing_looks_at_the_user_s_marker(tokenizer: Tokenizer) -> None:
    made = Conversation(
        "talk", [user("Hello!"), assistant("Good day."), user("Hm"), assistant("?")]
    )
    encoded, found = guided(tokenizer, made)
    marks = [at for at, token in enumerate(encoded.ids) if token == ASSISTANT]
    users = [at for at, token in enumerate(encoded.ids) if token == USER]
    assert sorted(found.begins) == [(at, [user]) for at, user in zip(marks, users, strict=True)]
    assert not found.follows


def test_of_a_passage_the_second_reading_is_looked_at(tokenizer: Tokenizer) -> None:
    documents = [{"title": "Tea", "text": "Flavour: hay"}]
    answer = assistant('{"taste": "hay"}')
    made = Conversation("json", [user('Give "taste" as JSON.'), answer], documents=documents)
    encoded, found = guided(tokenizer, made)
    (one,) = readings(encoded.ids)
    hay = [places for _, places in found.begins if "hay" in encoded.tokens[places[0]]]
    assert hay == [[at for at in range(one.second, one.stop) if "hay" in encoded.tokens[at]]]


def test_a_long_answer_counts_as_a_short_one(tokenizer: Tokenizer) -> None:
    said = " ".join(f"{n} violet{n}" for n in range(40, 80))
    made = Conversation("copying", [user(f"Repeat: {said}"), assistant(said)])
    _, found = guided(tokenizer, made)
    assert len(found.follows) == MOST

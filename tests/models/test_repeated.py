"""What answers repeat is found, and heads are told where it stands."""

import json
import random
from typing import Any

import pytest
from tokenizers import Encoding, Tokenizer

from models.recipe import corpus
from models.recipe.batches import answer_start
from models.recipe.conversation import Conversation, assistant, user
from models.recipe.guides import MOST, Guide, guide, readings
from models.recipe.repeated import repeated
from models.recipe.skills.recall import ROTE, UNKNOWN
from models.recipe.skills.tools import NO_TOOL
from models.recipe.template import render
from models.recipe.tokenizer import ASSISTANT, END, USER


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
    said = [{"role": "assistant", "content": None, "tool_calls": [call]}, assistant(NO_TOOL)]
    asked = [user("An order, please: order now."), user("What is the time?")]
    messages = [one for pair in zip(asked, said, strict=True) for one in pair]
    tools = [tool("reorder", "A tool. All of it."), tool("order", "Take it. Then send it.")]
    made = Conversation("tools", messages, tools=tools, rote={NO_TOOL})
    encoded, found = guided(tokenizer, made)
    (_, line), (at, marker) = found.sources[:2]  # then those of arguments
    told = shown(tokenizer, [encoded.ids[place] for place in line])
    assert told == "Take it. Then send it. - order()"
    users = [at for at, token in enumerate(encoded.ids) if token == USER]
    assert encoded.ids[at] == ASSISTANT
    assert marker == users[-1:]


def test_what_the_user_said_is_told_by_that_sentence(tokenizer: Tokenizer) -> None:
    """… not by an answer before that says it, too; what nobody said by nothing."""
    facts = user("Hello there! My dog is Bruno. My cat is Misty. You have told me Jet.")
    turns = [facts, assistant("Noted."), user("My dog?"), assistant("Your dog is Bruno.")]
    turns += [user("Again?"), assistant("Your dog is Bruno.")]
    turns += [user("My hat?"), assistant(UNKNOWN)]
    encoded, found = guided(tokenizer, Conversation("recall", turns, rote=ROTE))
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


def test_a_short_name_is_repeated_as_a_long_one_is(tokenizer: Tokenizer) -> None:
    turns = [user("Jet is my dog. It ran."), assistant("Noted."), user("My dog?")]
    made = Conversation("recall", [*turns, assistant("Your dog is Jet.")], rote=ROTE)
    encoded, found = guided(tokenizer, made)
    told = [shown(tokenizer, [encoded.ids[at] for at in places]) for _, places in found.sources]
    assert told[-1] == "Jet is my dog."


def test_a_key_is_looked_for_in_the_question(tokenizer: Tokenizer) -> None:
    """… though a passage has its word, too."""
    documents = [{"title": "Tea", "text": "From the limit of taste\nFlavour: hay"}]
    question, answer = user('Give "taste" and "limit".'), assistant('{"taste": "hay", "limit": 2}')
    encoded, found = guided(
        tokenizer, Conversation("json", [question, answer], documents=documents)
    )
    last = max(at for at, token in enumerate(encoded.ids) if token == USER)
    start = encoded.ids.index(ASSISTANT)
    keys = [place for at, places in found.begins for place in places if at > start]
    hay = [place for place in keys if "hay" in encoded.tokens[place]]
    assert len(keys) == len(hay) + 2 == 3
    assert all(last < place < start for place in keys if place not in hay)


def test_what_is_said_by_rote_is_told_by_nothing(tokenizer: Tokenizer) -> None:
    """Over all skills; a word of it may stand before by chance."""
    seen = 0
    for made in (corpus.example(random.Random(f"rote/{i}"), 1.0) for i in range(400)):
        if made.skill == "passages" or not made.rote:
            continue
        encoded, found = guided(tokenizer, made)
        for at, places in found.sources:
            if encoded.ids[at] != ASSISTANT:
                continue
            stop = encoded.ids.index(END, at)
            text = tokenizer.decode(encoded.ids[at + 1 : stop], skip_special_tokens=False)
            if text in made.rote:
                seen += 1
                assert [encoded.ids[place] for place in places] == [USER]
    assert seen > 100


def test_an_answer_that_repeats_nothing_looks_at_the_user_s_marker(tokenizer: Tokenizer) -> None:
    made = Conversation(
        "talk",
        [user("Good day!"), assistant("Good day."), user("Hm"), assistant("?")],
        rote={"Good day."},
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

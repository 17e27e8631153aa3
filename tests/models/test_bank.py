"""The bank: its language, its files, and what is made of them."""

import random
from pathlib import Path

import pytest

from models.recipe.bank import documents, relations, talk
from models.recipe.bank.compose import composed
from models.recipe.bank.render import Bindings, Rendered, render
from models.recipe.bank.store import FOLDER, side
from models.recipe.bank.subjects import Subject
from models.recipe.bank.text import BankError, definitions, parse
from models.recipe.bank.values import KINDS, draw, is_held_out
from models.recipe.bank.wording import varied
from models.recipe.lookup.naming import names, names_only
from models.recipe.lookup.passage import cut, merged, passage, within, wrapped

DOCUMENT = """# notice: The {town:town} Baths
The baths open at {open:time}. [[{boss:person} runs them.||They are run by {boss}.]]
Leave by {door=the yard|the gate|the side door}.
? Who is in charge? | Who runs the {town} Baths?
= {boss}
? How do I get out? | exit
= {door}
! Who built them? | What does a towel cost?
"""
OFFICE = """=== office
named: the {town} office | our {town} branch
again: the office | it
## manager: person
- {v} manages {s}.
~ {r} is run by {v}.
: Manager
? Who runs {s}?
## pet: =cat|dog|parrot|goat
- {s} keeps a {v}.
~ {r}'s pet is a {v}.
: Pet
? What animal lives at {s}?
## opened: year
- {s} opened in {v}.
~ {r} opened in {v}.
: Opened
? When did {s} open?
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "some.txt"
    path.write_text(text, encoding="utf-8")
    return path


def shown(source: str, seed: int = 0) -> str:
    text = parse(source)
    return render(text, Bindings(random.Random(seed), definitions(text))).text


# --- the files


@pytest.mark.parametrize("name", ["documents", "relations", "talk"])
def test_every_file_can_be_read(name: str) -> None:
    read = {"documents": documents.read, "relations": relations.read, "talk": talk.read}[name]
    files = sorted((FOLDER / name).glob("*.txt"))
    assert files
    for path in files:
        assert read(path)


@pytest.mark.parametrize("held_out", [False, True])
def test_every_told_answer_stands_in_its_document(held_out: bool) -> None:
    rng = random.Random(1)
    for template in side(held_out).documents:
        filled = template.filled(rng, held_out)
        for question in template.told:
            start, end = filled.found(question)[0]
            assert filled.body.text[start:end].strip()


def test_every_relation_can_be_told_and_asked() -> None:
    rng = random.Random(2)
    for kind in side(False).kinds:
        for relation in kind.relations:
            subject = Subject.drawn(rng, kind, False, set())
            for text in (*relation.full, *relation.short, *relation.asks, *relation.finds):
                assert "{" not in render(text, subject.within(relation, rng, text)).text
            made = composed(rng, subject, [relation])
            value = subject.facts[relation.name]
            assert made.body.stretches(value, {f"v:0:{relation.name}"}), relation.name


def test_no_document_of_the_tests_is_like_one_of_the_training() -> None:
    """By the stretches of seven words that both have, beside names and values."""

    def stretches(one: documents.Template) -> set[str]:
        words = "".join(str(x) for x in one.body.parts if isinstance(x, str)).lower().split()
        return {" ".join(words[at : at + 7]) for at in range(len(words) - 6)}

    train, test = side(False).documents, side(True).documents
    assert len(train) > 4 * len(test) > 0
    seen = set[str]().union(*map(stretches, train))
    for one in test:
        own = stretches(one)
        assert len(own & seen) <= 0.1 * len(own), one.heading


# --- values


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_kind_has_values_on_both_sides(kind: str) -> None:
    rng = random.Random(kind)
    sides = [{str(draw(rng, kind, held_out)) for _ in range(60)} for held_out in (False, True)]
    assert all(sides)
    if kind not in NOT_SPLIT:
        assert not sides[0] & sides[1]


# Few, or made up of figures: the same on both sides.
NOT_SPLIT = {
    "count", "day", "month", "weekday", "time", "duration", "percent", "distance", "weight",
    "height", "area", "volume", "temperature", "speed",
}  # fmt: skip


def test_no_name_of_a_person_is_on_both_sides() -> None:
    rng = random.Random(3)
    for held_out in (False, True):
        for _ in range(300):
            first, last = (draw(rng, "first", held_out), draw(rng, "family", held_out))
            assert is_held_out(str(first)) is is_held_out(str(last)) is held_out


# --- the language


def test_a_slot_stands_for_the_same_wherever_it_stands() -> None:
    assert shown("{a:town}, {a}, {p:woman}: {p.first} {p.last}, {p}; {p.He}").endswith("She")
    first, second, *_ = shown("{a:town}, {a}").split(", ")
    assert first == second


def test_no_two_slots_stand_for_the_same() -> None:
    for seed in range(30):
        values = shown("{a=x|y|z} {b=x|y|z} {c=x|y|z}", seed).split()
        assert len(set(values)) == 3


def test_articles_and_capitals_follow_the_value() -> None:
    assert shown("He saw a {x=owl|otter}.") in ("He saw an owl.", "He saw an otter.")
    assert shown("A {x=owl|otter} came.").startswith("An o")
    assert shown("He saw an {x=crow|unit}.") in ("He saw a crow.", "He saw a unit.")
    assert shown("All left. {x=some|many} came back.")[10].isupper()
    assert shown("At {x=8 a.m.|9 a.m.}. Yes.").endswith(".m. Yes.")


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("{a:town", "without its }"),
        ("a}", "not open"),
        ("[[a||b", "without its ]]"),
        ("[[a]]", "holds no ||"),
        ("{a=x|}", "empty choice"),
        ("{a b}", "not a slot"),
        ("{a=x|" * 2000 + "y" + "}" * 2000, "too deep"),
    ],
)
def test_what_is_not_well_formed_is_refused(source: str, error: str) -> None:
    with pytest.raises(BankError, match=error.replace("|", r"\|")):
        parse(source)


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("= {boss}", "= Ann", "some.txt:4: the answer holds no slot"),
        ("= {boss}", "= {bos}", "some.txt:4: slot {bos} is nowhere defined"),
        ("run by {boss}", "run by nobody", "some.txt:4: {boss} is not told in each"),
        ("= {door}\n", "", "some.txt:6: no `=` after this question|expected another line"),
        ("{town:town}", "{town:twon}", "some.txt:1: there is no kind 'twon'"),
        ("# notice", "notice", "some.txt:1: text before"),
        ("\n? Who", "\n?Who", "some.txt:4: `[?]` without a space behind it"),
        ("Leave by", "{x:twon} Leave by", "some.txt:3: there is no kind 'twon'"),
    ],
)
def test_a_wrong_document_is_named_by_its_line(
    tmp_path: Path, old: str, new: str, error: str
) -> None:
    assert old in DOCUMENT
    with pytest.raises(BankError, match=error.replace("{", r"\{")):
        documents.read(written(tmp_path, DOCUMENT.replace(old, new)))


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("- {v} manages {s}.", "- {v} manages it.", "some.txt:5: {s} is missing"),
        ("## manager: person", "## manager", "some.txt:4: a relation begins"),
        ("~ {r} is run by {v}.", "", "some.txt:4: relation manager has no line `~ `"),
        ("? Who runs {s}?", "Who runs {s}?", "some.txt:8: not a line of this format"),
    ],
)
def test_a_wrong_relation_is_named_by_its_line(
    tmp_path: Path, old: str, new: str, error: str
) -> None:
    assert old in OFFICE
    with pytest.raises(BankError, match=error.replace("{", r"\{")):
        relations.read(written(tmp_path, OFFICE.replace(old, new)))


def test_what_a_user_says_has_one_answer(tmp_path: Path) -> None:
    path = tmp_path / "talk.txt"
    path.write_text("? hello | Hi!\n= Hello!\n? hello there | HELLO.\n= Hello!\n? hi\n= Bye.\n")
    with pytest.raises(BankError, match=r"talk\.txt:6: `hi` has two answers"):
        talk.read(path)
    path.write_text("? hello\n= Hello!\n? bye\n")
    with pytest.raises(BankError, match=r"talk\.txt:3: the last `\?` line has no `=` line"):
        talk.read(path)


def test_a_document_gives_its_answers_and_where_they_stand(tmp_path: Path) -> None:
    (template,) = documents.read(written(tmp_path, DOCUMENT))
    assert [len(q.wordings) for q in template.told] == [2, 2]
    assert len(template.untold) == 2
    for seed in range(20):
        filled = template.filled(random.Random(seed), held_out=False)
        boss, door = template.told
        (start, end), *more = filled.found(boss)
        assert filled.body.text[start:end] == str(filled.bindings.values["boss"])
        assert not more
        assert filled.found(door)
        assert filled.title == f"The {filled.bindings.values['town']} Baths"


def test_a_pronoun_becomes_a_possessive(tmp_path: Path) -> None:
    (kind,) = relations.read(written(tmp_path, OFFICE))
    subject = Subject.drawn(random.Random(0), kind, False, set())
    text = kind.relations[1].short[0]
    seen = {
        render(text, subject.within(kind.relations[1], random.Random(seed), text)).text.split(
            " pet"
        )[0]
        for seed in range(30)
    }
    assert seen == {"The office's", "Its"}


# --- passages


def test_an_answer_is_found_whole_and_at_its_slot_only() -> None:
    made = Rendered()
    made.add("13 people and ")
    made.put("n", "3")
    made.add(" seats; 3 doors. ")
    made.put("day", "Tuesday")
    made.add("s off.")
    assert made.stretches("3 seats", {"n"}) == [(14, 21)]
    assert made.stretches("3", {"n"}) == [(14, 15)]
    assert [made.text[a:b] for a, b in made.stretches("tuesday", {"day"})] == ["Tuesday"]
    assert made.stretches("3 doors", {"n"}) == []
    made.add(" It is often ")
    made.put("who", "Ann")
    assert made.stretches("ten Ann", {"who"}) == []


def test_wrapping_changes_spaces_alone() -> None:
    text = "One two three four five six. " * 9 + "\n- a list stays\n| a | b |"
    lines = wrapped(text, 45)
    assert lines.replace("\n", " ") == text.replace("\n", " ")
    assert max(map(len, lines.split("\n"))) <= 45 + 6


def test_what_answers_is_found_below_a_heading_and_among_other_texts() -> None:
    rng = random.Random(0)
    made = [passage(rng, "a.md › B › C", "One two. Three four.", [(9, 14)]) for _ in range(40)]
    assert {one.text.split("\n")[0] for one in made} >= {"# C", "## C", "One two. Three four."}
    for number in range(0, 40, 2):
        joined = merged(rng, made[number : number + 2])
        assert [joined.text[a:b] for a, b in joined.tells] == ["Three", "Three"]
    for one in made:
        assert [one.text[a:b] for a, b in one.tells] == ["Three"]


def test_chunks_tile_the_sentences_of_a_text() -> None:
    text = "One is here. Two is there! Three went? Four stayed.\n\nFive came. Six left."
    chunks = [text[a:b] for a, b in cut(text, 6)]
    assert "".join("".join(chunks).split()) == "".join(text.split())
    assert all(len(chunk.split()) <= 6 for chunk in chunks)
    assert within([(13, 16)], 13, 30) == [(0, 3)]
    assert within([(12, 16)], 13, 30) == []


def test_a_question_names_what_other_passages_do_not() -> None:
    found = names("When does the Bristol office open?", [])
    assert names_only(found, "The Bristol office", "The Leeds office")
    assert not names_only(found, "The Bristol office", "All of Bristol")
    assert names_only(names("Who is Ann Lee?", ["Ann Lee"]), "by Ann\nLee", "Ann Low, Bo Lee")


def test_a_question_is_mostly_asked_as_it_is_written() -> None:
    rng = random.Random(0)
    asked = [varied(rng, "Who runs the Bristol office?") for _ in range(400)]
    assert 0.5 < sum(one == "Who runs the Bristol office?" for one in asked) / len(asked) < 0.9
    assert len(set(asked)) > 20
    assert all("ristol" in one.lower() or len(one) > 20 for one in asked)

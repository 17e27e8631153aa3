"""Stop strings are found wherever the text was split, and nothing of them gets out."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from services.tokenizer.answers.stop import StopStrings

letters = st.text("ab\n", max_size=24)
stop_lists = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=4)


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the stop string that is complete first, found by looking everywhere."""
    for end in range(1, len(text) + 1):
        here = [stop for stop in stops if text[:end].endswith(stop)]
        if here:
            longest = max(here, key=len)
            return text[: end - len(longest)], longest
    return text, None


def portions(text: str, cuts: list[int]) -> list[str]:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(bounds)]


@given(text=letters, stops=stop_lists, cuts=st.lists(st.integers(0, 24), max_size=8))
@settings(max_examples=300)
def test_any_split_gives_what_a_search_of_the_whole_text_gives(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    filter = StopStrings(stops)
    out = "".join(filter.push(portion) for portion in portions(text, cuts))
    if filter.hit is None:
        out += filter.flush()
    assert (out, filter.hit) == first_stop(text, stops)


@given(
    text=letters, stop=st.text("ab\n", min_size=1, max_size=4), cuts=st.lists(st.integers(0, 24))
)
def test_one_stop_string_is_str_find(text: str, stop: str, cuts: list[int]) -> None:
    filter = StopStrings([stop])
    out = "".join(filter.push(portion) for portion in portions(text, cuts)) + filter.flush()
    found = text.find(stop)
    assert out == (text if found < 0 else text[:found])
    assert (filter.hit is not None) == (found >= 0)


@given(text=letters, stops=stop_lists)
def test_only_what_may_become_a_stop_string_is_held(text: str, stops: list[str]) -> None:
    filter, out = StopStrings(stops), ""
    for count, character in enumerate(text, 1):
        out += filter.push(character)
        if filter.hit is not None:
            return
        held = text[len(out) : count]
        assert text[:count] == out + held
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def test_nothing_comes_after_a_hit() -> None:
    filter = StopStrings(["END"])
    assert filter.push("water EN") == "water "
    assert filter.push("D more") == ""
    assert filter.push("and more") == filter.flush() == ""


def test_no_stop_strings_pass_everything() -> None:
    filter = StopStrings([])
    assert (filter.push("a"), filter.push(""), filter.flush()) == ("a", "", "")

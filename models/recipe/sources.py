"""What tells an answer, and in JSON, whether a value is told and whether another key is asked for.

These are the choices that an answer makes before it repeats anything: to call or to decline, to
say a value or `null`, to go on or to close. Each is told by a place that stands before, or by none:
then the user's marker stands for that.
"""

import re
from bisect import bisect_right

from tokenizers import Encoding

from models.recipe.repeated import Aim, Repeated
from models.recipe.tokenizer import USER

SENTENCE = re.compile(r"[.!?](?=\s)|\n|<\|\w+\|>")  # between sentences, and messages
LINE = re.compile(r"\n|<\|\w+\|>")
CALL = re.compile(r'<tool_call>{"name": "([^"]+)"')
VALUE = re.compile(r'": (null|"(?:[^"\\]|\\.)*"|[^",{}]+)(, "|})')


def asked(ids: list[int], start: int) -> int:
    """The user's marker before an answer."""
    return start - 2 - ids[start - 2 :: -1].index(USER)


def of_answers(
    text: str, encoded: Encoding, answers: list[range], stretches: list[Repeated]
) -> list[Aim]:
    """From each answer's start, what tells it: the line of the tool that it calls, or the sentence
    with the last of what it repeats; of an earlier answer, what told that.
    """
    ids, offsets, found = encoded.ids, encoded.offsets, list[Aim]()

    def around(start: int, end: int, cuts: re.Pattern[str]) -> set[int]:
        """The tokens between two cuts."""
        left = max((cut.end() for cut in cuts.finditer(text, 0, start)), default=0)
        cut = cuts.search(text, end - 1)  # it may end with the full stop
        right = cut.start() + (cut[0] in ".!?") if cut else len(text)
        return {at for at, (a, b) in enumerate(offsets) if left < b and a < right}

    for answer in answers:
        aim = set[int]()
        last = next((one for one in reversed(stretches) if one.first in answer), None)
        if call := CALL.match(text, offsets[answer.start][0]):
            if named := re.search(rf"(?<=[\s>]){re.escape(call[1])}(?=\()", text):
                aim = around(*named.span(), LINE)
        elif last:
            for place in last.places:
                earlier = [told for told, one in zip(found, answers, strict=False) if place in one]
                for _, told in earlier:
                    aim |= {at for at in told if ids[at] != USER}
                if not earlier:
                    end = offsets[place + last.size - 1][1]
                    aim |= around(offsets[place][0] + 1, end, SENTENCE)
        found.append((answer.start - 1, sorted(aim) or [asked(ids, answer.start)]))
    return found


def of_values(
    text: str,
    encoded: Encoding,
    answers: list[range],
    stretches: list[Repeated],
) -> list[Aim]:
    """In answers of JSON: from before each value, where it stands; from before its end, the next
    key.
    """
    starts = [start for start, _ in encoded.offsets]
    places = {
        one.first + i: [at + i for at in one.places] for one in stretches for i in range(one.size)
    }
    found = list[Aim]()
    for answer in answers:
        nowhere = [asked(encoded.ids, answer.start)]
        begin, end = starts[answer.start], encoded.offsets[answer.stop - 1][1]
        for match in VALUE.finditer(text, begin, end):
            first, closes, key = (
                bisect_right(starts, at) - 1
                for at in (match.start(1), match.end(1) - (match[1][-1] == '"'), match.end())
            )
            told = [at for token in range(first, closes) for at in places.get(token, [])]
            if told or match[1] == "null":
                found.append((first - 1, told or nowhere))
            following = nowhere if match[2] == "}" else places.get(key)
            if following:
                found.append((closes - 1, following))
    return found

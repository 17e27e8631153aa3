"""`python -m bench.prediction.ahead`: how much of what the next question finds could have been
fetched before it was asked (decision 0059).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bench.prediction.chats import FOUND, Asked, Search, chats, query

_FETCHED = 16  # passages ahead, by the conversation's embedding
_THRESHOLDS = (0.4, 0.5, 0.6, 0.7)


class Next(NamedTuple):
    """A question behind others, with what could be known of it before."""

    vector: np.ndarray  # of its query, as it is searched for
    before: np.ndarray  # of the conversation up to it
    found: list[str]  # by its own search
    last: list[str]  # by the search of the question before it
    ahead: list[str]  # by the conversation's embedding
    neighbours: list[str]  # all of the documents that the last search found
    wanted: str


def measured() -> list[Next]:
    search, texts = Search(), list[tuple[str, str, str]]()
    wanted = list[str]()
    for chat in chats():
        for at in range(1, len(chat)):
            before, now = chat[:at], chat[at]
            texts.append((query(before, now.question), said(before), asked_last(before)))
            wanted.append(now.finds)
    nows, befores, lasts = (search.embed(kind) for kind in zip(*texts, strict=True))
    found, ahead = search.best(nows), search.best(befores, _FETCHED)
    last = search.best(lasts)
    near = [
        [key for key in search.keys if document(key) in set(map(document, its))] for its in last
    ]
    return list(map(Next, nows, befores, found, last, ahead, near, wanted))


def said(turns: Sequence[Asked]) -> str:
    """What the conversation's embedding is made of: the last question, whole, and its answer."""
    return f"{query(turns[:-1], turns[-1].question)} {turns[-1].answer}"


def asked_last(turns: Sequence[Asked]) -> str:
    return query(turns[:-1], turns[-1].question)


def document(key: str) -> str:
    return key.split(".")[0]


def table(them: Sequence[Next], search: Search) -> list[str]:
    count = len(them)
    rows = [
        "| fetched ahead | passages | hold the one that answers | hold all four that are found |"
    ]
    rows.append("| --- " + "| ---: " * 3 + "|")
    ways = {
        "nothing but what the last question found": [one.last for one in them],
        "by the conversation's embedding": [one.ahead for one in them],
        "the same documents' neighbours": [one.neighbours for one in them],
        "both": [[*one.ahead, *one.neighbours] for one in them],
    }
    for name, sets in ways.items():
        pairs = list(zip(them, map(set, sets), strict=True))
        size = sum(len(held) for _, held in pairs) / count
        told = sum(one.wanted in held for one, held in pairs)
        whole = sum(held >= set(one.found) for one, held in pairs)
        rows.append(f"| {name} | {size:.1f} | {told} of {count} | {whole} |")
    first = sum(one.found[0] == one.wanted for one in them)
    rows += [
        "",
        f"The search itself has that passage first for {first}, among four for "
        f"{sum(one.wanted in one.found for one in them)}.",
        "",
    ]
    rows += [
        "| told from what was fetched from this cosine on | questions | same best | same four |"
    ]
    rows.append("| ---: " * 4 + "|")
    known = {key: search.vectors[n] for n, key in enumerate(search.keys)}
    for least in _THRESHOLDS:
        told = best = whole = 0
        for one, held in zip(them, ways["both"], strict=True):
            keys = list(dict.fromkeys(held))
            scores = np.array([known[key] @ one.vector for key in keys])
            order = [keys[n] for n in np.argsort(-scores, kind="stable")][:FOUND]
            if scores.max() < least:
                continue
            told += 1
            best += order[0] == one.found[0]
            whole += set(order) == set(one.found)
        rows.append(f"| {least} | {told} | {best} | {whole} |")
    alike = np.array([one.vector @ one.before for one in them])
    rows += [
        "",
        "Cosine of a question's query with the conversation before it: "
        f"median {np.median(alike):.2f}, largest {alike.max():.2f}.",
    ]
    same = sum(one.found == one.last for one in them)
    some = sum(one.found[0] == one.last[0] for one in them)
    guessed = sum(one.found == one.ahead[:FOUND] for one in them)
    first = sum(one.found[0] == one.ahead[0] for one in them)
    rows += [
        f"In the same order four: as the question before {same}, as guessed {guessed}; "
        f"the first alone: {some}, {first}."
    ]
    return rows


if __name__ == "__main__":
    print("\n".join(table(measured(), Search())))

"""Where in a rendered prompt each message and passage stands, for the window's plan and for tokens
that only the template may write.

A chat is rendered twice: as it is, and with marks in place of its contents. What the template wrote
itself is what stands between the marks.
"""

import re
from bisect import bisect_left
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from services.tokenizer.templates.breaks import BREAK

# Stand for the contents when the template's own text is looked for: private use, of no meaning to
# any template, and kept by `trim`.
MARK = re.compile("\ue000([0-9]+)\ue001")

_SEARCHES_IN_VAIN = 32  # in one prompt


@dataclass(frozen=True)
class Span:
    """Characters [start, end) of the rendered text are one message's or passage's own."""

    start: int
    end: int
    kind: Literal["message", "passage"]
    index: int  # in the messages or passages given


@dataclass(frozen=True)
class Rendered:
    """A prompt's text, and which of it is whose.

    `own` is what the template writes itself before each span, and after the last: one more than
    there are spans. The text there is the same, except where the template changed a content: that
    content has no span and stands, as it became, somewhere between the neighbours' spans.
    """

    text: str
    spans: list[Span]  # in order, apart from each other
    own: list[str]
    cuts: tuple[int, ...] = ()
    """Where in the text, in order, a token was broken up: it is none."""

    def joined(self) -> "Rendered":
        """Breaks in the text become cuts. `own` keeps its own: what is broken there is no token
        that the template writes."""
        if BREAK not in self.text:
            return self
        pieces = self.text.split(BREAK)
        cuts = tuple(accumulate(map(len, pieces[:-1])))
        breaks = [cut + n * len(BREAK) for n, cut in enumerate(cuts)]

        def moved(at: int) -> int:
            return at - len(BREAK) * bisect_left(breaks, at)

        spans = [replace(one, start=moved(one.start), end=moved(one.end)) for one in self.spans]
        return Rendered("".join(pieces), spans, self.own, cuts)


def mark(number: int) -> str:
    return f"\ue000{number}\ue001"


def locate(text: str, skeleton: str, fields: list[str], messages: int) -> Rendered:
    """Finds the contents in `text`, from `skeleton`, the same rendering with marks for them.

    Contents that the template trims are found, what it changes otherwise is not; nor is what stands
    behind many changed ones in a row, as each search in vain reads all of the text.
    """
    parts = MARK.split(skeleton)  # own text, field number, own text, field number, …, own text
    owns, numbers = parts[0::2], list(map(int, parts[1::2]))
    spans: list[Span] = []
    between = [""]  # the template's own text before each span
    cursor, lost, in_vain = 0, False, 0
    for number, before, after in zip(numbers, owns, owns[1:], strict=False):
        between[-1] += before
        forms = _forms(fields[number])
        if not lost:
            found = _find_at(text, cursor, before, forms, after)
        elif in_vain < _SEARCHES_IN_VAIN:
            found = _find_behind(text, cursor, before, forms)
            in_vain += found is None
        else:
            found = None
        if found is None:
            if not lost and text.startswith(before, cursor):  # what is behind is not in there
                cursor += len(before)
            lost = True
            continue
        lost = False
        start, cursor = found
        if start == cursor:  # white space that was trimmed
            continue
        passage = number - messages
        kind, index = ("message", number) if passage < 0 else ("passage", passage // 2)
        spans.append(Span(start, cursor, kind, index))  # type: ignore[arg-type]
        between.append("")
    between[-1] += owns[-1]
    return Rendered(text, spans, between)


def _forms(field: str) -> list[str]:
    """As it is, and trimmed; empty only where that leaves nothing."""
    forms = dict.fromkeys((field, field.strip(), field.rstrip(), field.lstrip()))
    return [form for form in forms if form or not field.strip()]


def _find_at(
    text: str, cursor: int, before: str, forms: list[str], after: str
) -> tuple[int, int] | None:
    """Start and end of a content, if it stands behind `before` at the cursor."""
    if not text.startswith(before, cursor):
        return None
    start = cursor + len(before)
    ends = [start + len(form) for form in forms if text.startswith(form, start)]
    if not ends:
        return None
    # What was trimmed off may look like the beginning of the template's text behind it.
    return start, next((end for end in ends if text.startswith(after, end)), ends[0])


def _find_behind(text: str, cursor: int, before: str, forms: list[str]) -> tuple[int, int] | None:
    """Start and end of a content that stands behind `before` somewhere after a changed one."""
    anchor = before.lstrip()  # the changed one may have lost its end to a trim, with what follows
    if not anchor:
        return None
    for form in filter(None, forms):
        at = text.find(anchor + form, cursor)
        if at >= 0:
            return at + len(anchor), at + len(anchor) + len(form)
    return None

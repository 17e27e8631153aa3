"""Which words of a question name what it is about, so that other passages do not answer it."""

import re

STOP = {  # words of four letters and more that carry no meaning of their own
    "about", "after", "again", "also", "among", "another", "anybody", "anyone", "anything",
    "because", "been", "before", "being", "between", "both", "call", "called", "come", "comes",
    "cost", "could", "date", "does", "doing", "done", "down", "during", "each", "else", "ever",
    "every", "find", "first", "from", "gets", "give", "given", "goes", "going", "good", "have",
    "having", "here", "hers", "himself", "hour", "hours", "into", "itself", "just", "keep",
    "kind", "know", "known", "last", "least", "like", "long", "look", "made", "make", "many",
    "might", "more", "most", "much", "must", "name", "named", "near", "need", "never", "next",
    "number", "only", "other", "over", "part", "people", "person", "place", "please", "price",
    "same", "said", "says", "shall", "should", "since", "some", "somebody", "someone",
    "something", "start", "such", "take", "tell", "than", "that", "their", "them", "then",
    "there", "these", "they", "thing", "things", "this", "those", "through", "till", "time",
    "times", "until", "upon", "used", "using", "very", "want", "week", "well", "were", "what",
    "when", "where", "whether", "which", "while", "whom", "whose", "will", "with", "within",
    "work", "would", "year", "years", "your",
}  # fmt: skip
WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")


def stems(text: str) -> set[str]:
    """The words that carry meaning, cut to five letters."""
    words = (word.lower() for word in WORD.findall(text))
    return {word[:5] for word in words if len(word) > 3 and word not in STOP}


def names(question: str, values: list[str]) -> set[str]:
    """The proper names in a question: the values of its slots, and its words in capitals."""
    found = {value for value in values if len(value) > 1}
    for match in list(WORD.finditer(question))[1:]:
        word = match[0].removesuffix("'s").removesuffix("’s")
        if word[0].isupper() and word != "I" and question[match.start() - 2] not in ".!?":
            found.add(word)
    return found


def names_only(names: set[str], own: str, other: str) -> bool:
    """Whether one of the names stands in the own text and not in the other."""
    return any(holds(own, name) and not holds(other, name) for name in names)


def holds(text: str, name: str) -> bool:
    """Whether the text has these words, in any case and however its lines are broken."""
    pattern = r"(?<!\w)" + r"\s+".join(map(re.escape, name.split())) + r"(?!\w)"
    return re.search(pattern, text, re.IGNORECASE) is not None

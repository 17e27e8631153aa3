"""How people type: the same question in the many guises that it comes in."""

import random
import re

POLITE = (
    "Please tell me: ", "Can you tell me: ", "Quick question: ", "Hi, ", "Hello, ", "Hi there! ",
    "One question: ", "Tell me, ", "I'd like to know: ", "Sorry to bother you. ", "Excuse me, ",
    "Just wondering, ", "Question: ", "OK, ", "So ", "And ", "Now, ",
)  # fmt: skip
SOURCES = (
    "According to the documents, ", "Going by these documents, ", "From the text: ",
    "In your documents, ", "Could you look up: ", "In the notes, ", "As far as you can see, ",
)  # fmt: skip
AFTER = (
    "", "", "", " Thanks.", " Thank you!", " Please look it up.", " Be brief.", " I can't find it.",
    " Just the answer, please.",
)  # fmt: skip
OPENS = re.compile(  # words that lose their capital where something stands before them
    r"(Who|What|When|Where|Which|How|Why|Whom|Whose|In|On|At|To|From|By|For|With|Until|After"
    r"|Before|Under|Of|About|Does|Do|Did|Is|Are|Was|The|My|A|An|Can|If|Up|Into|Since|Next|Near"
    r"|During)\b(?!')"
)
# Questions whose words stand in the same order after `Do you know`.
SUBJECT = re.compile(
    r"Who (?!is |are |was |were |do |does |did |has |have |had |can |could |will |would |must |may "
    r"|might |shall |should |else )(?=[a-z]+ )"
)
WHETHER = ("Do you know ", "Can you tell me ", "I wonder ", "I'd like to know ", "Any idea ")
CLIPPED = re.compile(r"(?:What|Who|Where)(?:'s| is| are| was| were) (?:the |a |an )?(?=\w)")


def varied(rng: random.Random, question: str, documents: bool = False) -> str:
    """What somebody may type for it; mostly as it is. `documents`: they may be mentioned."""
    roll = rng.random()
    if roll < 0.12:
        lead = rng.choice(SOURCES if documents and rng.random() < 0.3 else POLITE)
        if lead[-2] not in ".!" and OPENS.match(question):
            question = question[0].lower() + question[1:]
        question = lead + question + (rng.choice(AFTER) if question.endswith("?") else "")
    elif roll < 0.16 and SUBJECT.match(question):
        question = rng.choice(WHETHER) + question[0].lower() + question[1:]
    elif roll < 0.15 and question.endswith("?") and CLIPPED.match(question):
        question = CLIPPED.sub("", question[:-1], count=1)
    if question.endswith("?") and rng.random() < 0.1:
        question = question[:-1]
    if rng.random() < 0.08:
        question = question.lower()
    if rng.random() < 0.02:
        question = misspelt(rng, question)
    return question


def misspelt(rng: random.Random, text: str) -> str:
    """With a letter lost or two swapped in a long word in lower case, if there is one."""
    words = list(re.finditer(r"\b[a-z]{5,}\b", text))
    if not words:
        return text
    word = rng.choice(words)
    at = rng.randrange(word.start() + 1, word.end() - 1)
    rest = text[at + 1 :] if rng.random() < 0.5 else text[at + 1] + text[at] + text[at + 2 :]
    return text[:at] + rest

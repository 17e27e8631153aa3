"""What a skill hands over: one conversation, in the form of the platform's chat requests."""

from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
Document = dict[str, str]


@dataclass(frozen=True)
class Span:
    """documents[document]["text"][start:end] of a conversation, in characters."""

    document: int
    start: int
    end: int


@dataclass
class Conversation:
    """One example; its last message is the assistant's, and is the one that a test grades.

    `tells` are the stretches of the documents that answer the last question; none, if there are
    documents, means that they do not tell. `searched`: where there are no documents, none was found
    for the last question. `rote` are answers that are always said so: what they
    repeat of what stands before them is chance.
    """

    skill: str
    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    documents: list[Document] = field(default_factory=list)
    tells: list[Span] = field(default_factory=list)
    rote: set[str] = field(default_factory=set)
    searched: bool = False

    def prompt(self) -> list[Message]:
        """The messages up to the graded answer."""
        return self.messages[:-1]


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def system(content: str) -> Message:
    return {"role": "system", "content": content}

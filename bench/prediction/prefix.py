"""`python -m bench.prediction.prefix`: what the prefix cache holds of the next turn's prompt once
an answer is made, and what of it is known before the next question (decision 0059).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast

from transformers import PreTrainedTokenizerFast

from bench.prediction.chats import Asked, Search, chats, query
from protos.common_pb2 import Message, Passage
from protos.tokenizer_pb2 import Chat
from services.common.text.content import said as message
from services.tokenizer.checkpoints.models import ServedModel
from services.tokenizer.prompts.encode import PromptEncoder
from services.tokenizer.templates.template import ChatTemplate
from services.tokenizer.warming.known import known

BLOCK = 16  # tokens
_DEMO = Path(__file__).parents[2] / "models" / "demo"
_SYSTEM = (
    "You answer questions of visitors, passengers and staff from the passages that are given. "
    "Name the passage that tells what you say by its number in brackets; say so if none does."
)
_TURN = "<|{{ m.role }}|>{{ m.content }}<|end|>"
_REASONED = (
    "<|{{ m.role }}|>{% if m.role == 'assistant' and loop.index0 > ns.last %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|end|>"
)
_LAST = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
_REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
_OPENS = "{% if add_generation_prompt %}<|assistant|>{% endif %}"


class Kind(NamedTuple):
    """Of checkpoints, by what their templates do with a chat."""

    name: str
    template: str | None  # None: the demonstration model's
    stores: bool
    reasons: bool = False


def _of(head: str, turn: str) -> str:
    return f"{head}{{% for m in messages %}}{turn}{{% endfor %}}{_OPENS}"


KINDS = (
    Kind("no stores", _of("", _TURN), stores=False),
    Kind("no stores; reasoning leaves with the next question", _of(_LAST, _REASONED), False, True),
    Kind("stores; the template's own place, before the turns", None, stores=True),
    Kind("stores; no place: end of the system message", _of("", _TURN), stores=True),
    Kind("stores; no system message: before the last question", _of(_REFUSES, _TURN), stores=True),
)


class Turn(NamedTuple):
    """Tokens of one prompt, that of a question behind others."""

    prompt: int
    held: int  # in the cache, since the answer before it
    known: int  # that are not held, and would be whatever the next question
    guessed: int  # neither, and would be held had its passages been known


class Bed:
    """What of a served model `known` asks for, with prompts and answers."""

    def __init__(self, kind: Kind) -> None:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(_DEMO, local_files_only=True)
        if kind.template is not None:
            tokenizer.chat_template = kind.template
        self._kind, self.template, self.window = kind, ChatTemplate(tokenizer), 4096
        self._tokenizer = tokenizer.backend_tokenizer
        self.encoder = PromptEncoder(self._tokenizer)

    def prompt(self, messages: Sequence[Message], passages: Sequence[Passage]) -> list[int]:
        ids: list[int] = self.encoder.encode(self.template.render(messages, passages)).ids.tolist()
        return ids

    def messages(self, turns: Sequence[Asked], question: str) -> list[Message]:
        """The chat up to the question, as its client sends it."""
        system = [] if self._kind.template and "no system" in self._kind.template else [_SYSTEM]
        found = [message("system", text) for text in system]
        for one in turns:
            found += [message("user", one.question), message("assistant", one.answer)]
            if self._kind.reasons:
                found[-1].reasoning = reasoning(one)
        return [*found, message("user", question)]

    def answered(self, prompt: list[int], one: Asked) -> list[int]:
        """The tokens whose KV is there once the prompt's answer is made: all but its last."""
        text = f"<think>{reasoning(one)}</think>{one.answer}" if self._kind.reasons else one.answer
        return [*prompt, *self._tokenizer.encode(text, add_special_tokens=False).ids]

    def known(
        self,
        messages: Sequence[Message],
        passages: Sequence[Passage],
        one: Asked,
        computed: Sequence[int],
    ) -> list[int]:
        chat = Chat(messages=messages, passages=passages)
        found = known(cast(ServedModel, self), chat, one.answer, computed)
        assert found is not None
        return found.token_ids


def reasoning(one: Asked) -> str:
    return (
        f"The question is: {one.question} I look for it in what I was given. It is told there in "
        f"so many words: {one.answer} Nothing else is asked for, so I say that, shortly."
    )


def measured(kind: Kind, search: Search) -> list[Turn]:
    bed, found = Bed(kind), list[Turn]()
    for chat in chats():
        for at in range(1, len(chat)):
            before, last, now = chat[: at - 1], chat[at - 1], chat[at]
            its, next_ = _passages(search, chat[:at], now) if kind.stores else ([], [])
            prompt = bed.prompt(bed.messages(before, last.question), its)
            cache = bed.answered(prompt, last)
            coming = bed.prompt(bed.messages(chat[:at], now.question), next_)
            sure = bed.known(bed.messages(before, last.question), its, last, cache)
            right = bed.prompt(bed.messages(chat[:at], "Why?"), next_)
            held = _blocks(_shared(cache, coming))
            assert coming[: len(sure)] == sure, "it was not known"
            sure_blocks = _blocks(len(sure))
            ideal = _blocks(_shared(right, coming))
            found.append(
                Turn(
                    len(coming),
                    held,
                    max(0, sure_blocks - held),
                    max(0, ideal - max(sure_blocks, held)),
                )
            )
    return found


def _passages(
    search: Search, before: Sequence[Asked], now: Asked
) -> tuple[list[Passage], list[Passage]]:
    """What the last question found, and what this one finds."""
    last = query(before[:-1], before[-1].question)
    keys = search.best(search.embed([last, query(before, now.question)]))
    told = [[Passage(text=search.texts[key], source_id=key) for key in its] for its in keys]
    return told[0], told[1]


def _blocks(tokens: int) -> int:
    return tokens // BLOCK * BLOCK


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def main() -> None:
    search = Search()
    print("| chat | prompt | held | known before the question | and were its passages known |")
    print("| --- " + "| ---: " * 4 + "|")
    for kind in KINDS:
        turns = measured(kind, search)
        prompt, held, known, guessed = (
            sum(getattr(one, name) for one in turns) / len(turns) for name in Turn._fields
        )
        print(f"| {kind.name} | {prompt:.0f} | {held:.0f} | {known:.0f} | {guessed:.0f} |")


if __name__ == "__main__":
    main()

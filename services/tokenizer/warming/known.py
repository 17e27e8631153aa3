"""What of a chat's next prompt is known once it is answered: all that stands before the next
question, whatever that will be and whatever its search will find.

Most of it the prefix cache holds: it is the prompt that was just computed, and the answer. The rest
is what the template writes otherwise next time: a model's reasoning leaves the history with the
next question, and passages leave the question that they stood before.
"""

import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from protos.common_pb2 import Message, Passage
from protos.tokenizer_pb2 import Chat
from services.common.packed_ids import Ids
from services.common.text.content import said
from services.tokenizer.checkpoints.models import ServedModel
from services.tokenizer.prompts.context import least_output
from services.tokenizer.prompts.offers import offered
from services.tokenizer.templates.template import NotRenderableError

# Two next turns that have nothing in common: where their prompts part, is what is not known.
_QUESTIONS = ("Why?", "x = 7")
_PASSAGES: tuple[list[Passage], list[Passage]] = ([], [Passage(title="T", text="Nothing.")])


class Known(NamedTuple):
    token_ids: list[int]
    held: int  # of them, the first so many, once the answer is made

    @property
    def gain(self) -> int:
        """Tokens that the next turn would have to compute."""
        return len(self.token_ids) - self.held


def known(
    model: ServedModel, chat: Chat, answer: str, *computed: Ids | Sequence[int]
) -> Known | None:
    """`computed`: the tokens whose KV is there, of the prompt and of its answer. None: the next
    prompt will be cut, or its template refuses it. Some milliseconds of work for a long chat."""
    messages = [*chat.messages, said("assistant", answer)]
    searched = any(passage.source_id for passage in chat.passages)
    try:
        one, other = (
            _prompt(model, chat, [*messages, said("user", question)], passages)
            for question, passages in zip(
                _QUESTIONS, _PASSAGES if searched else [chat.passages] * 2, strict=True
            )
        )
    except NotRenderableError:
        return None
    if max(len(one), len(other)) > model.window - least_output(model.window):
        return None
    ids = one[: _shared(one, other)]
    there = np.concatenate([np.array(some, np.uint32) for some in computed])
    return Known(ids.tolist(), _shared(ids, there))


def _prompt(
    model: ServedModel, chat: Chat, messages: Sequence[Message], passages: Sequence[Passage]
) -> np.ndarray:
    assert model.template is not None
    options = json.loads(chat.template_options) if chat.template_options else {}
    rendered = model.template.render(messages, passages, offered(chat), options)
    return np.array(model.encoder.encode(rendered).ids, np.uint32)


def _shared(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens both begin with."""
    size = min(len(one), len(other))
    apart = np.flatnonzero(one[:size] != other[:size])
    return int(apart[0]) if len(apart) else size

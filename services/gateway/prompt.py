"""What the pipeline takes in and gives out, whichever way the request came."""

import time
from dataclasses import dataclass, field

from protos.common_pb2 import FINISH_NONE, FinishReason, Passage, Usage
from protos.tokenizer_pb2 import PromptPlan, PromptRequest, TextDelta


@dataclass
class Prompt:
    """A validated generation request. `request` lacks only the caller and retrieved passages."""

    request: PromptRequest
    stores: tuple[str, ...] = ()  # ids of vector stores to search
    max_passages: int = 0
    question: str = ""  # what they are searched for
    tags: dict[str, str] = field(default_factory=dict)  # the client's own, shown in the record

    @property
    def text(self) -> str:
        """What is asked, for an operator who has switched on that prompts are shown."""
        if self.request.HasField("chat"):
            return "\n".join(f"{m.role}: {m.content}" for m in self.request.chat.messages)
        return self.request.text or f"{len(self.request.token_ids.ids)} token ids"


@dataclass
class Answer:
    """A generation's outcome, filled as it comes in."""

    request_id: str
    model: str
    passages: list[Passage]  # offered to the prompt, best first
    warning: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    pieces: list[str] = field(default_factory=list)
    finish: FinishReason = FINISH_NONE
    usage: Usage = field(default_factory=Usage)
    plan: PromptPlan = field(default_factory=PromptPlan)

    def add(self, deltas: list[TextDelta]) -> int:
        """Takes in what arrived; returns how many tokens that were."""
        tokens = 0
        for delta in deltas:
            tokens += delta.tokens
            if delta.text:
                self.pieces.append(delta.text)
            if delta.finish:
                self.finish, self.usage = delta.finish, delta.usage
            if delta.HasField("plan"):
                self.plan = delta.plan
        return tokens

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def passages_used(self) -> list[Passage]:
        """Those that the prompt holds; the answer cites them as [1], [2], …"""
        return self.passages[: self.plan.passages_used]

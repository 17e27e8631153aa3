"""A request's prompt, assembled within the model's window.

    system + history + passages + user + template + reserved output <= window

The output's share is `max_tokens`; when the request leaves that open, the output gets all that the
prompt leaves, and at least `least_output` of it is kept free while there is something to cut.

What does not fit is cut, last of these first:
    1. system and developer messages, and the last turn (from the last user message on): never
    2. the best passage
    3. history, the newest turn first; a turn, a user message and all up to the next, goes as one
    4. the other passages, best first
So passages go before history, but the best one stays to the end: a long conversation must not turn
retrieval off. No more is cut than necessary. If (1) alone is too long, the request is refused.
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from protos.common_pb2 import Message, Passage
from protos.tokenizer_pb2 import Chat, PromptPlan, PromptRequest
from services.common.errors import invalid
from services.common.packed_ids import Ids
from services.common.text.content import text_of
from services.tokenizer.checkpoints.models import ServedModel
from services.tokenizer.prompts.encode import Encoded
from services.tokenizer.prompts.offers import offered
from services.tokenizer.templates.rendered import Rendered
from services.tokenizer.templates.template import NotRenderableError

ROLES = ("system", "developer", "user", "assistant", "tool")
_NAME = re.compile("[A-Za-z0-9_-]{1,64}")  # as OpenAI has it
_CHARACTERS_PER_TOKEN = 8  # a text with more characters than this per token of the window is cut
_MARKERS_PER_MESSAGE = 4  # tokens; only a first guess of what will fit
TOO_LONG = "context_length_exceeded"


@dataclass(frozen=True)
class Prompt:
    """What the router gets, and how the window was spent on it."""

    token_ids: Ids
    max_tokens: int  # of the output, > 0
    plan: PromptPlan
    digest: bytes  # of the token ids
    checkpoint: str  # whose tokens they are
    reasons: bool = False  # it ends within the marks of reasoning

    @property
    def was_cut(self) -> bool:
        return bool(self.plan.passages_dropped or self.plan.messages_dropped)


def least_output(window: int) -> int:
    """Tokens kept for an output of open length."""
    return min(256, window // 8)


def assemble(model: ServedModel, request: PromptRequest) -> Prompt:
    """Blocking; takes about a millisecond for each 2 KB of text. Raises PenstockError
    INVALID_ARGUMENT with the field at fault; reason "context_length_exceeded" if it does not fit.
    """
    max_tokens = request.sampling.max_tokens
    match request.WhichOneof("input"):
        case "chat":
            return _assemble_chat(model, request.chat, max_tokens)
        case "text":
            _check_window(model, model.encoder.least(request.text), 0, "prompt")
            ids, added = model.encoder.encode_text(request.text)
            return _assemble_completion(model, ids, added, max_tokens)
        case "token_ids":
            ids = np.array(request.token_ids.ids, np.uint32)
            for index in np.flatnonzero(ids >= model.vocab_size)[:1]:
                what = f"token id {ids[index]} is outside the vocabulary of {model.vocab_size}"
                raise invalid(what, f"prompt[{index}]")
            return _assemble_completion(model, ids, 0, max_tokens)
    raise invalid("a request needs messages or a prompt", "prompt")


def check_length(model: ServedModel, request: PromptRequest) -> None:
    """Whether what is never cut may fit, as far as its bytes tell: so what cannot be answered costs
    nobody more. A millisecond for 8 MB. Raises as `assemble` does.
    """
    match request.WhichOneof("input"):
        case "chat":
            users = [n for n, one in enumerate(request.chat.messages) if one.role == "user"]
            last = users[-1] if users else 0
            texts = [
                text_of(message).strip()  # as templates do
                for index, message in enumerate(request.chat.messages)
                if index >= last or message.role in ("system", "developer")
            ]
            _check_window(model, model.encoder.least("".join(texts)), 0, "messages")
        case "text":
            _check_window(model, model.encoder.least(request.text), 0, "prompt")
        case "token_ids":
            _check_window(model, len(request.token_ids.ids), 0, "prompt")


def _assemble_completion(model: ServedModel, token_ids: Ids, added: int, max_tokens: int) -> Prompt:
    """`added`: how many of the ids the tokenizer put around the text."""
    count = len(token_ids)
    if count == 0:
        raise invalid("the prompt is empty", "prompt")
    _check_window(model, count, max_tokens, "prompt")
    plan = PromptPlan(user=count - added, template=added)
    return _prompt(model, token_ids, max_tokens, plan)


def _assemble_chat(model: ServedModel, chat: Chat, max_tokens: int) -> Prompt:
    _check_chat(model, chat)
    _check_window(model, 0, max_tokens, "messages")
    budget = model.window - (max_tokens or least_output(model.window))
    cuttable = _cuttable(() if chat.whole else chat.messages, chat.passages)
    best: tuple[_Candidate, Encoded] | None = None  # the longest that fits so far

    def fits(kept: int) -> bool:
        nonlocal best
        if kept == 0:  # known when anything is cut
            return True
        candidate = _Candidate.make(model, chat, cuttable, kept)
        if model.encoder.least(candidate.rendered.text) > budget:
            return False
        encoded = model.encoder.encode(candidate.rendered)
        if len(encoded) > budget:
            return False
        best = candidate, encoded
        return True

    characters = sum(len(text_of(m)) for m in chat.messages)
    characters += sum(len(p.title) + len(p.text) for p in chat.passages)
    characters += sum(len(t.description) + len(t.parameters) for t in offered(chat))
    whole = len(cuttable)
    if not whole or characters > model.window * _CHARACTERS_PER_TOKEN or not fits(whole):
        least = _Candidate.make(model, chat, cuttable, 0)
        _check_window(model, model.encoder.least(least.rendered.text), 0, "messages")
        best = least, model.encoder.encode(least.rendered)
        left = budget - len(best[1])
        if left >= 0 and whole:
            _most_that_fits(fits, _guess(model, chat, cuttable, left), whole)
    assert best is not None
    candidate, encoded = best
    _check_window(model, len(encoded), max_tokens, "messages")
    prompt = _prompt(model, encoded.ids, max_tokens, candidate.plan(chat, encoded))
    marks, text = model.reasoning_marks, candidate.rendered.text.rstrip()
    return replace(prompt, reasons=marks is not None and text.endswith(marks.opens))


def _check_chat(model: ServedModel, chat: Chat) -> None:
    if model.template is None:
        raise invalid(f"the model {model.name!r} has no chat template: use completions", "model")
    if not chat.messages:
        raise invalid("messages must not be empty", "messages")
    for index, message in enumerate(chat.messages):
        if message.role not in ROLES:
            raise invalid(f"the role must be one of {', '.join(ROLES)}", f"messages[{index}].role")
        if message.name and not _NAME.fullmatch(message.name):  # templates show it as it is
            why = "a name is 1 to 64 of the characters A-Z, a-z, 0-9, _ and -"
            raise invalid(why, f"messages[{index}].name")


def _check_window(model: ServedModel, prompt: int, max_tokens: int, param: str) -> None:
    """`prompt` tokens and what is to follow them must fit; 0: not counted yet."""
    need = "messages need" if param == "messages" else "prompt needs"
    asked = [f"the {need} at least {prompt}"] if prompt else []
    if max_tokens:
        asked.append(f"max_tokens asks for {max_tokens}")
    said = f"the context window is {model.window} tokens: {' and '.join(asked)}"
    if prompt >= model.window:
        raise invalid(said, param, reason=TOO_LONG)
    if prompt + max_tokens > model.window:
        raise invalid(said, "max_tokens", reason=TOO_LONG)


def _prompt(model: ServedModel, token_ids: Ids, max_tokens: int, plan: PromptPlan) -> Prompt:
    max_tokens = max_tokens or model.window - len(token_ids)
    plan.window, plan.reserved_output = model.window, max_tokens
    digest = hashlib.blake2b(token_ids.astype("<u4", copy=False).data, digest_size=16).digest()
    return Prompt(token_ids, max_tokens, plan, digest, model.checkpoint)


# ---- what may be cut ----------------------------------------------------------------------


class _Cuttable(NamedTuple):
    """Something that is kept or cut as a whole."""

    messages: tuple[int, ...] = ()
    passage: int | None = None


def _cuttable(messages: Sequence[Message], passages: Sequence[Passage]) -> list[_Cuttable]:
    """In the order in which they are kept: the first one goes last."""
    turns: list[list[int]] = []
    for index, message in enumerate(messages):
        if message.role in ("system", "developer"):
            continue
        if message.role == "user" or not turns:
            turns.append([])
        turns[-1].append(index)
    history = [_Cuttable(messages=tuple(turn)) for turn in reversed(turns[:-1])]
    found = [_Cuttable(passage=index) for index in range(len(passages))]
    return found[:1] + history + found[1:]


class _Candidate(NamedTuple):
    """The prompt when the first `kept` of what may be cut is kept."""

    rendered: Rendered
    messages: list[int]  # indices of those kept
    passages: int  # the first so many are kept

    @classmethod
    def make(
        cls, model: ServedModel, chat: Chat, cuttable: list[_Cuttable], kept: int
    ) -> "_Candidate":
        cut = {index for item in cuttable[kept:] for index in item.messages}
        messages = [index for index in range(len(chat.messages)) if index not in cut]
        passages = sum(item.passage is not None for item in cuttable[:kept])
        assert model.template is not None
        try:
            rendered = model.template.render(
                [chat.messages[index] for index in messages],
                chat.passages[:passages],
                offered(chat),
                json.loads(chat.template_options) if chat.template_options else {},
                sought=chat.searched or bool(chat.passages),
            )
        except NotRenderableError as error:
            at = "" if error.index is None else f"[{messages[error.index]}]"
            raise invalid(error.why, f"{error.param}{at}") from None
        return cls(rendered, messages, passages)

    def plan(self, chat: Chat, encoded: Encoded) -> PromptPlan:
        """Counts each part's tokens. A token belongs to the part in which its first character
        stands, so the parts add up to the prompt exactly; what is no message's and no passage's is
        the template's.
        """
        users = [index for index in self.messages if chat.messages[index].role == "user"]
        plan = PromptPlan(
            passages_used=self.passages,
            passages_dropped=len(chat.passages) - self.passages,
            messages_dropped=len(chat.messages) - len(self.messages),
        )
        for span in self.rendered.spans:
            tokens = encoded.tokens_before(span.end)
            tokens -= encoded.tokens_before(span.start)
            if span.kind == "passage":
                plan.passages += tokens
                continue
            index = self.messages[span.index]
            if chat.messages[index].role in ("system", "developer"):
                plan.system += tokens
            elif users and index == users[-1]:
                plan.user += tokens
            else:
                plan.history += tokens
        shown = plan.system + plan.history + plan.passages + plan.user
        plan.template = len(encoded) - shown
        return plan


# ---- how much of it fits ------------------------------------------------------------------


def _guess(model: ServedModel, chat: Chat, cuttable: list[_Cuttable], budget: int) -> int:
    """About how many of `cuttable` fit, from their tokens one by one; looks at no more text than
    the budget takes.
    """
    for kept, item in enumerate(cuttable):
        texts = [text_of(chat.messages[index]) for index in item.messages]
        if item.passage is not None:
            passage = chat.passages[item.passage]
            texts.append(f"{passage.title} {passage.text}")
        for text in texts:
            if model.encoder.least(text) > budget:
                return kept
            budget -= model.encoder.count(text) + _MARKERS_PER_MESSAGE
        if budget < 0:
            return kept
    return len(cuttable)


def _most_that_fits(fits: Callable[[int], bool], guess: int, most: int) -> int:
    """The largest n in [0, most] with fits(n), or -1; fits must hold for all smaller n as well.

    Calls `fits` about 2 log2(distance to the guess) times.
    """
    low, high, step, n = -1, most + 1, 1, guess
    while high - low > 1:
        if fits(n):
            low = n
        else:
            high = n
        if low < 0:
            n = max(0, high - step)
        elif high > most:
            n = min(most, low + step)
        else:
            n = (low + high) // 2
        step *= 2
    return low

"""Requests as they may come: a feature is a function that adds it to what is asked for."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from protos.common_pb2 import Constraint as Form
from protos.common_pb2 import Tool, ToolChoice
from protos.tokenizer_pb2 import Chat, PromptPlan, PromptRequest
from services.common.text.content import said
from services.tokenizer.checkpoints.models import ServedModel, load
from services.tokenizer.prompts.constraint import constraint_of
from services.tokenizer.prompts.context import Prompt
from services.worker.engine.messages import Constraint, Pooling, Request, Sampling
from services.worker.engine.models.registry import read_config
from tests.support.served import checkpoint_of

DEMO = Path(__file__).parents[2] / "models" / "demo"
DRAFT = DEMO.with_name("demo-draft")
SHAPE = read_config(DEMO)
VOCAB, HIDDEN, EOS, WINDOW = SHAPE.vocab_size, SHAPE.hidden_size, 1, 256
PROMPT = Prompt(np.array([1], np.uint32), 9, PromptPlan(), b"", "")
SCHEMA = {
    "type": "object",
    "properties": {"x": {"enum": ["a", "b", 3]}, "y": {"type": "boolean"}},
    "required": ["x"],
    "additionalProperties": False,
}
TOOL = Tool(name="find", parameters=json.dumps(SCHEMA))


@cache
def demo() -> ServedModel:
    return load(checkpoint_of(DEMO, "demo"))


@dataclass
class Asked:
    """A request in the making, and when it comes and what becomes of it."""

    prompt: list[int]
    sampling: dict[str, Any]
    more: dict[str, Any] = field(default_factory=dict)
    stops: tuple[str, ...] = ()
    chat: PromptRequest = field(default_factory=PromptRequest)
    at_step: int = 0
    cancel_after: int | None = None
    """Steps, whatever state it is in then: its client has gone."""
    answers_after: int | None = None
    """Steps after which the other side of a split sends its prompt; None: never."""
    wrong: bool = False
    """It is to be refused."""
    hostile: bool = False
    """Its grammar may be refused, or fail on the way."""

    def request(self, name: str) -> Request:
        return Request(name, self.prompt, Sampling(**self.sampling), **self.more)

    def alone(self, name: str) -> Request:
        """The same, not split."""
        split = ("prefill_only", "export_kv")
        more = {field: value for field, value in self.more.items() if field not in split}
        sampling = self.sampling | ({"max_tokens": 1} if self.more.get("prefill_only") else {})
        return Request(name, self.prompt, Sampling(**sampling), **more)


def drawn(rng: Random, steps: int) -> list[Asked]:
    """One request, or several answers to one prompt. It comes within so many steps."""
    length = rng.choice((1, rng.randint(2, 20), rng.randint(20, 60), rng.randint(60, WINDOW - 8)))
    asked = Asked(
        [rng.randrange(3, VOCAB) for _ in range(length)],
        {"max_tokens": rng.randint(1, 40), "seed": rng.getrandbits(64)},
        at_step=rng.randrange(steps),
    )
    for feature in FEATURES:
        if rng.random() < 0.25:
            feature(rng, asked)
    return [asked, *_choices(rng, asked)] if rng.random() < 0.1 else [asked]


def _choices(rng: Random, asked: Asked) -> list[Asked]:
    return [
        Asked(
            asked.prompt, asked.sampling | {"seed": rng.getrandbits(64)}, asked.more, asked.stops,
            asked.chat, asked.at_step, asked.cancel_after, asked.answers_after, asked.wrong,
            asked.hostile,
        )
        for _ in range(rng.randint(1, 3))
    ]  # fmt: skip


def _sampled(rng: Random, asked: Asked) -> None:
    asked.sampling |= {
        "temperature": rng.choice((0.0, 0.3, 1.0, 2.0)),
        "top_k": rng.choice((0, 1, 5, VOCAB)),
        "top_p": rng.choice((1.0, 0.9, 0.01)),
        "min_p": rng.choice((0.0, 0.1, 1.0)),
    }


def _penalized(rng: Random, asked: Asked) -> None:
    asked.sampling |= {
        "repetition_penalty": rng.choice((1.0, 0.5, 2.0)),
        "frequency_penalty": rng.uniform(-2, 2),
        "presence_penalty": rng.uniform(-2, 2),
    }


def _biased(rng: Random, asked: Asked) -> None:
    tokens = rng.sample(range(VOCAB), rng.randint(1, 300))
    bias = tuple((token, rng.choice((-100.0, rng.uniform(-5, 5), 100.0))) for token in tokens)
    asked.sampling["logit_bias"] = bias


def _banned(rng: Random, asked: Asked) -> None:
    asked.sampling["bad_words"] = tuple(
        tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 4)))
        for _ in range(rng.randint(1, 20))
    )


def _ended(rng: Random, asked: Asked) -> None:
    asked.sampling["stop_token_ids"] = tuple(rng.sample(range(VOCAB), rng.choice((1, 60))))
    asked.sampling["min_tokens"] = rng.choice((0, 1, 10))


def _endless(rng: Random, asked: Asked) -> None:
    asked.sampling["ignore_eos"] = True
    if "constraint" in asked.sampling:
        asked.wrong = True


def _scored(rng: Random, asked: Asked) -> None:
    asked.sampling["logprobs"] = rng.randint(0, 20)
    if rng.random() < 0.5:
        asked.sampling["prompt_logprobs"] = rng.randint(0, 20)


def _formed(rng: Random, asked: Asked) -> None:
    asked.sampling["constraint"] = rng.choice(
        (
            Constraint("json_object"),
            Constraint("json_schema", json.dumps(SCHEMA)),
            Constraint("regex", "[a-f]{1,9}!"),
            Constraint("choice", '["yes", "no"]'),
            Constraint("grammar", 'start: "x" start? "y"'),
        )
    )
    if asked.sampling.get("ignore_eos"):
        asked.wrong = True


def _hostile(rng: Random, asked: Asked) -> None:
    """Each fails its own request at most, and takes nobody's time."""
    if rng.random() < 0.8:
        return
    names = [f"k{'x' * 40}{n}" for n in range(300)]
    asked.sampling["constraint"] = rng.choice(
        (
            Constraint("regex", "(a|aa|aaa)*" * 9),
            Constraint("regex", "(x{0,900}y?){900}"),
            Constraint("regex", "("),
            Constraint("grammar", 'start: start start | "a" | "b" | start start start'),
            Constraint("grammar", "start: start"),
            Constraint("grammar", "root ::= ("),
            Constraint("json_schema", '{"allOf": [{"$ref": "#"}, {"type": "array"}]}'),
            Constraint("json_schema", '{"items": ' * 300 + "true" + "}" * 300),
            Constraint("json_schema", json.dumps({"properties": dict.fromkeys(names, SCHEMA)})),
            Constraint("choice", json.dumps(names)),
            Constraint("json_schema", "{"),
        )
    )
    asked.hostile = True
    asked.wrong = asked.wrong or bool(asked.sampling.get("ignore_eos"))


def _tools(rng: Random, asked: Asked) -> None:
    chat = Chat(messages=[said("user", "Find it.")], tools=[TOOL])
    chat.tool_choice.mode = rng.choice((ToolChoice.AUTO, ToolChoice.REQUIRED))
    chat.one_call = rng.random() < 0.5
    asked.chat = PromptRequest(model="demo", chat=chat)
    if rng.random() < 0.3:
        asked.chat.sampling.constraint.CopyFrom(Form(json_schema=json.dumps(SCHEMA)))
    if (grammar := constraint_of(asked.chat, demo(), PROMPT)) is not None:
        asked.sampling["constraint"] = Constraint("grammar", grammar.grammar)
        asked.wrong = asked.wrong or bool(asked.sampling.get("ignore_eos"))


def _stopped(rng: Random, asked: Asked) -> None:
    asked.stops = tuple(
        rng.choice(("e", " the", "\n", "zzz", '"')) for _ in range(rng.randint(1, 4))
    )


def _ordered(rng: Random, asked: Asked) -> None:
    asked.more["priority"] = rng.randint(-2, 2)
    asked.more["salt"] = rng.choice((b"", b"one", b"two"))


def _alike(rng: Random, asked: Asked) -> None:
    """Its prompt begins as others do, for the prefix cache."""
    shared = Random(rng.randint(0, 2))
    head = [shared.randrange(3, VOCAB) for _ in range(rng.randint(16, 100))]
    asked.prompt = head + asked.prompt[:100]


def _gone_on_with(rng: Random, asked: Asked) -> None:
    if "constraint" not in asked.sampling and len(asked.prompt) > 1:
        asked.more["generated_prefix"] = rng.randrange(1, len(asked.prompt))


def _split(rng: Random, asked: Asked) -> None:
    if rng.random() < 0.5:
        asked.more |= {"prefill_only": True, "export_kv": rng.choice((None, "inline", "shared"))}
    else:
        # What is sent are zeros: of a salt that nobody else has, who would find them in the cache.
        asked.more |= {"remote_prefill": True, "salt": b"elsewhere"}
        asked.answers_after = rng.choice((None, 0, 5))
        if asked.answers_after is None:
            asked.cancel_after = rng.randint(5, 30)


def _cancelled(rng: Random, asked: Asked) -> None:
    asked.cancel_after = rng.choice((0, 1, rng.randint(2, 40)))


def _pooled(rng: Random, asked: Asked) -> None:
    if rng.random() < 0.6:
        return
    asked.more["pooling"] = rng.choice(
        (
            Pooling("last"),
            Pooling("last", dimensions=rng.randint(1, HIDDEN)),
            Pooling("mean"),
            Pooling("logits", logits_of=tuple(rng.choices(range(VOCAB), k=rng.randint(1, 5)))),
        )
    )
    excluded = {"constraint", "prompt_logprobs", "generated_prefix", "prefill_only"}
    excluded |= {"remote_prefill"}
    asked.wrong = bool(excluded & {*asked.sampling, *asked.more})


def _refused(rng: Random, asked: Asked) -> None:
    wrong = (
        {"max_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"logprobs": 21},
        {"logit_bias": ((VOCAB, 1.0),)}, {"min_p": 2.0}, {"stop_token_ids": (-1,)},
    )  # fmt: skip
    if "pooling" not in asked.more:  # of which nothing is sampled
        asked.sampling |= rng.choice(wrong)
        asked.wrong = True


FEATURES: list[Callable[[Random, Asked], None]] = [
    _sampled, _penalized, _biased, _banned, _ended, _endless, _scored, _formed, _hostile,
    _tools, _stopped, _ordered, _alike, _gone_on_with, _split, _pooled, _cancelled, _refused,
]  # fmt: skip

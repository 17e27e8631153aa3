"""What a tokenizer makes of several choices, logprobs and the other ways of sampling."""

import asyncio
from pathlib import Path

import grpc

from protos.common_pb2 import FINISH_LENGTH, FINISH_STOP, TokenLogprobs, Usage
from protos.router_pb2 import GenerateRequest
from protos.tokenizer_pb2 import TextDelta
from protos.worker_pb2 import TokenDelta
from services.common.errors import PenstockError, invalid
from services.common.link import LinkCall
from services.tokenizer.answers.choices import seed_of
from tests.support.prompts import prompt_of
from tests.support.resumes import resume_of
from tests.support.tokenizer_bed import Bed, bed, ids, question

TEXTS = ["The water", "東京 🚰!", "no STOP here"]


class Router:
    """Answers choice i with TEXTS[i], and each of its tokens with its position for a logprob."""

    def __init__(self) -> None:
        self.asked: list[GenerateRequest] = []
        self.begun = asyncio.Event()
        self.ahead = True
        self.fails: int | None = None

    async def __call__(self, call: LinkCall, request: GenerateRequest) -> None:
        self.asked.append(request)
        if request.choice:
            self.ahead &= self.begun.is_set()
        if request.choice == self.fails:
            raise invalid("odd", "logit_bias", stage="worker")
        known, tokens = request.generated_prefix, ids(TEXTS[request.choice])
        prompt = len(prompt_of(request)) - known
        for position in range(known, len(tokens)):
            delta = TokenDelta(token_ids=[tokens[position]])
            if request.sampling.HasField("logprobs"):
                top = [tokens[position], 5][: request.sampling.logprobs]
                delta.logprobs.add(logprob=-position, top_ids=top, top_logprobs=[-position, -9])
            if request.sampling.HasField("prompt_logprobs") and not position:
                delta.prompt_logprobs.extend([TokenLogprobs(logprob=-1.5)] * (prompt - 1))
            if position == len(tokens) - 1:
                delta.finish = FINISH_LENGTH
            if delta.finish or position == known:
                usage = Usage(prompt_tokens=prompt, cached_tokens=3 * (1 + request.choice))
                delta.usage.CopyFrom(usage)
            await asyncio.sleep(0.001)
            self.begun.set()
            call.send(delta.SerializeToString())
        await asyncio.sleep(0)


def of_choice(b: Bed, choice: int) -> list[TextDelta]:
    return [delta for delta in b.deltas if delta.choice == choice]


def text_of(deltas: list[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


async def test_choices_are_requests_of_their_own(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    router = Router()
    async with bed(tmp_path, redis_url, namespace, router) as b:
        asked = question(choices=3, stop=["STOP"])
        asked.sampling.seed = 2**64 - 5
        assert (await b.ask(asked)).status.code == 0
        assert [text_of(of_choice(b, c)) for c in range(3)] == [TEXTS[0], TEXTS[1], "no "]
        ends = [of_choice(b, choice)[-1] for choice in range(3)]
        assert [end.finish for end in ends] == [FINISH_LENGTH, FINISH_LENGTH, FINISH_STOP]
        assert [end.usage.cached_tokens for end in ends] == [3, 6, 9]
        assert all(of_choice(b, choice)[0].HasField("plan") for choice in range(3))
        assert router.ahead, "the others find the prompt's blocks"
        one, two, three = sorted(router.asked, key=lambda request: request.choice)
        assert one.prompt_token_ids == two.prompt_token_ids == three.prompt_token_ids
        seeds = [request.sampling.seed for request in (one, two, three)]
        assert seeds == [seed_of(2**64 - 5, choice) for choice in range(3)]
        assert (seeds[0], len({*seeds})) == (2**64 - 5, 3)

        # What another tokenizer began is gone on with, choice by choice.
        router.asked.clear()
        told = of_choice(b, 0)[:1] + of_choice(b, 1)
        asked.resume.CopyFrom(resume_of(told))
        rest = [text_of(of_choice(b, 0)[1:]), "", "no "]
        assert (await b.ask(asked)).status.code == 0
        assert [text_of(of_choice(b, choice)) for choice in range(3)] == rest
        assert {request.choice for request in router.asked} == {0, 2}

        # One that fails ends all, in its words.
        router.fails = 1
        error = PenstockError.from_status((await b.ask(question(choices=3))).status)
        assert (error.code, error.param) == (grpc.StatusCode.INVALID_ARGUMENT, "logit_bias")


async def test_each_token_is_told_with_its_logprob_and_the_prompt_too(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    router = Router()
    async with bed(tmp_path, redis_url, namespace, router) as b:
        asked = question(choices=2, echo=True, bad_words=["water"])
        asked.text = "Water é"
        asked.sampling.logprobs = 2
        asked.sampling.min_tokens = 2
        assert (await b.ask(asked)).status.code == 0
        first, second = sorted(router.asked, key=lambda request: request.choice)
        assert (first.sampling.prompt_logprobs, first.sampling.min_tokens) == (2, 2)
        assert not second.sampling.HasField("prompt_logprobs"), "the first tells of it"
        words = [list(word.ids) for word in first.sampling.bad_words]
        assert words == [ids("water"), ids(" water")]
        for choice in range(2):
            deltas = of_choice(b, choice)
            told = [one for delta in deltas for one in delta.logprobs]
            assert b"".join(one.token.bytes for one in told).decode() == TEXTS[choice]
            assert [one.token.logprob for one in told] == [-n for n in range(len(told))]
            assert all(one.top[0] == one.token for one in told)
            assert told[0].top[1].bytes == b"<|assistant|>", "as it is written"
            assert [len(d.logprobs) for d in deltas] == [len(d.token_ids) for d in deltas]
        (echo,) = [delta.echo for delta in b.deltas if delta.HasField("echo")]
        assert echo.text == "Water é"
        assert b"".join(one.token.bytes for one in echo.logprobs).decode() == "Water é"
        assert [one.token.logprob for one in echo.logprobs[1:]] == [-1.5] * (
            len(prompt_of(first)) - 1
        )


async def test_no_stop_string_ends_what_is_to_be_longer(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    async with bed(tmp_path, redis_url, namespace, Router()) as b:
        asked = question(stop=["water", "er"])
        asked.sampling.min_tokens = len(ids(TEXTS[0])) - 1
        assert (await b.ask(asked)).status.code == 0
        told = text_of(b.deltas)
        asked.sampling.min_tokens = 0
        assert (await b.ask(asked)).status.code == 0
        assert (len(told) > len(text_of(b.deltas)), text_of(b.deltas)) == (True, "The ")

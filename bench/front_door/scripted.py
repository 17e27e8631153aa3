"""A tokenizer service that makes up its texts: what stands behind a gateway that is measured alone.

python -m bench.front_door.scripted [--pace 100]
"""

import argparse
import asyncio

import grpc
import uvloop

from bench.front_door.engine import TEXT, Engine, number_in, serve_left
from bench.link_hops import announce, terminated
from protos import tokenizer_pb2, tokenizer_pb2_grpc
from protos.common_pb2 import FINISH_LENGTH, Usage
from protos.tokenizer_pb2 import PromptPlan, PromptRequest, TextDelta
from services.common.config import Settings
from services.common.link import LinkCall, LinkServer
from services.common.service import Host, Service
from services.common.text.content import text_of

_AT_ONCE = 16_384


class Scripted(Service):
    name = "tokenizer"
    grpc_services = ("penstock.v1.Tokenizer",)
    engine: Engine

    async def start(self, server: grpc.aio.Server) -> None:
        tokenizer_pb2_grpc.add_TokenizerServicer_to_server(_Models(self.settings), server)
        method = "/penstock.v1.Tokenizer/Link"
        LinkServer(method, self._handle, max_requests=_AT_ONCE).add_to(server)

    async def _handle(self, call: LinkCall) -> None:
        asked = PromptRequest.FromString(call.payload)
        said = text_of(asked.chat.messages[-1])
        tokens = asked.sampling.max_tokens
        usage = Usage(prompt_tokens=30, completion_tokens=tokens)
        over = asyncio.Event()
        first = True

        def send(is_last: bool) -> None:
            nonlocal first
            delta = TextDelta(text=TEXT, token_ids=[17])
            if first:
                delta.plan.CopyFrom(PromptPlan(window=512))
                delta.usage.CopyFrom(usage)
                first = False
            if is_last:
                delta.finish = FINISH_LENGTH
                delta.usage.CopyFrom(usage)
                over.set()
            call.send(delta.SerializeToString())

        self.engine.left[number_in(said)], end = self.engine.begin(tokens, send)
        call.on_cancel(end)
        await over.wait()


class _Models(tokenizer_pb2_grpc.TokenizerServicer):
    def __init__(self, settings: Settings) -> None:
        self._name = settings.models[0].name

    async def ListModels(
        self, request: tokenizer_pb2.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> tokenizer_pb2.ListModelsReply:
        one = tokenizer_pb2.ModelInfo(name=self._name, window=512)
        return tokenizer_pb2.ListModelsReply(models=[one])


async def _serve(pace: float) -> None:
    engine = Scripted.engine = Engine(pace)
    stepping = asyncio.create_task(engine.run())
    host = Host(Scripted)
    await host.start()
    async with serve_left(engine) as address:
        announce(address)
        await terminated()
    stepping.cancel()
    await host.stop(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pace", type=float, default=100.0, help="tokens a second of each stream")
    uvloop.run(_serve(parser.parse_args().pace))

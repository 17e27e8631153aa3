"""POST /v1/chat/completions and /v1/completions, streamed or whole."""

from protos.tokenizer_pb2 import TextDelta
from services.common.config import Settings
from services.gateway.generation_schema import ChatCompletionRequest, CompletionRequest
from services.gateway.http import Exchange
from services.gateway.intake import Place
from services.gateway.openai_format import Chunks, chat_completion, text_completion
from services.gateway.pipeline import Gateway, serve
from services.gateway.prompt import Answer, Prompt
from services.gateway.schema import parse, read_aside


class RestFront:
    """A generation over HTTP (pipeline.Front)."""

    def __init__(self, exchange: Exchange, settings: Settings, *, chat: bool) -> None:
        self.request_id = exchange.request_id
        self.route = exchange.route
        self.authorization = exchange.headers.get("authorization")
        self.traceparent = exchange.headers.get("traceparent")
        self._exchange = exchange
        self._settings = settings
        self._chat = chat
        self._stream = False
        self._include_usage = False
        self._chunks: Chunks | None = None

    async def read(self, place: Place) -> Prompt:
        self._exchange.place = place
        body = await self._exchange.json_body()
        prompt = await read_aside(body, lambda: self._understand(body))
        self._exchange.watch_client()
        return prompt

    def _understand(self, body: bytes) -> Prompt:
        request: ChatCompletionRequest | CompletionRequest
        if self._chat:
            request = parse(ChatCompletionRequest, body)
            prompt = request.prompt(self._settings.retrieval.top_k)
        else:
            request = parse(CompletionRequest, body)
            prompt = request.prompt(self._settings.gateway.max_prompt_tokens)
        self._stream = bool(request.stream)
        self._include_usage = request.include_usage
        return prompt

    async def write(self, answer: Answer, deltas: list[TextDelta]) -> None:
        """All events that are ready leave in one write, still one event for each delta.

        The answer begins with the first delta, so what fails before it has its own HTTP status.
        """
        if not self._stream:
            return
        chunks = self._chunks or await self._open(answer)
        events = b"".join([chunks.text(delta.text) for delta in deltas if delta.text])
        if events:
            await self._exchange.write(events)

    async def finish(self, answer: Answer) -> None:
        if self._stream:
            chunks = self._chunks or await self._open(answer)
            await self._exchange.end_events(chunks.closing())
        else:
            whole = chat_completion(answer) if self._chat else text_completion(answer)
            await self._exchange.reply_json(whole)

    async def _open(self, answer: Answer) -> Chunks:
        chunks = Chunks(answer, chat=self._chat, include_usage=self._include_usage)
        self._chunks = chunks
        await self._exchange.start_events()
        if self._chat:
            await self._exchange.write(chunks.opening())
        return chunks


async def chat_completions(gateway: Gateway, exchange: Exchange) -> None:
    await serve(gateway, RestFront(exchange, gateway.settings, chat=True))


async def completions(gateway: Gateway, exchange: Exchange) -> None:
    await serve(gateway, RestFront(exchange, gateway.settings, chat=False))

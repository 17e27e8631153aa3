"""A generation over gRPC."""

import asyncio

from protos.gateway_pb2 import ChatRequest, CompleteRequest
from services.common.errors import invalid
from services.gateway.api.generation_schema import ChatCompletionRequest, CompletionRequest
from services.gateway.api.grpc.calls import Context, endpoint, metadata_of
from services.gateway.api.grpc.events import Events
from services.gateway.api.grpc.fields import chat_fields, completion_fields
from services.gateway.api.grpc.inbox import Inbox
from services.gateway.api.rest.lasting import KEY, LAST, digest, idempotency_key, last_event
from services.gateway.api.schema import validated
from services.gateway.identity.principal import Principal
from services.gateway.intake import Place
from services.gateway.parts import Gateway
from services.gateway.runs.prompt import Prompt


class GrpcFront(Events):
    """front.LastingFront."""

    says_begun = None
    about = ""  # in no list

    def __init__(self, gateway: Gateway, inbox: Inbox, context: Context, id: str, route: str):
        metadata = metadata_of(context)
        self.key, self.digest, self.told = idempotency_key(metadata), "", "{}"
        self.lasts = bool(self.key)
        self._last_event = last_event(metadata)
        after = self._last_event or 0
        super().__init__(context, gateway.settings.gateway, numbered=self.lasts, after=after)
        self.request_id = id
        self.route = route
        self.endpoint = endpoint(route)
        self.authorization = metadata.get("authorization")
        self.traceparent = metadata.get("traceparent")
        self._context = context
        self._settings = gateway.settings.gateway
        self._top_k = gateway.settings.retrieval.top_k
        self._inbox = inbox

    async def read(self, principal: Principal, place: Place) -> list[Prompt]:
        if self._last_event is not None and not self.key:
            raise invalid(f"'{LAST}' needs '{KEY}'.", LAST, stage="gateway")
        message = await self._inbox.take(place, self._context)
        if self.key:
            self.digest = digest(self.route, message)
        # In a thread, as a large HTTP body.
        return await asyncio.to_thread(self._understand, message)

    def _understand(self, message: bytes) -> list[Prompt]:
        limits = self._settings
        if self.route == "Chat":
            fields = chat_fields(self._inbox.parse(ChatRequest, message), limits.max_messages)
            chat = validated(ChatCompletionRequest, fields, limits)
            return [chat.prompt(self._top_k)]
        fields = completion_fields(self._inbox.parse(CompleteRequest, message), limits)
        return validated(CompletionRequest, fields, limits).prompts(limits)

    @property
    def resumes(self) -> bool:
        return bool(self._last_event)

    def joins(self, id: str) -> None:
        """Told with the first event too: who leaves the call will ask for the run by it."""
        self._context.set_trailing_metadata((("x-request-id", id),))
        self._writer.headers["x-request-id"] = id

"""The public gRPC services: every method, and who answers it."""

from typing import Any

import grpc

from services.gateway.api.grpc import contents, conversations, inference, lasting, uploads
from services.gateway.api.grpc.calls import SERVICES, single
from services.gateway.api.grpc.inbox import Inbox
from services.gateway.api.grpc.kept import KEPT
from services.gateway.api.grpc.looking import LOOKING, looking
from services.gateway.parts import Gateway


def services(gateway: Gateway) -> list[Any]:
    """Their handlers, of each service its own."""
    inbox = Inbox(gateway.settings.gateway)
    handlers = {
        **inference.methods(gateway, inbox),
        **contents.methods(gateway, inbox),
        **lasting.methods(gateway, inbox),
        **uploads.methods(gateway, inbox),
    }
    own = {**uploads.KEPT, **conversations.KEPT}
    for route, one in {**LOOKING, **KEPT, **lasting.LOOKING, **own}.items():
        handlers[route] = single(looking(gateway, inbox, route, one), one.reply)
    return [
        grpc.method_handlers_generic_handler(
            name, {method.name: handlers.pop(method.name) for method in service.methods}
        )
        for name, service in SERVICES.items()
    ]

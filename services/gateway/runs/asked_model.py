"""The model that a chat, a completion or a count of their tokens asks for."""

from protos.tokenizer_pb2 import ModelInfo
from services.common.errors import PenstockError, invalid
from services.gateway.parts import Gateway


async def asked_model(gateway: Gateway, name: str) -> ModelInfo:
    """Raises NOT_FOUND; INVALID_ARGUMENT ("unsupported_model") for the one that stores search with,
    which no tokenizer knows to do nothing else; UNAVAILABLE."""
    try:
        return await gateway.models.find(name)
    except PenstockError as error:
        if error.reason == "model_not_found" and name == gateway.retrieval.embedding_model:
            why = f"the model {name!r} embeds texts, it does not chat"
            raise invalid(why, "model", stage="gateway", reason="unsupported_model") from None
        raise

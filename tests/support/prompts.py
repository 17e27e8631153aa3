"""A request's prompt, as a list."""

from protos.router_pb2 import GenerateRequest
from protos.worker_pb2 import WorkRequest
from services.common.packed_ids import unpack


def prompt_of(request: GenerateRequest | WorkRequest) -> list[int]:
    ids: list[int] = unpack(request.prompt_token_ids).tolist()
    return ids

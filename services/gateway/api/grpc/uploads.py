"""Files that come in parts: REST's requests in gRPC's shape; a part comes as a file does."""

from typing import Any

from protos import gateway_stores_pb2 as pb
from services.gateway.api.grpc.calls import Context, Handler, admitted, answered, single
from services.gateway.api.grpc.contents import arrived, each
from services.gateway.api.grpc.inbox import Inbox
from services.gateway.api.grpc.kept import Call, id_of, look_of, told
from services.gateway.api.grpc.plain import Fields, fields_of
from services.gateway.api.resources import uploads
from services.gateway.api.resources.uploads import CompleteUpload, CreateUpload
from services.gateway.api.schema import validated
from services.gateway.intake import Intake
from services.gateway.parts import Gateway

_ID = "upload_id"


async def _create(call: Call) -> Fields:
    body = validated(CreateUpload, fields_of(call.request))
    return await uploads.create_upload(call.gateway, call.tenant, body)


async def _complete(call: Call) -> Fields:
    id, body = call.id(_ID), validated(CompleteUpload, fields_of(call.request, _ID))
    return await uploads.complete_upload(call.gateway, call.tenant, id, body)


async def _cancel(call: Call) -> Fields:
    return await uploads.cancel_upload(call.gateway, call.tenant, call.id(_ID))


def _add_part(gateway: Gateway, inbox: Inbox) -> Handler:
    route = "AddUploadPart"

    async def handler(_: object, context: Context) -> pb.UploadPart | None:
        async def answer(id: str, metadata: dict[str, str]) -> pb.UploadPart:
            async with admitted(gateway, metadata, route, Intake.slot) as (principal, place):
                limit = gateway.settings.gateway.max_upload_bytes
                _, upload, content = await arrived(
                    inbox, place, context, limit, pb.AddUploadPartRequest, lambda m: id_of(m, _ID)
                )
                part = await gateway.uploads.add(principal.tenant, upload, each(content))
                return told(pb.UploadPart, part.as_json())

        return await answered(route, context, answer)

    return handler


KEPT = {
    "CreateUpload": look_of(pb.CreateUploadRequest, _create, pb.Upload, Intake.slot),
    "CompleteUpload": look_of(pb.CompleteUploadRequest, _complete, pb.Upload, Intake.slot),
    "CancelUpload": look_of(pb.CancelUploadRequest, _cancel, pb.Upload, Intake.slot),
}


def methods(gateway: Gateway, inbox: Inbox) -> dict[str, Any]:
    """The handler of what has several messages, by route."""
    return {"AddUploadPart": single(_add_part(gateway, inbox), pb.UploadPart)}

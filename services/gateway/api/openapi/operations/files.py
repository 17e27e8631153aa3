"""Files and uploads."""

from services.gateway.api.openapi.answers.common import PageOf
from services.gateway.api.openapi.answers.stores import DeletedFile, File, Upload, UploadPart
from services.gateway.api.openapi.operation import FileForm, Operation, PartForm, Raw
from services.gateway.api.resources.files import FileList
from services.gateway.api.resources.uploads import CompleteUpload, CreateUpload

_TAG = "Files"

OPERATIONS: dict[str, Operation] = {
    "GET /v1/files": Operation(_TAG, "All files", PageOf[File], query=FileList),
    "POST /v1/files": Operation(_TAG, "Uploads a file", File, FileForm),
    "GET /v1/files/{file}": Operation(_TAG, "A file", File),
    "DELETE /v1/files/{file}": Operation(
        _TAG, "Deletes a file, and takes it out of all stores", DeletedFile
    ),
    "POST /v1/uploads": Operation(
        _TAG,
        "Begins a file that comes in parts",
        Upload,
        CreateUpload,
        {"filename": "a.md", "purpose": "assistants", "bytes": 5, "mime_type": "text/markdown"},
    ),
    "POST /v1/uploads/{upload}/parts": Operation(
        _TAG, "Uploads a part of it", UploadPart, PartForm
    ),
    "POST /v1/uploads/{upload}/complete": Operation(
        _TAG,
        "Makes the file of its parts, in this order",
        Upload,
        CompleteUpload,
        {"part_ids": ["part_000645c8a1b2c30f1e2d3c4b5a6978"]},
    ),
    "POST /v1/uploads/{upload}/cancel": Operation(_TAG, "Ends it; its parts are gone", Upload),
    "GET /v1/files/{file}/content": Operation(
        _TAG, "A file's content", Raw("application/octet-stream")
    ),
}

"""What Office's archives may hold, looked at before anything of them is unpacked."""

import io
import zipfile

from services.retrieval.documents.chunks import Limits, RefusedError, too_large

_MOST_PARTS = 20_000
_MOST_TIMES = 200  # larger than packed; text packs to a tenth
_ANYWAY_BYTES = 2**20  # is no bomb, however well it is packed


def check(content: bytes, limits: Limits) -> None:
    """What a part says of its size it cannot pass: reading ends there. Raises RefusedError."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        parts = archive.infolist()
    if any(part.flag_bits & 1 for part in parts):
        raise RefusedError("is encrypted: save it without a password")
    unpacked = sum(part.file_size for part in parts)
    if len(parts) > _MOST_PARTS:
        raise too_large(f"is an archive of {len(parts):,} parts, more than {_MOST_PARTS:,}")
    if unpacked > limits.unpacked_bytes:
        most = limits.unpacked_bytes >> 20
        raise too_large(f"unpacks to {unpacked >> 20:,} MiB, more than {most:,} MiB, the limit")
    if unpacked > max(_MOST_TIMES * len(content), _ANYWAY_BYTES):
        raise too_large(f"unpacks to more than {_MOST_TIMES} times its size: it looks like a bomb")

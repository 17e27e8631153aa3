"""What is looked at of a file while it is uploaded."""

import codecs
from collections.abc import AsyncIterable, AsyncIterator

from services.common.config import GatewaySettings
from services.common.errors import PenstockError, invalid
from services.common.text.titles import is_plain
from services.gateway.stores.files.file_record import Purpose

_NAME_CHARS = 255


class Upload:
    def __init__(self, purpose: Purpose, max_bytes: int) -> None:
        self.bytes = 0
        self._max_bytes = max_bytes
        self._blank = True
        self._text = codecs.getincrementaldecoder("utf-8")() if purpose == "batch" else None

    async def pieces(self, content: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        async for piece in content:
            self.bytes += len(piece)
            if self.bytes > self._max_bytes:
                raise too_large(self._max_bytes)
            self._blank = self._blank and not piece.strip()
            self._decode(piece, last=False)
            yield piece

    def check_whole(self) -> None:
        self._decode(b"", last=True)
        if self._blank:
            raise _refused("The file is empty.", "invalid_file")

    def _decode(self, piece: bytes, *, last: bool) -> None:
        try:
            if self._text is not None:
                self._text.decode(piece, last)
        except UnicodeDecodeError as error:
            why = f"The file is not UTF-8 text: {error.reason}."
            raise _refused(why, "invalid_file") from None


def max_bytes(purpose: Purpose, settings: GatewaySettings) -> int:
    """Of a file: a batch's input is read whole."""
    most = settings.max_upload_bytes
    return min(settings.body_limit_bytes, most) if purpose == "batch" else most


def too_large(most: int, param: str = "file") -> PenstockError:
    return _refused(f"The file is larger than {most:,} bytes, the limit.", "file_too_large", param)


def check_name(filename: str, purpose: Purpose, param: str = "file") -> None:
    if not filename:
        raise _refused("The file needs a name.", "", param)
    if len(filename) > _NAME_CHARS:
        raise _refused(f"The file's name is longer than {_NAME_CHARS} characters.", "", param)
    if not is_plain(filename):
        raise _refused("The file's name must not hold control characters.", "", param)
    if purpose == "batch" and not filename.lower().endswith(".jsonl"):
        raise _refused("The input of a batch is a .jsonl file.", "unsupported_file", param)


def _refused(why: str, reason: str, param: str = "file") -> PenstockError:
    return invalid(why, param, reason=reason, stage="gateway")

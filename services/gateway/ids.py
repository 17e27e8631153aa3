"""The ids that clients see: the one place that makes them, and tells them from any other text.

    file-…   a file              30 hex digits, of which 14 are the time: ids sort by their age
    vs_…     a vector store      the same
    vsfb_…   a batch of its files  the same
    req_…    a request           the same
    batch_…  a batch             the same
    upload_… an upload in parts  the same
    part_…   one of its parts    the same
    conv_…   a conversation      the same
    key_…    an API key          12 hex digits, short enough to be typed

Ids come back in paths, bodies and queries, and become parts of Redis keys. A text of another shape
is answered as an id that nobody has, before anything is made of it.
"""

import re
import secrets
import time
from dataclasses import dataclass

import grpc

from services.common.errors import PenstockError, invalid

_SHOWN = 100  # characters of a client's text that an error repeats
_TIME_DIGITS = 14  # of microseconds since 1970
_TIMED_DIGITS = 30
_KEY_DIGITS = 12


@dataclass(frozen=True)
class IdKind:
    """One kind of id; `what` it names is for error messages."""

    prefix: str
    what: str
    digits: int = _TIMED_DIGITS

    def new(self) -> str:
        timed = f"{time.time_ns() // 1000:0{_TIME_DIGITS}x}" if self.digits > _TIME_DIGITS else ""
        return self.prefix + timed + secrets.token_hex((self.digits - len(timed)) // 2)

    def fits(self, text: str) -> bool:
        """Whether `text` may be such an id."""
        return re.fullmatch(f"{self.prefix}[0-9a-f]{{{self.digits}}}", text) is not None

    def checked(self, text: str, param: str = "") -> str:
        """`text`, if it may be such an id; raises NOT_FOUND as for one that nobody has."""
        if not self.fits(text):
            raise not_found(self.what, text, param)
        return text


FILE = IdKind("file-", "file")
STORE = IdKind("vs_", "vector store")
FILE_BATCH = IdKind("vsfb_", "batch of files in this vector store")
REQUEST = IdKind("req_", "request")
BATCH = IdKind("batch_", "batch")
UPLOAD = IdKind("upload_", "upload")
CONVERSATION = IdKind("conv_", "conversation")
PART = IdKind("part_", "part of this upload")
KEY = IdKind("key_", "API key", _KEY_DIGITS)


def no_such_item(id: str, param: str) -> PenstockError:
    """Of a list, where a page is to begin behind it."""
    return invalid(f"No item '{id[:_SHOWN]}' in this list.", param, stage="gateway")


def not_found(what: str, id: str, param: str = "") -> PenstockError:
    """Also for what belongs to another tenant: its existence is not told."""
    return PenstockError(
        grpc.StatusCode.NOT_FOUND,
        f"No such {what}: '{id[:_SHOWN]}'.",
        stage="gateway",
        param=param,
        reason="not_found",
    )

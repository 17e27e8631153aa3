"""What a text says when it is read otherwise: the ways in which forbidden requests are hidden.

Each is one pass over the text, and together they give a few times its size. All of it is read:
what is looked for may stand at its end, behind any number of decoys.
"""

import base64
import binascii
import codecs
import re
from collections.abc import Iterator

_NESTED = 2  # base64 of base64
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{16,65536}={0,2}")
_HEX = re.compile(r"(?:[0-9a-fA-F]{2}[ :,]?){12,32768}")
_SPELLED = re.compile(r"(?<!\w)\w(?:[ .\-_*|/]{1,3}\w(?!\w)){3,2000}")
_GAP = re.compile(r"(?<=\w)[ .\-_*|/](?=\w)")
_LEET = str.maketrans("013457@$!|€", "oieastasiie")


def disguises(text: str) -> Iterator[str]:
    """Other readings of a folded text."""
    if any(char in "013457@$!|€" for char in text):
        yield text.translate(_LEET)
    if spelled := [m.group() for m in _SPELLED.finditer(text)]:
        joined = "\n".join(_GAP.sub("", part) for part in spelled)
        yield re.sub(r"[ .\-_*|/]+", " ", joined)
        yield re.sub(r"[ .\-_*|/]+", "", joined)
    yield codecs.encode(text, "rot13")
    yield text[::-1]
    yield from _decoded(text, _NESTED)


def _decoded(text: str, times: int) -> Iterator[str]:
    for found in _BASE64.finditer(text):
        blob = found.group().rstrip("=").replace("-", "+").replace("_", "/")
        yield from _readable(blob, times)
    for found in _HEX.finditer(text):
        yield from _said(bytes.fromhex(re.sub("[ :,]", "", found.group())), times)


def _readable(blob: str, times: int) -> Iterator[str]:
    try:
        raw = base64.b64decode(blob[: len(blob) - (len(blob) % 4 == 1)] + "=" * (-len(blob) % 4))
    except (binascii.Error, ValueError):
        return
    yield from _said(raw, times)


def _said(raw: bytes, times: int) -> Iterator[str]:
    text = raw.decode("utf-8", "replace")
    if text.count("\ufffd") * 10 > len(text) or not any(char.isalpha() for char in text):
        return
    yield text
    if times > 1:
        yield from _decoded(text, times - 1)

"""Bytes to text: by their mark of order, as UTF-8, or by what they look like."""

import codecs

from services.retrieval.documents.chunks import RefusedError, too_large

_MARKS = (  # UTF-32's begins as UTF-16's does
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_LOOKED_AT = 64 * 1024  # bytes; the guess is quadratic in nothing, but not cheap
_MOST_BYTES = 4  # of a character


def decode(content: bytes, max_chars: int, declared: str = "") -> str:
    """`declared`: what the document itself says, if it does. Line ends become "\\n".

    Raises RefusedError for what is no text, or too long.
    """
    if len(content) > _MOST_BYTES * max_chars:
        raise _too_long(max_chars)
    text = _decoded(content, declared)
    if "\0" in text:
        raise RefusedError("is not text")
    if len(text) > max_chars:
        raise _too_long(max_chars)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _decoded(content: bytes, declared: str) -> str:
    for mark, encoding in _MARKS:
        if content.startswith(mark):
            try:
                return content[len(mark) :].decode(encoding)
            except UnicodeDecodeError as error:
                raise RefusedError(
                    f"is not the {encoding} that it begins as: {error.reason}"
                ) from None
    try:
        return content.decode()
    except UnicodeDecodeError:
        pass
    from charset_normalizer import from_bytes
    from charset_normalizer.constant import IANA_SUPPORTED

    encoding = declared.lower().replace("-", "_")
    if encoding not in IANA_SUPPORTED:
        guess = from_bytes(content[:_LOOKED_AT]).best()
        if guess is None:
            raise RefusedError("is not text in any encoding known here")
        encoding = guess.encoding
    return content.decode(encoding, errors="replace")


def _too_long(max_chars: int) -> RefusedError:
    return too_large(f"has more than {max_chars:,} characters of text, the limit")

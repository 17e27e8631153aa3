"""What large files are told apart by without reading all of them."""

import errno
import os
from hashlib import blake2b
from pathlib import Path

_PIECES, _PIECE_BYTES = 256, 4096


def sampled(path: Path) -> bytes:
    """A digest of a file's name, its size, and pieces from all over it, the first and the last
    bytes among them; of all of it if it is small. A few milliseconds. Raises OSError."""
    if path.exists() and not path.is_file():  # whoever opens a pipe waits for its writer
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        found = blake2b(f"{path.name} {size}\n".encode(), digest_size=16)
        for piece in range(_PIECES):
            at = max(0, size - _PIECE_BYTES) * piece // (_PIECES - 1)
            found.update(os.pread(file.fileno(), _PIECE_BYTES, at))
    return found.digest()

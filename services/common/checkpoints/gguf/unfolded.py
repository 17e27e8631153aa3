"""A GGUF file as a folder: config.json, tokenizer and the rest, made of its header, and a link to
the file. Each host that reads a model has its own: a few megabytes that are never written again.
A file that changes has another."""

import json
import os
import shutil
import tempfile
from hashlib import blake2b
from pathlib import Path
from typing import Any

from services.common.checkpoints.gguf.header import Header, UnsupportedGguf, read_header
from services.common.checkpoints.gguf.hub_config import config_of, generation_config_of
from services.common.checkpoints.sampled import sampled
from services.common.checkpoints.tokenizer_file import read_tokenizer
from services.common.locks.own_folders import make_own

WEIGHTS = "model.gguf"
_TOKENIZER, _TEMPLATE = "tokenizer.json", "chat_template.jinja"
_BESIDE = (
    _TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", _TEMPLATE,
    "generation_config.json",
)  # fmt: skip
"""If a tokenizer.json lies beside the file, these are taken from there."""
_EDITION = 2
"""Of what is made here: another one is made anew."""


def unfolded(path: Path) -> Path:
    """The folder, made if it is not there. Raises UnsupportedGguf, and OSError."""
    path = path.resolve()
    place = _cache()
    for own in (place.parent, place):  # what another could put there is another's model
        make_own(own)
    key = _key(path)
    folder = place / f"{path.stem[:80]}-{key}"
    if folder.is_dir():
        return folder
    making = Path(tempfile.mkdtemp(prefix=".making-", dir=place))
    try:
        _write(path, making)
        if _key(path) != key:
            raise UnsupportedGguf(f"{path}: it was changed while it was read")
        try:
            making.rename(folder)
        except OSError:
            if not folder.is_dir():  # which another process was quicker to make
                raise
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return folder


def _cache() -> Path:
    own = os.environ.get("XDG_CACHE_HOME")
    return (Path(own) if own else Path.home() / ".cache") / "penstock" / "gguf"


def _key(path: Path) -> str:
    """Another one when the file is, or what lies beside it."""
    about = path.stat()
    found = blake2b(f"{_EDITION} {path} {about.st_mtime_ns}\n".encode(), digest_size=8)
    found.update(sampled(path))
    for name in _BESIDE:
        if (path.parent / name).is_file():
            found.update(name.encode() + (path.parent / name).read_bytes())
    return found.hexdigest()


def _write(path: Path, folder: Path) -> None:
    header = read_header(path)
    _put(folder / "config.json", config_of(header))
    _put(folder / "generation_config.json", generation_config_of(header))
    if (path.parent / _TOKENIZER).is_file():
        _take_beside(header, folder)
    else:
        from services.common.checkpoints.gguf.vocabulary import tokenizer_config_of, tokenizer_of

        tokenizer_of(header).save(str(folder / _TOKENIZER))
        _put(folder / "tokenizer_config.json", tokenizer_config_of(header))
    (folder / WEIGHTS).symlink_to(path)


def _take_beside(header: Header, folder: Path) -> None:
    from services.common.checkpoints.gguf.vocabulary import check_agrees, tokenizer_config_of

    found = header.path.parent / _TOKENIZER
    try:
        tokenizer = read_tokenizer(found)
    except ValueError as error:
        raise UnsupportedGguf(str(error)) from error
    check_agrees(header, tokenizer)
    config = tokenizer_config_of(header)
    _put(folder / "tokenizer_config.json", config)
    for name in _BESIDE:
        if (found.parent / name).is_file():
            shutil.copyfile(found.parent / name, folder / name)
    if "chat_template" in config and not _has_template(folder):
        (folder / _TEMPLATE).write_text(config["chat_template"])


def _has_template(folder: Path) -> bool:
    if (folder / _TEMPLATE).is_file():
        return True
    told = json.loads((folder / "tokenizer_config.json").read_bytes())
    return isinstance(told, dict) and "chat_template" in told


def _put(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True))

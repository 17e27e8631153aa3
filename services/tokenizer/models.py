"""The models that this replica can tokenize for: their tokenizers, templates and windows."""

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
from tokenizers import Tokenizer

from protos import tokenizer_pb2
from services.common.checkpoint import locate
from services.common.config import ModelSpec
from services.common.errors import PenstockError
from services.tokenizer.detokenizer import Detokenizer, detokenizer_factory
from services.tokenizer.encode import PromptEncoder
from services.tokenizer.template import ChatTemplate

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedModel:
    """What of a checkpoint the tokenizer needs. Safe to use from several threads."""

    name: str
    tokenizer: Tokenizer
    encoder: PromptEncoder
    template: ChatTemplate | None  # None: completions only
    detokenizer: Callable[[], Detokenizer]  # a new one for each request's output
    window: int  # tokens, prompt and output together
    vocab_size: int  # ids that the model has an embedding for
    created: int  # Unix seconds

    def decode(self, token_ids: Sequence[int]) -> str:
        """All of the text, special tokens too."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)


class Models:
    """The served models by name, with their windows as they are now.

    A model does not change: a request that took one keeps it, and its window, throughout.
    """

    def __init__(self, models: Iterable[ServedModel] = ()) -> None:
        self._own_windows: dict[str, int] = {}
        self._rooms: dict[str, int] = {}  # of models that come yet, too
        self._by_name: dict[str, ServedModel] = {}
        for model in models:
            self.put(model)

    def __getitem__(self, name: str) -> ServedModel:
        """Raises NOT_FOUND, param "model"."""
        try:
            return self._by_name[name]
        except KeyError:
            raise PenstockError(
                grpc.StatusCode.NOT_FOUND,
                f"the model {name!r} does not exist",
                param="model",
                reason="model_not_found",
            ) from None

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def put(self, model: ServedModel) -> None:
        """From now on it is served, in place of another of its name."""
        self._own_windows[model.name] = model.window
        self._by_name[model.name] = model
        if model.name in self._rooms:
            self.bound(model.name, self._rooms[model.name])

    def drop(self, name: str) -> None:
        """From now on it is not served."""
        self._by_name.pop(name, None)
        self._rooms.pop(name, None)

    def bound(self, name: str, room: int) -> bool:
        """Makes the model's window `room` tokens, or its own if that is less, from now on.

        Returns whether that changed it; for a model that is not served yet it is kept in mind.
        """
        self._rooms[name] = room
        model = self._by_name.get(name)
        if model is None:
            return False
        window = min(room, self._own_windows[name])
        self._by_name[name] = replace(model, window=window)
        return window != model.window

    def info(self) -> list[tokenizer_pb2.ModelInfo]:
        return [
            tokenizer_pb2.ModelInfo(name=m.name, window=m.window, created=m.created)
            for m in self._by_name.values()
        ]


def load(spec: ModelSpec, max_window: int = 0) -> ServedModel:
    """Reads a checkpoint's tokenizer and config.json. Blocking, up to seconds.

    `max_window` bounds the window below the checkpoint's own; 0: no bound. Raises ValueError or
    OSError that name the model.
    """
    folder = locate(spec, weights=False)
    tokenizer = _tokenizer(spec, folder)
    backend: Tokenizer = tokenizer.backend_tokenizer
    # Cutting and padding are the context assembly's business, whatever tokenizer.json says.
    backend.no_truncation()
    backend.no_padding()
    config = _config(spec, folder)
    window = int(config["max_position_embeddings"])
    model = ServedModel(
        name=spec.name,
        tokenizer=backend,
        encoder=PromptEncoder(backend),
        template=ChatTemplate(tokenizer) if tokenizer.chat_template else None,
        detokenizer=detokenizer_factory(backend),
        window=min(window, max_window) if max_window else window,
        vocab_size=int(config.get("vocab_size") or backend.get_vocab_size()),
        created=int((folder / "config.json").stat().st_mtime),
    )
    log.info("model %s: window %d, vocabulary %d", spec.name, model.window, model.vocab_size)
    return model


def _tokenizer(spec: ModelSpec, folder: Path) -> Any:
    """The checkpoint's transformers tokenizer, one that tokenizers' Rust code backs."""
    try:
        if (folder / "tokenizer.json").exists():
            # Not AutoTokenizer where this suffices: that imports torch, seconds and 300 MB.
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        from transformers import AutoTokenizer

        # Not to say False is to be asked, in a terminal, whether its code may run.
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises many kinds for a folder that is not whole
        why = "code of its own, which is not run" if _wants_code(error) else error
        raise ValueError(f"model {spec.name!r}: no tokenizer in {folder}: {why}") from error
    if not tokenizer.is_fast:
        raise ValueError(f"model {spec.name!r}: {type(tokenizer).__name__} is not supported")
    return tokenizer


def _wants_code(error: Exception) -> bool:
    return "trust_remote_code" in str(error)


def _config(spec: ModelSpec, folder: Path) -> dict[str, Any]:
    """config.json's language part."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"model {spec.name!r}: config.json cannot be read: {error}") from error
    config = config.get("text_config", config)
    if not config.get("max_position_embeddings"):
        raise ValueError(f"model {spec.name!r}: config.json has no max_position_embeddings")
    return dict(config)

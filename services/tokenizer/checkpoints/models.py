"""What the tokenizer needs of a checkpoint: its tokenizer, template and window."""

import json
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from services.common.checkpoints.checkpoint import locate, text_digest
from services.common.checkpoints.sentence_modules import read_modules
from services.common.config import ModelSpec
from services.common.served_models import Checkpoint
from services.tokenizer.answers.answer_shape import KNOWN_MARKS, ReasoningMarks
from services.tokenizer.answers.detokenizer import Detokenizer, detokenizer_factory
from services.tokenizer.answers.token_texts import TokenTexts
from services.tokenizer.checkpoints.kind import PLAIN, Kind, kind_of
from services.tokenizer.checkpoints.own_sampling import read_own
from services.tokenizer.prompts.encode import PromptEncoder
from services.tokenizer.templates.template import ChatTemplate
from services.tokenizer.tool_parsers import Way, way_of

log = logging.getLogger(__name__)

_IMPORTING = threading.Lock()
"""transformers puts another module in its place at the end of its import: a thread that waited for
another's has the first one, in which nothing is."""


@dataclass(frozen=True)
class ServedModel:
    """What of a checkpoint the tokenizer needs. Safe to use from several threads."""

    name: str
    checkpoint: str  # its digest
    tokenizer: Tokenizer
    encoder: PromptEncoder
    template: ChatTemplate | None  # None: completions only
    detokenizer: Callable[[], Detokenizer]  # a new one for each request's output
    way: Way | None  # how it writes calls of tools
    with_calls: Callable[[], Detokenizer]  # as `detokenizer`; shows the marks of calls, too
    reasoning_marks: ReasoningMarks | None
    window: int  # tokens, prompt and output together
    vocab_size: int  # ids that the model has an embedding for
    created: int  # Unix seconds
    kind: Kind = PLAIN
    sampling: Mapping[str, float] = field(default_factory=dict)  # own_sampling.py
    parent: str = ""  # of an adapter: the model whose workers compute with it
    base: str = ""  # and that one's checkpoint

    @property
    def routed_as(self) -> str:
        """The model that routers know its workers by."""
        return self.parent or self.name

    def adapted(self, served: Checkpoint) -> "ServedModel":
        """With an adapter of its checkpoint: what a tokenizer reads stays the same."""
        return replace(
            self,
            name=served.model,
            checkpoint=served.digest,
            parent=self.name,
            base=self.checkpoint,
        )

    @cached_property
    def token_texts(self) -> TokenTexts:
        return TokenTexts(self.tokenizer)

    def decode(self, token_ids: Sequence[int]) -> str:
        """All of the text, special tokens too."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)


@dataclass(frozen=True)
class Parsers:
    """Chosen by hand; empty: as the checkpoint says."""

    tools: str = ""
    reasoning: str = ""  # or "none"


def load(
    served: Checkpoint,
    max_window: int = 0,
    parsers: Parsers = Parsers(),
    own_sampling: bool = True,
) -> ServedModel:
    """Reads a checkpoint's tokenizer and config.json. Blocking, up to seconds.

    `max_window` bounds the window below the checkpoint's own; 0: no bound. `own_sampling`: its
    defaults are taken. Raises ValueError or
    OSError that name the model; a strange file may make the libraries raise anything else.
    """
    spec = ModelSpec(name=served.model, path=served.path)
    folder = locate(spec, weights=False)
    if (found := text_digest(folder)) != served.text_digest:
        raise ValueError(
            f"model {spec.name!r}: {folder} is not what its workers have read: its text digest is "
            f"{found}, and theirs {served.text_digest}"
        )
    tokenizer = _tokenizer(spec, folder)
    backend: Tokenizer = tokenizer.backend_tokenizer
    # Cutting and padding are the context assembly's business, whatever tokenizer.json says.
    backend.no_truncation()
    backend.no_padding()
    config = _config(spec, folder)
    window = int(config["max_position_embeddings"])
    template = ChatTemplate(tokenizer) if tokenizer.chat_template else None
    added = {t.content: id for id, t in backend.get_added_tokens_decoder().items()}
    marks = _marks(added, parsers.reasoning)
    calls = template is not None and template.takes_tools
    way = way_of(template.source, added, parsers.tools) if template and calls else None
    shown = [marks.opens, marks.closes] if marks else []
    read_by = [*shown, *(way.markers if way else ())]
    if template:
        template.reads_by(read_by)
    model = ServedModel(
        name=spec.name,
        checkpoint=served.digest,
        tokenizer=backend,
        encoder=PromptEncoder(backend, template.control if template else ()),
        template=template,
        detokenizer=detokenizer_factory(backend, shown),
        way=way,
        with_calls=detokenizer_factory(backend, read_by),
        reasoning_marks=marks,
        window=min(window, max_window) if max_window else window,
        vocab_size=int(config.get("vocab_size") or backend.get_vocab_size()),
        created=int((folder / "config.json").stat().st_mtime),
        kind=kind_of(config, read_modules(folder)),
        sampling=read_own(folder) if own_sampling else {},
    )
    log.info("model %s: window %d, vocabulary %d", served, model.window, model.vocab_size)
    return model


def _marks(added: Collection[str], name: str) -> ReasoningMarks | None:
    """`added`: tokens of their own."""
    if name:
        return KNOWN_MARKS.get(name)
    known = KNOWN_MARKS.values()
    return next((m for m in known if m.opens in added and m.closes in added), None)


def _tokenizer(spec: ModelSpec, folder: Path) -> Any:
    """The checkpoint's transformers tokenizer, one that tokenizers' Rust code backs."""
    try:
        if (folder / "tokenizer.json").exists():
            # Not AutoTokenizer where this suffices: that imports torch, seconds and 300 MB.
            with _IMPORTING:
                from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        with _IMPORTING:
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

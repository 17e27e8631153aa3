"""A GGUF file's tokenizer as tokenizer.json and tokenizer_config.json would have it.

Byte-level BPE ("gpt2", with the pre-tokenizers below) and SentencePiece's BPE ("llama"). The file
names its pre-tokenizer and does not describe it, so one that is not known here is refused: then
tokenizer.json is to lie beside the file.
"""

import logging
from typing import Any

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from services.common.checkpoints.gguf.header import Header, UnsupportedGguf
from services.common.checkpoints.gguf.hub_config import (
    CONTROL,
    UNUSED,
    mistyped,
    token_types_of,
    tokens_of,
)

log = logging.getLogger(__name__)

_USER_DEFINED = 4
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = {"llama-bpe": _WORDS % "{1,3}", "qwen2": _WORDS % ""}
_KNOWN = ("gpt-2", "smollm", *_PATTERNS)
_MOST_CHARACTERS = 256
"""Of a token that merges make: each way of cutting it in two is looked up."""
_MOST_MERGES = 2**20
"""Of SentencePiece: Gemma's quarter of a million tokens make some 600,000, and could 60 times."""
_MOST_ADDED = 2**20
"""Characters of all tokens that are found in a text before it is cut: some 90 bytes for each."""
_SPACE = "▁"


def tokenizer_of(header: Header) -> Tokenizer:
    """Raises UnsupportedGguf."""
    kind = header.one("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise header.refusal(_refused(f"tokenizer.ggml.model {kind!r}"))
    try:
        tokenizer = _byte_level(header) if kind == "gpt2" else _sentence_pieces(header)
        _add_tokens(header, tokenizer)
        _around(header, tokenizer)
    except UnsupportedGguf:
        raise
    except Exception as error:  # the library raises no narrower kind
        raise header.refusal(f"its vocabulary: {error}") from error
    return tokenizer


def _add_tokens(header: Header, tokenizer: Tokenizer) -> None:
    """Those that are found in a text before it is cut."""
    tokens = tokens_of(header)
    if others := mistyped(header):
        named = ", ".join(repr(tokens[id][:40]) for id in others[:8])
        log.warning("%s: %d taken for control tokens: %s", header.path, len(others), named)
    for type_, special in ((CONTROL, True), (_USER_DEFINED, False)):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, its in zip(tokens, token_types_of(header), strict=True)
            if its == type_ and token
        ]
        if sum(len(token.content) for token in added) > _MOST_ADDED:
            raise header.refusal(f"tokens of type {type_} have more than {_MOST_ADDED} characters")
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)


def tokenizer_config_of(header: Header) -> dict[str, Any]:
    found: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        if (token := _token(header, key)) is not None:
            found[f"{name}_token"] = token
    template = header.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        found["chat_template"] = template
    return found


def check_agrees(header: Header, tokenizer: Tokenizer) -> None:
    """That one that lies beside the file is of its model. Raises UnsupportedGguf."""
    tokens = tokens_of(header)
    for token, id in tokenizer.get_vocab(with_added_tokens=False).items():
        if id >= len(tokens) or tokens[id] != token:
            own = repr(tokens[id]) if id < len(tokens) else "none"
            raise header.refusal(
                f"the tokenizer.json beside it is of another model: token {id} is {token!r} "
                f"there, {own} here"
            )


def _byte_level(header: Header) -> Tokenizer:
    pre = header.one("tokenizer.ggml.pre")
    if pre not in _KNOWN:
        raise header.refusal(_refused(f"tokenizer.ggml.pre {pre!r}"))
    vocabulary, merges = _vocabulary(header), []
    told = header.metadata.get("tokenizer.ggml.merges")
    if not isinstance(told, list):
        raise header.refusal("tokenizer.ggml.merges is no list of texts")
    for merge in told:
        pair = tuple(merge.split(" "))
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocabulary.keys():
            raise header.refusal(f"tokenizer.ggml.merges {merge!r} is not of two tokens")
        merges.append(pair)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in _PATTERNS)
    first: list[Any] = []
    if pre in _PATTERNS:
        first = [pre_tokenizers.Split(Regex(_PATTERNS[pre]), "isolated")]
    if pre == "smollm":
        first = [pre_tokenizers.Digits(individual_digits=True)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, bytes_]) if first else bytes_
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_pieces(header: Header) -> Tokenizer:
    vocabulary, tokens = _vocabulary(header), tokens_of(header)
    scores = header.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(tokens):
        raise header.refusal(f"tokenizer.ggml.scores is no list of {len(tokens)} numbers")
    unknown = _token(header, "unknown")
    merges = _merges(header, vocabulary, [float(score) for score in scores])
    model = models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer, prefixed = Tokenizer(model), _flag(header, "add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefixed else spaces
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefixed else []),
        ]
    )
    return tokenizer


def _merges(
    header: Header, vocabulary: dict[str, int], scores: list[float]
) -> list[tuple[str, str]]:
    """SentencePiece has none: of two neighbours that make a token the one with the best score is
    made first, and so merges lie in the order of what they make."""
    types, found = token_types_of(header), []
    for token, id in vocabulary.items():
        if types[id] != 1:
            continue
        if len(token) > _MOST_CHARACTERS:
            raise header.refusal(f"token {id} has {len(token)} characters, at most 256 are read")
        cuts = range(1, len(token))
        pairs = [
            (token[:at], token[at:])
            for at in cuts
            if token[:at] in vocabulary and token[at:] in vocabulary
        ]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        found += [(-scores[id], len(left), len(right), left, right) for left, right in pairs]
        if len(found) > _MOST_MERGES:
            raise header.refusal(f"its tokens make more than {_MOST_MERGES} merges")
    found.sort(key=lambda merge: merge[:3])
    return [merge[3:] for merge in found]


def _around(header: Header, tokenizer: Tokenizer) -> None:
    """Tokens that each text begins and ends with."""
    pieces = header.metadata["tokenizer.ggml.model"] == "llama"
    usual = pieces or header.metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    begins = _flag(header, "add_bos_token", usual) and _token(header, "bos")
    ends = _flag(header, "add_eos_token", False) and _token(header, "eos")
    if not (begins or ends):
        return
    around = [token for token in (begins, ends) if token]
    if any(token.startswith("$") for token in around):  # a template's word for the text itself
        raise header.refusal(f"texts begin or end with {' or '.join(map(repr, around))}")

    def template(text: str, number: int) -> list[str]:
        first, last = [f"{begins}:{number}"] if begins else [], [f"{ends}:{number}"] if ends else []
        return [*first, f"${text}:{number}", *last]

    byte_level = [] if pieces else [processors.ByteLevel(trim_offsets=False)]
    whole = processors.TemplateProcessing(
        single=template("A", 0),
        pair=template("A", 0) + template("B", 1),
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in around],
    )
    tokenizer.post_processor = processors.Sequence([*byte_level, whole])


def _vocabulary(header: Header) -> dict[str, int]:
    found: dict[str, int] = {}
    for id, (token, type_) in enumerate(
        zip(tokens_of(header), token_types_of(header), strict=True)
    ):
        if type_ == UNUSED:
            continue
        if token in found:
            raise header.refusal(f"tokenizer.ggml.tokens: {token!r} is there twice")
        found[token] = id
    return found


def _token(header: Header, which: str) -> str | None:
    id = header.metadata.get(f"tokenizer.ggml.{which}_token_id")
    tokens = tokens_of(header)
    return tokens[id] if type(id) is int and 0 <= id < len(tokens) else None


def _flag(header: Header, name: str, usual: bool) -> bool:
    value = header.one(f"tokenizer.ggml.{name}", usual)
    if not isinstance(value, bool):
        raise header.refusal(f"tokenizer.ggml.{name} {value!r} is neither true nor false")
    return value


def _refused(what: str) -> str:
    return f"{what} is not known here: its model's tokenizer.json is to lie beside the file"

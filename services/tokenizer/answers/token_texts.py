"""Single tokens as texts and bytes, for those who want to know what the model thought of them."""

from collections.abc import Sequence

from tokenizers import Tokenizer

from protos.common_pb2 import TokenLogprobs
from protos.tokenizer_pb2 import TextLogprob
from services.tokenizer.answers.detokenizer import detokenizer_factory, token_bytes


class TokenTexts:
    """Of one model's tokens. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes = token_bytes(tokenizer)
        added = tokenizer.get_added_tokens_decoder().items()
        self._special = frozenset(id for id, token in added if token.special)
        shown = [token.content for _, token in added if token.special]
        self._detokenizers = [detokenizer_factory(tokenizer, some) for some in ((), shown)]

    def is_special(self, id: int) -> bool:
        """It gives no text."""
        return id in self._special

    def told(self, id: int, logprobs: TokenLogprobs | None, offset: int) -> TextLogprob:
        """None: there are none, as of a prompt's first token."""
        if logprobs is None:
            return TextLogprob(token=self._candidate(id, 0.0), offset=offset)
        best = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
        return TextLogprob(
            token=self._candidate(id, logprobs.logprob),
            top=[self._candidate(other, logprob) for other, logprob in best],
            offset=offset,
        )

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:
        """Of a prompt's tokens, in its text: which holds the special ones if they were given as
        ids, and not if the tokenizer put them there."""
        found: list[int] = []
        for new in self._detokenizers:
            detokenizer, made, found = new(), "", []
            for id in ids:
                found.append(min(len(made), len(text)))
                made += detokenizer.push((id,))
            if made + detokenizer.flush() == text:
                break
        return found

    def _candidate(self, id: int, logprob: float) -> TextLogprob.Candidate:
        data = self._bytes(id)
        text = data.decode("utf-8", "replace")
        return TextLogprob.Candidate(text=text, bytes=data, logprob=max(logprob, _LEAST))


_LEAST = -9999.0  # JSON has no infinity; OpenAI's API tells the same of what is impossible


def bad_words(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """The words' tokens, at a text's beginning and behind a space: as a model mostly has them."""
    found = {}
    for word in words:
        for text in (word, f" {word}"):
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            found[tuple(ids)] = ids
    return [ids for ids in found.values() if ids]

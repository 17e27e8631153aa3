"""Texts as bags of words, for BM25 in either store.

A text's language is not known, and a question of five words does not tell its own. So a word is
what stands between characters that are no letters or digits, small and without accents, and is kept
up to its seventh letter: what endings a stemmer would take off lie behind, in every language alike.
Of scripts that put no spaces between words each two neighbouring characters are one. No word is
left out as too common: IDF weighs it.
"""

import re

import qdrant_edge

from services.retrieval.index.points import Sparse

_MEAN_WORDS = 80.0  # of a chunk, for BM25's norm of lengths
# Thai, Lao, Burmese, Khmer, Japanese, Chinese.
_SPACELESS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff"
_RUN = re.compile(f"[{_SPACELESS}]+")
_ENDING = re.compile(rf"(?<=[^\W\d_{_SPACELESS}]{{7}})[^\W\d_{_SPACELESS}]+")

_bm25 = qdrant_edge.Bm25(
    qdrant_edge.Bm25Config(
        avg_len=_MEAN_WORDS,
        tokenizer=qdrant_edge.TokenizerType.Word,
        ascii_folding=True,
        stopwords=qdrant_edge.StopwordsSet(),
        stemmer=qdrant_edge.DisabledStemmer(),
    )
)


def of_passage(text: str) -> Sparse:
    made = _bm25.embed_document(_words(text))
    return Sparse(made.indices, made.values)


def of_question(text: str) -> Sparse:
    """Of a text without words it is empty."""
    made = _bm25.embed_query(_words(text))
    return Sparse(made.indices, made.values)


def _words(text: str) -> str:
    return _RUN.sub(_pairs, _ENDING.sub("", text))


def _pairs(run: re.Match[str]) -> str:
    characters = run[0]
    pairs = (characters[at : at + 2] for at in range(max(1, len(characters) - 1)))
    return f" {' '.join(pairs)} "

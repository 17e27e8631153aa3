"""Texts as bags of words, for BM25 in either store.

A text's language is not known, and a question of five words does not tell its own. So words are
found as Unicode has them (Chinese and its like by dictionary), written small and without accents,
and kept up to their sixth letter: nearly what a stemmer does, in every language alike. No word is
left out as too common; IDF weighs it.
"""

import re

import qdrant_edge

from services.retrieval.index.points import Sparse

_MEAN_WORDS = 80.0  # of a chunk, for BM25's norm of lengths

# The rest of a longer word; of scripts that put spaces between words alone.
_SPACELESS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff"
_REST = re.compile(rf"(?<=[^\W\d_{_SPACELESS}]{{6}})[^\W\d_{_SPACELESS}]+")

_bm25 = qdrant_edge.Bm25(
    qdrant_edge.Bm25Config(
        avg_len=_MEAN_WORDS,
        tokenizer=qdrant_edge.TokenizerType.Multilingual,
        ascii_folding=True,
        stopwords=qdrant_edge.StopwordsSet(),
        stemmer=qdrant_edge.DisabledStemmer(),
    )
)


def of_passage(text: str) -> Sparse:
    made = _bm25.embed_document(_REST.sub("", text))
    return Sparse(made.indices, made.values)


def of_question(text: str) -> Sparse:
    """Of a text without words it is empty."""
    made = _bm25.embed_query(_REST.sub("", text))
    return Sparse(made.indices, made.values)

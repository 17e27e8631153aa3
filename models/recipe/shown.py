"""What a question brings from a set of documents, as the retrieval service hands it over.

Its own cutting into chunks and joining of neighbours, at its defaults; the search is by MiniLM's
embeddings alone, where the service's counts words beside them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from models.recipe import minilm
from models.recipe.conversation import Document
from protos.retrieval_pb2 import Section
from services.common.config.retrieval import RetrievalSettings
from services.gateway.stores.retrieval.joining import chunks_of, joined
from services.retrieval.documents.chunking import chunk
from services.retrieval.documents.chunks import passage
from services.retrieval.documents.sections import sections
from services.retrieval.index.points import Hit
from services.retrieval.search.passages import passages_of


@dataclass
class Shelf:
    """The chunks of some documents, and what they mean."""

    payloads: list[dict[str, object]]
    meanings: Tensor  # (chunks, minilm.WIDTH)

    @classmethod
    def of(cls, documents: list[Document]) -> "Shelf":
        settings = RetrievalSettings()
        _, wordpiece = minilm.reader()
        made = []
        for number, document in enumerate(documents):
            text = document["text"]
            parts = [Section(headings=path, text=text[a:b]) for path, a, b in sections(text)]
            cuts = chunk(
                parts,
                lambda words: wordpiece.encode(words, add_special_tokens=False),
                document["title"],
                settings.chunk_tokens,
                settings.chunk_overlap_tokens,
            )
            for position, cut in enumerate(cuts):
                section = parts[cut.section].text
                made.append(
                    {
                        "collection": "shelf", "source_id": str(number), "revision": 0,
                        "position": position, "title": cut.title, "start": cut.start,
                        "end": cut.end, "lead": cut.lead.end - cut.lead.start if cut.lead else 0,
                        "text": passage(section, cut.start, cut.end, cut.lead), "attributes": {},
                    }
                )  # fmt: skip
        return cls(made, minilm.encode([f"{one['title']}\n{one['text']}" for one in made]))

    def brings(self, question: str) -> list[tuple[int, Document]]:
        """The passages for a question, and the number of the document that each is of."""
        likes = self.meanings @ minilm.encode([question])[0]
        order = torch.argsort(likes, descending=True)[:20].tolist()
        hits = [Hit(self.payloads[i], float(likes[i]), float(likes[i]), 0.0) for i in order]
        found = joined(chunks_of(passages_of(hits, 0.0, RetrievalSettings().top_k)))
        return [(int(one.source_id), {"title": one.title, "text": one.text}) for one in found]

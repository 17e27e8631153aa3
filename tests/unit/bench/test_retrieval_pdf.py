"""The PDFs that indexing is measured with: what a reader of PDF finds in them."""

from bench.retrieval.pdf import LINES, pages_of, pdf, pdfs
from bench.retrieval.sets import Document
from services.retrieval.documents.chunks import Limits
from services.retrieval.documents.loaders.pdf import load

LIMITS = Limits(chars=10_000_000, pages=1000, unpacked_bytes=100_000_000)
TABLE = "| depot | opens (at) |\n| --- | --- |\n| Mill Lane | 8:40 |"
DOCUMENTS = [
    Document("1", "Depots \\ all", f"{TABLE}\n\nLorries wait.\n\n{'A word. ' * 600}"),
    Document("2", "Ferries", "The last one sails at 9. " * 300),
]


def test_headings_are_the_outlines_and_rows_stay_lines() -> None:
    sections, note = load(pdf(pages_of(DOCUMENTS)), LIMITS)
    assert not note
    assert [[*one.headings] for one in sections] == [["Depots \\ all"], ["Ferries"]]
    lines = sections[0].text.split("\n")
    assert "depot opens (at)" in lines
    assert "Mill Lane 8:40" in lines
    assert "Lorries wait." in lines
    assert sections[1].page > 1


def test_a_page_is_full_before_the_next_begins() -> None:
    pages = [*pages_of(DOCUMENTS)]
    assert len(pages) > 1
    assert {len(page) for page in pages} == {LINES}


def test_as_many_pages_as_are_asked_for() -> None:
    files = pdfs(120)
    found = [load(one, LIMITS)[0] for one in files]
    assert len(found) == 3
    assert [max(one.page for one in sections) for sections in found] == [50, 50, 20]

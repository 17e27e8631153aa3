"""What each kind of document says, as sections: its text, headings, tables, pages and rows."""

import codecs
import io
import zipfile

import docx
import pptx
import pytest
from docx.oxml import OxmlElement

from services.retrieval.documents.chunks import Limits, RefusedError
from services.retrieval.documents.kinds import SUFFIXES, Kind, kind_of
from services.retrieval.documents.loading import load
from tests.support.documents import pdf

LIMITS = Limits(chars=100_000, pages=50, unpacked_bytes=2**24)


def read(name: str, content: bytes | str, limits: Limits = LIMITS) -> list[tuple[list[str], str]]:
    """Headings and text of each section."""
    sections, _ = load(name, content if isinstance(content, bytes) else content.encode(), limits)
    return [(list(section.headings), section.text) for section in sections]


def refused(name: str, content: bytes, limits: Limits = LIMITS) -> tuple[str, str]:
    with pytest.raises(RefusedError) as raised:
        load(name, content, limits)
    return raised.value.words, raised.value.reason


def word(document: "docx.document.Document") -> bytes:
    out = io.BytesIO()
    document.save(out)
    return out.getvalue()


def slides(presentation: "pptx.presentation.Presentation") -> bytes:
    out = io.BytesIO()
    presentation.save(out)
    return out.getvalue()


# ---- PDF ----------------------------------------------------------------------------------------


def test_a_pdf_is_its_pages_below_the_titles_of_its_outline() -> None:
    pages = [
        "Foreword",
        "Fees\nTwo coins a day",
        "for each boat.\nTides\nHigh at six.",
        "Low.",
    ]
    content = pdf(pages, [("Fees", 1), ("Tides", 2), ("Nowhere", 3)])
    sections, note = load("guide.pdf", content, LIMITS)
    told = [(list(one.headings), " ".join(one.text.split()), one.page) for one in sections]
    assert told == [
        ([], "Foreword", 1),
        (["Fees"], "# Fees Two coins a day for each boat.", 2),
        (["Tides"], "# Tides High at six. Low.", 3),
    ]
    assert [one.text.count("\f") for one in sections] == [1, 1, 1]
    assert note == ""


def test_pages_without_text_are_told_and_a_pdf_without_any_is_refused() -> None:
    _, note = load("a.pdf", pdf(["One.", "", " ", "Four."]), LIMITS)
    assert note == "has no text on 2 of its 4 pages"
    words, reason = refused("a.pdf", pdf(["", ""]))
    assert "it is scanned" in words
    assert reason == "invalid_file"


def test_a_pdf_that_is_locked_broken_or_too_long_is_refused_in_words() -> None:
    assert "encrypted" in refused("a.pdf", pdf(["Secret."], encrypted=True))[0]
    assert refused("a.pdf", b"%PDF-1.4\nnothing") == ("is a broken PDF", "invalid_file")
    words, reason = refused("a.pdf", pdf(["x"] * 51))
    assert (words, reason) == ("has 51 pages, more than 50, the limit", "document_too_large")
    long = refused("a.pdf", pdf(["word " * 20] * 9), LIMITS._replace(chars=500))
    assert long[1] == "document_too_large"


# ---- HTML ---------------------------------------------------------------------------------------

PAGE = """<!DOCTYPE html><html><head><title>Harbour</title><style>p {}</style></head><body>
<nav><a href="/">Home</a></nav><h1>Fees</h1>
<p>Boats pay <b>two</b> coins, see <a href="http://example.org/x">the list</a>.</p>
<script>alert("x")</script><p hidden>Old.</p>
<ul><li>Small<li>Large <ul><li>Very large</ul></ul>
<table><thead><tr><th>Boat<th>Price</thead><tr><td>Big | wide<td>4<br>coins</table>
<h2>Winter</h2>One coin.<div>Or<br>none.</div><pre>a
  b</pre></body></html>"""


def test_a_page_is_its_text_with_headings_lists_tables_and_the_words_of_links() -> None:
    assert read("a.html", PAGE) == [
        (
            ["Harbour", "Fees"],
            "# Harbour\n\n# Fees\n\nBoats pay two coins, see the list.\n\n"
            "- Small\n- Large\n- Very large\n\n"
            "| Boat | Price |\n| --- | --- |\n| Big \\| wide | 4 coins |\n\n",
        ),
        (["Harbour", "Fees", "Winter"], "## Winter\n\nOne coin.\n\nOr\nnone.\n\na\n  b\n\n"),
    ]


def test_of_a_page_with_one_main_part_the_rest_is_left_out() -> None:
    page = "<body><div>Menu</div><main><p>Text.</p></main><div>Imprint</div>"
    assert read("a.html", page) == [([], "Text.\n\n")]
    layout = "<table><tr><td><h2>Head</h2>Left.</td></tr></table><table><tr><td>One.</table>"
    assert read("a.htm", layout) == [(["Head"], "## Head\n\nLeft.\n\nOne.\n\n")]


def test_a_page_is_in_the_encoding_that_it_declares() -> None:
    page = '<html><meta charset="iso-8859-5"><p>Гавань открыта</p>'
    assert "Гавань" in read("a.html", page.encode("iso-8859-5"))[0][1]


# ---- Office -------------------------------------------------------------------------------------


def test_a_word_document_is_its_blocks_in_their_order() -> None:
    document = docx.Document()
    document.add_heading("Harbour", 0)
    document.add_heading("Fees", 1)
    document.add_paragraph("Boats pay two coins.")
    for style in ("List Bullet", "List Number"):
        document.add_paragraph("An item", style=style)
    table = document.add_table(2, 3)
    for at, text in enumerate(("Boat", "Price", "Since", "Small", "2", "")):
        table.cell(at // 3, at % 3).text = text
    table.cell(1, 1).merge(table.cell(1, 2))
    document.add_heading("Winter", 2)
    document.add_paragraph("One coin.")
    assert read("a.docx", word(document)) == [
        (
            ["Harbour", "Fees"],
            "# Harbour\n\n# Fees\n\nBoats pay two coins.\n\n- An item\n- An item\n\n"
            "| Boat | Price | Since |\n| --- | --- | --- |\n| Small | 2 |\n\n",
        ),
        (["Harbour", "Fees", "Winter"], "## Winter\n\nOne coin.\n\n"),
    ]


def test_pages_of_a_word_document_are_those_that_word_noted() -> None:
    document = docx.Document()
    for number in range(1, 4):
        paragraph = document.add_paragraph(f"On page {number}.")
        if number > 1:
            paragraph.runs[0]._r.insert(0, OxmlElement("w:lastRenderedPageBreak"))
    document.add_heading("Next", 1)
    document.add_paragraph("Still on page 3.")
    first, second = load("a.docx", word(document), LIMITS)[0]
    assert (first.page, first.text.count("\f"), second.page) == (1, 2, 3)
    assert first.text.split("\f")[1].strip() == "On page 2."


def test_each_slide_is_a_section_of_its_page() -> None:
    show = pptx.Presentation()
    one = show.slides.add_slide(show.slide_layouts[1])
    one.shapes.title.text = "Fees"
    one.placeholders[1].text = "Two coins\nOne in winter"
    one.notes_slide.notes_text_frame.text = "Say it slowly."
    two = show.slides.add_slide(show.slide_layouts[6])
    table = two.shapes.add_table(2, 2, 0, 0, 9, 9).table
    for at, text in enumerate(("Boat", "Price", "Small", "2")):
        table.cell(at // 2, at % 2).text = text
    group = two.shapes.add_group_shape()
    group.shapes.add_textbox(0, 0, 9, 9).text_frame.text = "In a group"
    sections, _ = load("a.pptx", slides(show), LIMITS)
    assert [(list(one.headings), one.page, one.text) for one in sections] == [
        (["Fees"], 1, "# Fees\n\n- Two coins\n- One in winter\n\nSay it slowly.\n\n"),
        ([], 2, "| Boat | Price |\n| --- | --- |\n| Small | 2 |\n\nIn a group\n\n"),
    ]
    words, _ = refused("a.pptx", slides(show), LIMITS._replace(pages=1))
    assert words == "has 2 slides, more than 1, the limit"


# ---- tables and values --------------------------------------------------------------------------


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_each_row_of_a_table_has_its_columns_names(delimiter: str) -> None:
    rows = [["Boat", "Price", "Town"], ["Ada", '"2,5; or 3|4"', "Kiel"], ["Bo", "", '"New\nYork"']]
    content = "\n".join(delimiter.join(row) for row in [*rows, [], ["Cy"]])
    first, second = load("a.csv", content.encode(), LIMITS)[0]
    assert first.text == "Boat: Ada; Price: 2,5; or 3|4; Town: Kiel\nBoat: Bo; Town: New York"
    assert (first.row, second.row, second.text) == (2, 5, "Boat: Cy")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"Boat,Price", "has a header and no rows below it"),
        (b"Boat,Price\n\n,\n", "has a header and no rows below it"),
        (b"", "has no text"),
        (b",\n,\n", "has no text"),
    ],
)
def test_a_table_that_says_nothing_is_refused(content: bytes, words: str) -> None:
    with pytest.raises(RefusedError, match=f"^{words}$"):
        load("a.csv", content, LIMITS)


def test_a_table_without_a_header_has_numbered_columns() -> None:
    (only,) = load("a.csv", b"Ada,2\nBo,3,x\n", LIMITS)[0]
    assert (only.row, only.text) == (
        1, "column 1: Ada; column 2: 2\ncolumn 1: Bo; column 2: 3; column 3: x")  # fmt: skip


def test_json_is_records_or_the_paths_of_its_values() -> None:
    records = '[{"town": "Kiel", "at": {"x": 1, "y": [2, true]}}, {"town": null}, {"town": "Ulm"}]'
    one, three = load("a.json", records.encode(), LIMITS)[0]
    assert (one.row, one.text) == (1, "town: Kiel; at.x: 1; at.y[0]: 2; at.y[1]: true")
    assert (three.row, three.text) == (3, "town: Ulm")
    assert read("a.json", '{"a": {"b": ["x", 2.5]}, "c": "", "d": "y"}') == [
        ([], "a.b[0]: x\na.b[1]: 2.5\nd: y\n")
    ]
    lines = '{"town": "Kiel"}\n\n{"town": "Ulm"}\n'
    assert [(s.row, s.text) for s in load("a.jsonl", lines.encode(), LIMITS)[0]] == [
        (1, "town: Kiel"),
        (3, "town: Ulm"),
    ]
    assert refused("a.json", b'{"a":\n 1,}')[0].endswith("(line 2)")
    assert refused("a.jsonl", b'{"a": 1}\n{"b"}')[0].endswith("(line 2)")


# ---- text ---------------------------------------------------------------------------------------


def test_headings_are_markdown_s_and_source_code_has_none() -> None:
    text = "# Fees\nTwo.\n## Winter\nOne.\n"
    for name in ("a.md", "a.txt", "A.MARKDOWN"):
        assert [path for path, _ in read(name, text)] == [["Fees"], ["Fees", "Winter"]]
    for name in ("a.py", "a", "a.unknown"):
        assert read(name, text) == [([], text)]


@pytest.mark.parametrize(
    "encoding",
    ["utf-8", "utf-8-sig", "utf-16", "utf-32", "cp1252", "koi8-r", "shift_jis", "gb18030"],
)
def test_text_is_read_in_the_encoding_that_it_is_in(encoding: str) -> None:
    text = {
        "koi8-r": "Гавань открывается в шесть часов утра, лодки платят две монеты. " * 5,
        "shift_jis": "港は朝六時に開きます。船は一日に二枚の硬貨を払います。" * 5,
        "gb18030": "港口每天早上六点开放。每条船每天要付两枚硬币。" * 5,
    }.get(encoding, "Für Größe und Länge gelten höhere Gebühren: täglich fünf Münzen. " * 5)
    assert read("a.txt", text.encode(encoding)) == [([], text)]


def test_line_ends_are_one_kind_and_no_text_is_refused() -> None:
    assert read("a.py", b"a\r\nb\rc\n") == [([], "a\nb\nc\n")]
    assert refused("a.txt", codecs.BOM_UTF16_LE + b"\x00\xd8x")[0].startswith(
        "is not the utf-16-le"
    )
    assert refused("a.txt", b"x" * 2000 + b"\0")[0] == "is not text"
    assert refused("a.md", b" \n\t") == ("has no text", "invalid_file")
    words, reason = refused("a.txt", b"x" * 100_001)
    assert (words, reason) == (
        "has more than 100,000 characters of text, the limit",
        "document_too_large",
    )


# ---- kinds --------------------------------------------------------------------------------------


def test_what_a_file_is_its_content_says_before_its_name() -> None:
    document = word(docx.Document())
    assert kind_of("a.docx", document) == (Kind.DOCX, "")
    assert kind_of("a", document) == (Kind.DOCX, "")
    note = "is called .pdf and was read as Word document (.docx)"
    assert kind_of("Report.pdf", document) == (Kind.DOCX, note)
    assert kind_of("a.txt", PAGE.encode()) == (Kind.HTML, "is called .txt and was read as HTML")
    assert kind_of("a.txt", b"A PDF begins with %PDF-1.4.") == (Kind.MARKDOWN, "")
    assert kind_of("a.pdf", b"\n\n%PDF-1.4") == (Kind.PDF, "")
    for name in ("a.pdf", "a.docx", "a.pptx"):
        assert refused(name, b"Some text.")[0].startswith(f"is called {name[1:]} and is no ")
    assert all(suffix == suffix.lower() for suffix in SUFFIXES)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x89PNG\r\n\x1a\n", "is an image"),
        (b"{\\rtf1 x}", "is an RTF document: save it as .docx"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"x" * 99, "is of an old Office format"),
        (
            b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + "EncryptedPackage".encode("utf-16-le"),
            "is encrypted",
        ),
        (b"\x7fELF\0\0\0", "is neither text nor"),
        (b"PK\x03\x04" + b"x" * 99, "is a broken archive"),
    ],
)
def test_what_is_no_document_is_named(content: bytes, words: str) -> None:
    assert refused("a.txt", content)[0].startswith(words)


@pytest.mark.parametrize(
    ("part", "words"),
    [("xl/workbook.xml", "is a spreadsheet: save it as CSV"), ("x", "is an archive")],
)
def test_archives_of_other_things_are_named(part: str, words: str) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(part, "x")
    told, reason = refused("a.zip", out.getvalue())
    assert told.startswith(words)
    assert reason == "unsupported_file"

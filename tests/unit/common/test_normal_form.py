"""Normal forms of texts: the library's, and of hostile ones soon."""

import time
import unicodedata

import pytest

from services.common.text.normal_form import Form, normalized

MARKS = "\u0301\u0316"  # in the library's order the second stands first


@pytest.mark.parametrize("form", ["NFC", "NFKC"])
@pytest.mark.parametrize(
    "text",
    [
        "Plain  words\n",
        "cafe\u0301 \u00a0 Zu\u0308rich",
        "ﬁne ½ ①\u3000Ｗｉｄｅ",
        "가각 \u1100\u1161\u11a8",
        f"a{MARKS}",
        " \u00a8 ",  # becomes a space and a mark
        "",
    ],
)
def test_it_is_the_librarys(text: str, form: Form) -> None:
    assert normalized(text, form) == " ".join(unicodedata.normalize(form, text).split())
    long = f"{text} " * 300
    assert normalized(long, form) == " ".join(unicodedata.normalize(form, long).split())


@pytest.mark.parametrize("marks", [MARKS * 50_000, "\u0301" * 50_000 + "\u0316" * 50_000])
def test_marks_without_end_on_one_letter_take_no_time(marks: str) -> None:
    """They took a quarter of a minute."""
    began = time.process_time()
    assert len(normalized(f"a{marks}", "NFC")) >= 100_000
    assert time.process_time() - began < 2.0

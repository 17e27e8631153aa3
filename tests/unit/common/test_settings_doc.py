from services.common.settings_doc import DOCUMENT, document


def test_the_settings_page_is_current() -> None:
    assert DOCUMENT.read_text() == document(), "run `make docs`"


def test_names_bounds_and_defaults_are_told() -> None:
    told = document()
    assert "| `PENSTOCK_ROUTER__QUEUE_LIMIT` | whole number ≥ 0 | `256` |" in told
    assert "`REDIS_URL` | secret text | `redis://127.0.0.1:6379/0` |" in told
    assert "| `path` | text | needed |" in told
    assert "Annotated" not in told

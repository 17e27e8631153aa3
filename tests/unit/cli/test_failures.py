"""What a command says when it fails: a line and an exit code, or the stack trace."""

import httpx
import pytest
from pydantic import BaseModel

from services.cli.failures import told
from services.common.config import Settings
from services.common.errors import invalid


class Other(BaseModel):
    number: int


def raised(work: object) -> Exception:
    try:
        work()  # type: ignore[operator]
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("no Penstock runs here"), "no Penstock runs here"),
        (ValueError("--model: two"), "--model: two"),
        (FileNotFoundError("no folder"), "no folder"),
        (TimeoutError(), "TimeoutError"),
        (invalid("too long", "prompt"), "too long"),
        (httpx.ConnectError("refused"), "HTTP: refused"),
        (
            httpx.ConnectError("refused", request=httpx.Request("GET", "http://there/v1")),
            "http://there/v1: refused",
        ),
    ],
)
def test_what_was_foreseen_is_told_in_a_line(error: Exception, line: str) -> None:
    assert told(error) == ([line], 1)


@pytest.mark.parametrize("error", [KeyError("x"), AssertionError("x"), TypeError("x")])
def test_a_bug_is_not_told_in_a_line(error: Exception) -> None:
    assert told(error) == ([], 1)


def test_wrong_settings_are_named_each_as_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_GATEWAY__PORT", "-1")
    monkeypatch.setenv("QDRANT_URL", "x")
    monkeypatch.setenv("PENSTOCK_MODELS", '[{"name": "m"}]')
    lines, code = told(raised(Settings))
    assert code == 2
    assert [line.partition(":")[0] for line in sorted(lines)] == [
        "setting PENSTOCK_GATEWAY__PORT",
        "setting PENSTOCK_MODELS (0.path)",
        "setting QDRANT_URL",
    ]
    monkeypatch.setenv("PENSTOCK_QDRANT_URL", "y")  # it has precedence
    monkeypatch.delenv("PENSTOCK_MODELS")
    lines, _ = told(raised(Settings))
    assert any(line.startswith("setting PENSTOCK_QDRANT_URL: ") for line in lines)


def test_a_model_that_is_not_of_the_settings_is_no_wrong_setting() -> None:
    lines, code = told(raised(lambda: Other(number="x")))  # type: ignore[arg-type]
    assert code == 1
    assert "number" in lines[0]

"""What a command that failed says. Imports nothing: what raised an error is imported already."""

import os
from contextlib import suppress

_ELSEWHERE = {
    "redis": "Redis",
    "ray": "Ray",
    "grpc": "a service",
    "httpx": "HTTP",
    "aiohttp": "HTTP",
}


def told(error: Exception) -> tuple[list[str], int]:
    """The lines for standard error, and the exit code: 2 for a wrong setting, else 1. No lines for
    an error that nobody foresaw: its stack trace is wanted.
    """
    kind = type(error)
    package = kind.__module__.partition(".")[0]
    if kind.__name__ == "ValidationError" and getattr(error, "title", "") == "Settings":
        from services.common.config.complaints import complaints

        return complaints(error), 2  # type: ignore[arg-type]
    if kind.__name__ == "SettingsError" and (value := getattr(error.__cause__, "doc", None)):
        return [_not_json(value)], 2
    if package in _ELSEWHERE:
        return [f"{_where(error, _ELSEWHERE[package])}: {error or kind.__name__}"], 1
    if isinstance(error, RuntimeError | OSError | ValueError) or package == "services":
        return [str(error) or kind.__name__], 1
    return [], 1


def _not_json(value: str) -> str:
    variables = [n for n, v in os.environ.items() if v == value and n.startswith("PENSTOCK_")]
    form = 'a JSON list, as ["one", "two"] or [{"name": "value"}]'
    return f"setting {' or '.join(sorted(variables))}: {value!r} is not JSON; it takes {form}"


def _where(error: Exception, default: str) -> str:
    with suppress(AttributeError, RuntimeError):  # httpx's, where a request was under way
        return str(error.request.url)  # type: ignore[attr-defined]
    return default

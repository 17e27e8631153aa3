"""Which Penstock this is."""

from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as of_package


@cache
def version() -> str:
    """As installed; "unknown" where the code runs without having been."""
    try:
        return of_package("penstock")
    except PackageNotFoundError:
        return "unknown"

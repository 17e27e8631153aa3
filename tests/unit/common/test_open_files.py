"""Limits of open files are raised as far as they may be, and only then."""

import resource
from types import SimpleNamespace

import pytest

from services.common import open_files

UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "becomes"),
    [
        (100, 5000, 1000),
        (100, 1000, 1000),
        (100, 500, 500),
        (100, UNLIMITED, 1000),
        (1000, 5000, None),
        (3000, 5000, None),
        (UNLIMITED, UNLIMITED, None),
        (500, 500, None),
    ],
)
def test_files_are_allowed_as_far_as_they_may(monkeypatch, soft, hard, becomes):
    told: list[tuple[int, int]] = []
    limits = SimpleNamespace(
        RLIMIT_NOFILE=7,
        RLIM_INFINITY=UNLIMITED,
        getrlimit=lambda which: (soft, hard),
        setrlimit=lambda which, limits: told.append(limits),
    )
    monkeypatch.setattr(open_files, "resource", limits)
    open_files.allow_connections(1000 - open_files.OTHER_FILES)
    assert told == ([] if becomes is None else [(becomes, hard)])

"""Findings of `penstock doctor`, for tests."""

from services.cli.commands.doctor.findings import Finding


def about(findings: list[Finding], what: str) -> Finding:
    """The one finding about it."""
    found = [finding for finding in findings if finding.about == what]
    assert len(found) == 1, f"{what!r} in {findings}"
    return found[0]


def state(findings: list[Finding], what: str) -> str:
    return about(findings, what).state

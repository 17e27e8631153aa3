"""Certificates in files: when they are looked at, and which set of them is used meanwhile."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography import x509
from prometheus_client import REGISTRY

from services.common.locks import certificates
from services.common.locks.certificates import Certificate, CertificateFiles
from tests.support.authority import DAY, Authority

AUTHORITY = Authority()


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(certificates, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


def issue(folder: Path) -> bytes:
    """Another set; the certificate that it has."""
    return (AUTHORITY.issue(folder, "a.test") / "tls.crt").read_bytes()


def files(folder: Path, use: str = "test") -> CertificateFiles:
    return CertificateFiles(use, folder / "tls.crt", folder / "tls.key", None)


def test_they_are_looked_at_once_a_second_at_most(tmp_path: Path, clock: Clock) -> None:
    """A handshake costs no read of a file."""
    old = issue(tmp_path)
    own = files(tmp_path)
    new = issue(tmp_path)
    clock.now += 0.9
    assert own.current().chain == old
    clock.now += 0.1
    found = own.current()
    assert found.chain == new
    clock.now += 10
    assert own.current() is found, "as long as they are the same"


def test_what_was_replaced_while_it_was_read_is_read_again_at_once(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = issue(tmp_path)
    own, read = files(tmp_path), CertificateFiles._read
    sets: list[bytes] = []

    def and_replaced(self: CertificateFiles) -> Certificate:
        found = read(self)
        if not sets:
            sets.append(issue(tmp_path))
        return found

    issue(tmp_path)
    monkeypatch.setattr(CertificateFiles, "_read", and_replaced)
    clock.now += 1
    assert own.current().chain == first, "neither of what was there nor half of what is"
    assert own.current().chain == sets[0], "without waiting for the next second"


def test_a_file_in_anothers_place_is_another_though_it_looks_the_same(
    tmp_path: Path, clock: Clock
) -> None:
    issue(tmp_path)
    paths = [tmp_path / "tls.crt", tmp_path / "tls.key"]
    were = [path.stat() for path in paths]
    own = files(tmp_path)
    for path in paths:
        path.rename(f"{path}.was")  # so that its inode is not used again
    new = issue(tmp_path)
    while len(new) > were[0].st_size:  # a signature has a byte more or less
        new = issue(tmp_path)
    for path, was in zip(paths, were, strict=True):
        path.write_bytes(path.read_bytes().ljust(was.st_size, b"\n"))
        os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
        assert (path.stat().st_size, path.stat().st_mtime_ns) == (was.st_size, was.st_mtime_ns)
    clock.now += 1
    assert own.current().chain.strip() == new.strip()


def test_a_handshake_has_a_whole_set_whatever_is_in_the_files_just_then(
    tmp_path: Path, clock: Clock
) -> None:
    issue(tmp_path)
    own = files(tmp_path)
    before = own.ssl_context()
    assert own.ssl_context() is before, "made once"
    issue(tmp_path)
    clock.now += 1
    own.current()
    (tmp_path / "tls.key").write_bytes(b"half a k")
    assert own.ssl_context() is before
    issue(tmp_path)
    clock.now += 1
    assert own.ssl_context() is not before


def test_when_the_certificate_in_use_ends_is_told(tmp_path: Path, clock: Clock) -> None:
    def told() -> float | None:
        labels = {"use": "of this test"}
        return REGISTRY.get_sample_value("penstock_certificate_expiry_timestamp_seconds", labels)

    def ends(chain: bytes) -> float:
        return x509.load_pem_x509_certificate(chain).not_valid_after_utc.timestamp()

    own_ends = ends(issue(tmp_path))
    own = files(tmp_path, "of this test")
    assert told() == own_ends
    AUTHORITY.issue(tmp_path, "a.test", valid=9 * DAY)
    clock.now += 1
    assert ends(own.current().chain) == told()
    assert told() != own_ends

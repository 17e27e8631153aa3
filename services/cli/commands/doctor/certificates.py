"""Certificates in files: whole, of the right name and authority, and not about to end."""

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from services.cli.commands.doctor.findings import Finding, aside, failed, ok, warning
from services.cli.commands.doctor.installation import Installation
from services.common.config import is_loopback
from services.common.discovery import SERVICES
from services.common.locks.certificates import CertificateError, CertificateFiles, dns_name

IDENTITIES = (*SERVICES, "cli")
_SOON = timedelta(days=30)
_LAST_SHARE = 6  # cert-manager renews when a third is left: at a sixth, it has failed to


async def check(it: Installation) -> list[Finding]:
    return await aside(_check, it)


def _check(it: Installation) -> list[Finding]:
    own, folder = it.settings.gateway, it.settings.tls_dir
    found = []
    if own.tls_cert is not None and own.tls_key is not None:
        found.append(_of_files("door certificate", own.tls_cert, own.tls_key, None, ""))
    if folder is None:
        return [*found, _between_services_without(it)]
    for identity in IDENTITIES:
        path = folder / identity
        if path.is_dir():
            files = (path / "tls.crt", path / "tls.key", path / "ca.crt")
            found.append(_of_files(f"certificate {identity}", *files, dns_name(identity)))
        elif identity == "cli":
            found.append(_no_cli(path))
    return found


def _between_services_without(it: Installation) -> Finding:
    about = "certificates"
    if is_loopback(it.settings.bind_host):
        return ok(about, "none between services, which listen on the loopback alone")
    return warning(
        about,
        f"services listen on {it.settings.bind_host} and speak in the clear, the secret with it",
        "set PENSTOCK_TLS_DIR (docs/operations.md)",
    )


def _no_cli(path: Path) -> Finding:
    return failed(
        "certificate cli",
        f"there is no folder {path}: no command can speak with the services",
        f"issue a certificate for {dns_name('cli')}",
    )


def _of_files(about: str, chain: Path, key: Path, authorities: Path | None, name: str) -> Finding:
    """`name`: the DNS name that it must have; empty: any."""
    try:
        found = CertificateFiles(about, chain, key, authorities).current()
    except CertificateError as error:
        return failed(about, str(error), "put the whole set of files in place")
    own, *between = x509.load_pem_x509_certificates(found.chain)
    roots = x509.load_pem_x509_certificates(found.authorities) if found.authorities else []
    if name and name not in names_of(own):
        told = f"is for {', '.join(names_of(own)) or 'no name'}, not for {name}"
        return failed(about, told, f"issue one with the DNS name {name}")
    if roots and not any(_issued(own, issuer) for issuer in [*between, *roots]):
        told = f"{authorities} has not signed it"
        return failed(about, told, "put certificate and authorities of one issuer in place")
    aged = age(about, own)
    if aged.state == "ok" and key.stat().st_mode & stat.S_IROTH:
        return warning(about, f"everyone may read {key}", f"chmod o-r {key}")
    return aged


def age(about: str, certificate: x509.Certificate) -> Finding:
    """Whether it is valid now, and for how long."""
    now = datetime.now(UTC)
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    renew = "renew it; a running Penstock takes new files without a restart"
    if now >= ends:
        return failed(about, f"ended {_days(now - ends)} ago, on {ends:%Y-%m-%d %H:%M} UTC", renew)
    if now < begins:
        told = f"begins only in {_days(begins - now)}, on {begins:%Y-%m-%d %H:%M} UTC"
        return failed(about, told, "set this host's clock, or wait")
    told = f"ends in {_days(ends - now)}, on {ends:%Y-%m-%d %H:%M} UTC"
    if ends - now < min(_SOON, (ends - begins) / _LAST_SHARE):
        return warning(about, told, renew)
    return ok(about, told)


def names_of(certificate: x509.Certificate) -> list[str]:
    """DNS names and IP addresses that it is for."""
    try:
        told = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    addresses = told.get_values_for_type(x509.IPAddress)
    return [*told.get_values_for_type(x509.DNSName), *map(str, addresses)]


def _issued(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _days(span: timedelta) -> str:
    return f"{span.days} days" if span.days else f"{span.total_seconds() / 3600:.1f} hours"

"""A certificate authority for tests, and what it issues, as files."""

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from services.common.locks.certificates import dns_name

DAY = datetime.timedelta(days=1)


class Authority:
    def __init__(self, name: str = "the authority of a test") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self.pem = _pem(
            _builder(self._name, self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    def issue(
        self,
        folder: Path,
        *names: str,
        address: str = "",
        others: Sequence[x509.GeneralName] = (),
        common_name: str = "penstock",
        valid: datetime.timedelta = DAY,
        authorities: bytes | None = None,
    ) -> Path:
        """Writes tls.crt, tls.key and ca.crt for these DNS names into the folder, and returns it.
        `others`: alternative names of other kinds; with none of any kind there is the common name.

        `valid`: until when from now; negative is expired.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)])
        also = [x509.IPAddress(ipaddress.ip_address(address))] if address else []
        builder = _builder(subject, self._name, key.public_key(), valid)
        if known := [*map(x509.DNSName, names), *also, *others]:
            builder = builder.add_extension(x509.SubjectAlternativeName(known), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / "tls.crt", _pem(certificate))
        _replace(
            folder / "tls.key",
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
        )
        _replace(folder / "ca.crt", authorities or self.pem)
        return folder

    def identities(self, folder: Path, *identities: str) -> Path:
        """A `PENSTOCK_TLS_DIR`."""
        for identity in identities:
            self.issue(folder / identity, dns_name(identity))
        return folder


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    valid: datetime.timedelta = DAY,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 2 * DAY)
        .not_valid_after(now + valid)
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _replace(path: Path, content: bytes) -> None:
    """As cert-manager's mounts do, whole or not at all."""
    fresh = path.with_suffix(".new")
    fresh.write_bytes(content)
    fresh.replace(path)

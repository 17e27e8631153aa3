"""Certificates as files that change under a running process: cert-manager, or an operator, puts
new ones in their place, and what is dialled or accepted from then on shows those. Connections that
stand go on.

Between services each process has an identity, the name of its service. Its folder below
`PENSTOCK_TLS_DIR` holds tls.crt, tls.key and ca.crt, and its certificate says
`<identity>.penstock.internal`: services reach each other by IP address, so it is this name that is
checked, in both directions.
"""

import logging
import os
import ssl
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import grpc
from prometheus_client import Gauge

log = logging.getLogger(__name__)

DOMAIN = "penstock.internal"
_LOOK_EVERY_S = 1.0

_expiry = Gauge(
    "penstock_certificate_expiry_timestamp_seconds",
    "When the certificate in use ends, in Unix seconds",
    ["use"],
)


class CertificateError(Exception):
    """What is in the files cannot be used. The text names the file."""


@dataclass(frozen=True)
class Certificate:
    """A certificate chain with its key and the authorities to trust, all PEM."""

    chain: bytes
    key: bytes
    authorities: bytes | None
    ends: float  # Unix seconds


class CertificateFiles:
    """The latest whole set of files. Safe to use from gRPC's threads."""

    def __init__(self, use: str, chain: Path, key: Path, authorities: Path | None) -> None:
        """`use`: what they are for, in metrics and logs. Raises CertificateError."""
        self._use = use
        self._chain, self._key, self._authorities = chain, key, authorities
        self._lock = threading.Lock()
        self._looked_at = -float("inf")
        self._seen: object = None
        self._current: Certificate | None = None
        self._context: ssl.SSLContext | None = None
        self._context_of: Certificate | None = None
        self.current()

    @classmethod
    def of_identity(cls, folder: Path, identity: str) -> "CertificateFiles":
        """Those of one service, in the layout of a mounted Kubernetes Secret."""
        own = folder / identity
        return cls(f"internal {identity}", own / "tls.crt", own / "tls.key", own / "ca.crt")

    def current(self) -> Certificate:
        """What the files hold, looked at once a second at most; while they hold nothing that can be
        used, what they held before. The same object as long as they are the same.
        """
        with self._lock:
            now = time.monotonic()
            if now >= self._looked_at + _LOOK_EVERY_S:
                self._looked_at = now
                self._look()
            assert self._current is not None
            return self._current

    def _look(self) -> None:
        try:
            seen = self._signature()
            if seen == self._seen:
                return
            found = self._read()
            if self._signature() != seen:  # replaced meanwhile, so perhaps half old
                self._looked_at = -float("inf")
                if self._current is not None:
                    return
        except (CertificateError, OSError) as error:
            if self._current is None:
                raise CertificateError(f"{self._use}: {error}") from error
            log.error("new certificates for %s are not used: %s", self._use, error)
            return
        if self._current is not None:
            log.info("new certificates for %s", self._use)
        self._seen, self._current = seen, found
        _expiry.labels(self._use).set(found.ends)

    def _files(self) -> tuple[Path, ...]:
        return tuple(p for p in (self._chain, self._key, self._authorities) if p is not None)

    def _signature(self) -> object:
        stats = [os.stat(path) for path in self._files()]
        return [(s.st_ino, s.st_mtime_ns, s.st_size) for s in stats]

    def _read(self) -> Certificate:
        # 3 MB of each process, and most have no certificates.
        from cryptography import x509
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        chain, key = self._chain.read_bytes(), self._key.read_bytes()
        authorities = self._authorities.read_bytes() if self._authorities else None
        try:
            leaf = x509.load_pem_x509_certificates(chain)[0]
        except ValueError as error:
            raise CertificateError(f"{self._chain} holds no certificate: {error}") from error
        try:
            own = load_pem_private_key(key, password=None).public_key()
        except (ValueError, TypeError) as error:
            raise CertificateError(f"{self._key} holds no unencrypted key: {error}") from error
        if own != leaf.public_key():
            raise CertificateError(f"{self._key} is not the key of {self._chain}")
        if authorities is not None:
            try:
                x509.load_pem_x509_certificates(authorities)
            except ValueError as error:
                raise CertificateError(
                    f"{self._authorities} holds no certificate: {error}"
                ) from error
        return Certificate(chain, key, authorities, leaf.not_valid_after_utc.timestamp())

    def server_credentials(self) -> grpc.ServerCredentials:
        """Of a server that shows the current certificate to each new connection, and wants one of
        the current authorities from each caller, if there are any."""
        given = self.current()

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal given
            if (latest := self.current()) is given:
                return None
            given = latest
            return _configuration(latest)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(given),
            renewed,
            require_client_authentication=given.authorities is not None,
        )

    def ssl_context(self) -> ssl.SSLContext:
        """For one handshake of a server on asyncio; asks the client for nothing."""
        latest = self.current()
        if self._context is None or latest is not self._context_of:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.set_alpn_protocols(["http/1.1"])
            try:
                context.load_cert_chain(self._chain, self._key)
            except (ssl.SSLError, OSError):  # replaced since; the next look finds them whole
                if self._context is None:
                    raise
            else:
                self._context, self._context_of = context, latest
        return self._context


def channel_credentials(certificate: Certificate) -> grpc.ChannelCredentials:
    """Of a channel that shows this certificate and trusts its authorities alone."""
    return grpc.ssl_channel_credentials(certificate.authorities, certificate.key, certificate.chain)


def dns_name(identity: str) -> str:
    """What the certificate of an identity says."""
    return f"{identity}.{DOMAIN}"


def _configuration(certificate: Certificate) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(certificate.key, certificate.chain)], certificate.authorities
    )

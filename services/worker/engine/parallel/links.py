"""TCP connections between an engine and its ranks on other hosts, each for one purpose.

Who listens says a random number. Who dials answers with one of his own, the purpose, and a proof
(HMAC-SHA256 over both numbers and the purpose) that he knows the secret; then the other end proves
that it does. With a folder of certificates all of that goes through TLS, and either end shows a
certificate of the other's authority that has the name. Who dials does it from the engine's address;
who comes from another one is told nothing, and a stranger there the first number, if that. What
follows is TLS's, or goes in records that the secret and both numbers prove (sealed_socket.py).
"""

import hmac
import logging
import os
import select
import socket
import ssl
import threading
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Literal

from services.worker.engine.parallel.sealed_socket import SealedSocket
from services.worker.engine.parallel.seats import Lock
from services.worker.engine.parallel.tls_socket import TlsSocket

log = logging.getLogger(__name__)

Connection = socket.socket | TlsSocket | SealedSocket
Purpose = Literal[b"life", b"rank"]

LOST_S = 4
"""A connection is over when the other host has not answered for so long (`watched`): before its
rank counts as one that hangs."""
SHAKEN_WITHIN_S = 5.0
_AT_ONCE = 16
"""Connections of which it is not known as yet whose they are; others wait to be accepted."""
_BACKLOG = 128
"""Strangers wait here to be closed: room for the engine beside them."""
_LOOK_S = 0.05
_NUMBER = 32


class Refused(Exception):
    """The other end does not know the secret, or shows no certificate that holds."""


def listen(host: str) -> socket.socket:
    """At that address alone, on a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.bind((host, 0))
    listener.listen(_BACKLOG)
    return listener


def dial(
    host: str, port: int, lock: Lock, purpose: Purpose, within_s: float, own_host: str
) -> Connection:
    """From `own_host`. Raises OSError, also where nobody answers in time, and Refused."""
    context = _context(lock, ssl.PROTOCOL_TLS_CLIENT)
    shaken = socket.create_connection((host, port), within_s, (own_host, 0))
    try:
        if context is not None:
            shaken = context.wrap_socket(shaken, server_hostname=lock.tls_name)
        theirs, own = _read(shaken, _NUMBER), os.urandom(_NUMBER)
        shaken.sendall(own + purpose + _proof(lock, b"dials", theirs, own, purpose))
        _check(shaken, _proof(lock, b"listens", theirs, own, purpose))
        said = _proof(lock, b"who dials says", theirs, own, purpose)
        heard = _proof(lock, b"who listens says", theirs, own, purpose)
    except ssl.SSLError as error:
        shaken.close()
        raise Refused(str(error)) from None
    except BaseException:
        shaken.close()
        raise
    return _settled(shaken, said, heard)


def accept(
    listener: socket.socket, lock: Lock, purpose: Purpose, within_s: float, dialler: str
) -> Connection:
    """The first who dials from that address, for this purpose, and knows the secret. Who comes from
    another one is closed before he takes a place. Raises TimeoutError."""
    until = monotonic() + within_s
    context = _context(lock, ssl.PROTOCOL_TLS_SERVER)
    known: SimpleQueue[Connection] = SimpleQueue()
    places, over = threading.Semaphore(_AT_ONCE), threading.Event()
    expected, strangers = ip_address(dialler), 0

    def shake(raw: socket.socket) -> None:
        try:
            connection = _accepted(raw, context, lock, purpose)
            if over.is_set():
                connection.close()
            else:
                known.put(connection)
        except (OSError, Refused) as error:
            log.warning("refused who dialled for %s: %s", purpose.decode(), error)
        finally:
            places.release()

    poll = select.poll()
    poll.register(listener, select.POLLIN)
    listener.setblocking(False)  # who dialled may be gone again
    try:
        while monotonic() < until:
            with suppress(Empty):
                return known.get_nowait()
            if not places.acquire(timeout=_LOOK_S):
                continue
            raw = None
            if poll.poll(_LOOK_S * 1000):
                with suppress(BlockingIOError, ConnectionAbortedError):
                    raw, (address, *_) = listener.accept()
                    if ip_address(address) != expected:
                        raw.close()
                        raw = None
                        strangers += 1
            if raw is None:
                places.release()
            else:
                threading.Thread(target=shake, args=(raw,), daemon=True).start()
        raise TimeoutError(f"nobody who knows the secret has dialled for {within_s:.0f} s")
    finally:
        over.set()
        if strangers:
            log.warning("closed %d connections from elsewhere than %s", strangers, dialler)


def watched(connection: Connection) -> Connection:
    """The kernel ends it where the other host, or the way there, is lost for LOST_S. What is sent
    on it must be read without delay."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, LOST_S - 1)
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_S * 1000)
    return connection


def _accepted(
    raw: socket.socket, context: ssl.SSLContext | None, lock: Lock, purpose: Purpose
) -> Connection:
    until = monotonic() + SHAKEN_WITHIN_S
    raw.settimeout(SHAKEN_WITHIN_S)
    shaken = raw
    try:
        if context is not None:
            shaken = context.wrap_socket(raw, server_side=True)
            names = (shaken.getpeercert() or {}).get("subjectAltName", ())
            if ("DNS", lock.tls_name) not in names:
                raise Refused("the certificate is another's")
        own = os.urandom(_NUMBER)
        shaken.sendall(own)
        theirs = _read(shaken, _NUMBER, until)
        if not hmac.compare_digest(_read(shaken, len(purpose), until), purpose):
            raise Refused("dialled for another purpose")
        _check(shaken, _proof(lock, b"dials", own, theirs, purpose), until)
        shaken.sendall(_proof(lock, b"listens", own, theirs, purpose))
        said = _proof(lock, b"who listens says", own, theirs, purpose)
        heard = _proof(lock, b"who dials says", own, theirs, purpose)
    except BaseException:
        shaken.close()
        raise
    return _settled(shaken, said, heard)


def _settled(shaken: socket.socket, own_key: bytes, their_key: bytes) -> Connection:
    shaken.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    shaken.settimeout(None)
    if isinstance(shaken, ssl.SSLSocket):
        return TlsSocket(shaken)
    return SealedSocket(shaken, own_key, their_key)


def _proof(lock: Lock, end: bytes, listener: bytes, dialler: bytes, purpose: bytes) -> bytes:
    return hmac.digest(lock.secret, b" ".join((end, purpose)) + listener + dialler, "sha256")


def _check(shaken: socket.socket, proof: bytes, until: float | None = None) -> None:
    if not hmac.compare_digest(_read(shaken, len(proof), until), proof):
        raise Refused("the other end does not know the secret")


def _read(shaken: socket.socket, size: int, until: float | None = None) -> bytes:
    """`until`: however slowly it comes. Raises OSError."""
    found = b""
    while len(found) < size:
        if until is not None and monotonic() > until:
            raise TimeoutError
        piece = shaken.recv(size - len(found))
        if not piece:
            raise ConnectionResetError("the other end has closed the connection")
        found += piece
    return found


def _context(lock: Lock, protocol: int) -> ssl.SSLContext | None:
    """Raises OSError where the files cannot be read."""
    if not lock.tls_dir:
        return None
    folder, context = Path(lock.tls_dir), ssl.SSLContext(protocol)
    context.load_verify_locations(folder / "ca.crt")
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # else the dialling end is sent what is no frame
    return context

"""Options of gRPC's channels and servers between services."""

from collections.abc import Sequence

Options = Sequence[tuple[str, int | str]]

_MAX_MESSAGE_BYTES = 64 * 2**20
MESSAGE_LIMITS = [  # for both ends
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
]

# A peer that vanished without a word (its host, the path to it) is noticed in the sum of both.
KEEPALIVE_MS, KEEPALIVE_ANSWER_MS = 10_000, 5_000
KEEPALIVE = [  # of a channel
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_ANSWER_MS),
    ("grpc.http2.max_pings_without_data", 0),  # any number
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_ANSWER_MS),
]
KEEPALIVE_ALLOWED = [  # of a server, which would otherwise end a connection for its pings
    *KEEPALIVE,
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
]

# Of a server's connections: to say what they are, and without a call.
_HANDSHAKE_MS, _IDLE_MS = 5_000, 60_000
HEALTH_CONNECTIONS = 256


def bounded(connections: int) -> Options:
    """Of a server: so many connections at once, the next are closed. Whoever reaches the port may
    open them and be silent, before any lock: one that has not said in time that it speaks HTTP/2,
    and with certificates who it is, is closed, and so is one that has had no call for long."""
    return [
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.max_connection_idle_ms", _IDLE_MS),
    ]

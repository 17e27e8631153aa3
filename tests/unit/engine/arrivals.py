"""What property tests let happen to a scheduler or an engine."""

from dataclasses import dataclass

from hypothesis import strategies as st


@dataclass
class Arrival:
    at_step: int
    prompt: list[int]
    max_tokens: int
    priority: int = 0
    salt: bytes = b""
    kind: str = "plain"
    cancel_at: int | None = None
    """Steps after arrival."""
    remote_delay: int = 0
    """Steps between reservation and `start_decode`, or from computed to exported."""
    fails: bool = False


arrivals = st.builds(
    Arrival,
    at_step=st.integers(0, 30),
    # Few distinct tokens and short steps: shared prefixes are common.
    prompt=st.lists(st.integers(1, 2), min_size=1, max_size=20),
    max_tokens=st.integers(1, 12),
    priority=st.sampled_from([0, 0, 1, 3]),
    salt=st.sampled_from([b"a", b"a", b"a", b"b"]),
    kind=st.sampled_from(["plain", "plain", "plain", "prefill", "remote"]),
    cancel_at=st.sampled_from([None, None, None, 0, 1, 2, 5]),
    remote_delay=st.integers(0, 6),
    fails=st.sampled_from([False] * 9 + [True]),
)

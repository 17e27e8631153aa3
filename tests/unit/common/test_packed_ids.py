"""Token ids as they travel: written and read without a list, and on the wire what they were."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.common_pb2 import TokenIds
from protos.router_pb2 import GenerateRequest
from protos.worker_pb2 import WorkRequest
from services.common import packed_ids
from services.common.packed_ids import as_field, count, head, pack, unpack

EDGES = [edge + by for power in range(7, 32, 7) for edge in [1 << power] for by in (-1, 0)]
ID = st.one_of(st.sampled_from([0, 2**32 - 1, *EDGES]), st.integers(0, 2**32 - 1))


@pytest.mark.parametrize("few", [0, 1000])
@given(ids=st.lists(ID, max_size=40), most=st.integers(0, 45))
@settings(deadline=None, max_examples=100)
def test_they_come_back_whole_counted_and_in_part(few: int, ids: list[int], most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_ids, "_FEW", few)
        packed = pack(np.array(ids, np.uint32))
        assert packed == pack(ids) == pack(tuple(ids))
        assert (count(packed), count(head(packed, most))) == (len(ids), min(most, len(ids)))
    assert unpack(packed).tolist() == list(as_field(packed)) == ids
    assert unpack(head(packed, most)).tolist() == ids[:most]
    assert pack(ids[:most]) + pack(ids[most:]) == packed


@given(ids=st.lists(ID, min_size=1, max_size=40))
@settings(deadline=None, max_examples=100)
def test_on_the_wire_they_are_what_replicas_of_before_read_and_write(ids: list[int]) -> None:
    """Those have a `repeated uint32` there, as TokenIds has."""
    old = TokenIds(ids=ids).SerializeToString()  # its tag, then what follows any tag
    for new in (GenerateRequest, WorkRequest):
        written = new(prompt_token_ids=pack(ids)).SerializeToString()
        assert (written[0] >> 3, written[0] & 7) == (3, 2), "a field whose length is told"
        assert written[1:] == old[1:]
        assert new.FromString(written[:1] + old[1:]).prompt_token_ids == pack(ids)


@pytest.mark.parametrize("behind", [0, 2000], ids=["few", "many"])
@pytest.mark.parametrize(
    "odd", [b"\x80", b"\xff" * 11 + b"\x01", b"\x05\xff", b"\xff" * 5 + b"\x01"]
)
def test_what_are_no_ids_are_refused(behind: int, odd: bytes) -> None:
    before = pack(range(behind))
    assert count(before) == behind
    with pytest.raises(ValueError, match="not packed token ids"):
        count(before + odd)


def test_many_beside_few() -> None:
    for size in (0, 1, 4, 5, 1023, 1024, 1025, 5000):
        ids = np.arange(size, dtype=np.uint32) * 7919
        assert unpack(pack(ids)).tolist() == ids.tolist()
        assert count(pack(ids)) == size
        assert pack(ids) == pack(ids.tolist())

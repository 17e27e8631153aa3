"""Token ids as a message has them, made without a list."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.router_pb2 import GenerateRequest
from services.tokenizer import packed_ids
from services.tokenizer.packed_ids import message_ids

EDGES = [edge + by for power in range(7, 32, 7) for edge in [1 << power] for by in (-1, 0)]
ID = st.one_of(st.sampled_from([0, 2**32 - 1, *EDGES]), st.integers(0, 2**32 - 1))


@given(ids=st.lists(ID, max_size=40))
@settings(deadline=None, max_examples=200)
def test_they_are_what_they_were(ids: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_ids, "_FEW", 0)
        found = message_ids(np.array(ids, np.uint32))
    assert list(found) == ids
    plain = GenerateRequest(prompt_token_ids=ids).SerializeToString()
    assert GenerateRequest(prompt_token_ids=found).SerializeToString() == plain


def test_few_are_a_list_and_many_are_a_field() -> None:
    for count, is_list in ((0, True), (1023, True), (1024, False)):
        found = message_ids(np.arange(count, dtype=np.uint32))
        assert isinstance(found, list) is is_list
        assert list(found) == list(range(count))

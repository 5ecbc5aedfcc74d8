"""Tokens as sealed bytes: what was sealed comes back, and nothing else is believed."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trials.data.kept.sealed import is_whole, seal, unseal

tokens = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), max_size=40)


@given(tokens=tokens, source=st.binary(max_size=30))
def test_ids_and_targets_come_back(tokens: list[tuple[int, bool]], source: bytes) -> None:
    ids = np.array([each for each, _ in tokens], dtype=np.int64)
    is_target = np.array([each for _, each in tokens], dtype=np.bool_)
    sealed = seal(source, ids, is_target)
    assert is_whole(sealed)
    found = unseal(sealed, source)
    assert found is not None
    for one, other in zip(found, (ids, is_target), strict=True):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)
    assert unseal(sealed, source + b".") is None


@given(tokens=tokens, data=st.data())
def test_no_damage_is_taken_for_whole(tokens: list[tuple[int, bool]], data: st.DataObject) -> None:
    ids, is_target = np.array([*tokens], dtype=np.int64).reshape(-1, 2).T
    sealed = bytearray(seal(b"source", ids, is_target.astype(np.bool_)))
    place = data.draw(st.integers(0, len(sealed) - 1))
    sealed[place] ^= data.draw(st.integers(1, 255))
    assert not is_whole(bytes(sealed))
    assert not is_whole(bytes(sealed[:place]))

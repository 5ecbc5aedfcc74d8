"""Tokens of one conversation as bytes that tell what they were made of, and whether they are whole."""

import hashlib
import struct

import numpy as np
from numpy.typing import NDArray

from trials.arrays import Ints

# Bytes of BLAKE2b: no two of a billion samples have the same 128 bits by chance.
_DIGEST = 16
_SIZES = struct.Struct("<II")
_HEADER = 2 * _DIGEST + _SIZES.size
"""Digest of all that follows, digest of the source, number of tokens, number of edges."""
_NUMBER = np.dtype("<i4")


def seal(source: bytes, ids: Ints, is_target: NDArray[np.bool_]) -> bytes:
    """Return the bytes for ids [tokens] and targets [tokens] that were made of `source`.

    Targets are kept as edges: where one begins and where it ends, in turn.
    """
    edges = np.flatnonzero(np.diff(is_target, prepend=False, append=False))
    numbers = np.concatenate([ids, edges]).astype(_NUMBER)
    body = _digest(source) + _SIZES.pack(len(ids), len(edges)) + numbers.tobytes()
    return _digest(body) + body


def is_whole(sealed: bytes) -> bool:
    """Return whether the bytes are as they were sealed."""
    return len(sealed) >= _HEADER and sealed[:_DIGEST] == _digest(sealed[_DIGEST:])


def unseal(sealed: bytes, source: bytes) -> tuple[Ints, NDArray[np.bool_]] | None:
    """Return ids and targets from bytes that are whole; None where they were made of something else."""
    if sealed[_DIGEST : 2 * _DIGEST] != _digest(source):
        return None
    tokens, edges = _SIZES.unpack_from(sealed, 2 * _DIGEST)
    numbers = np.frombuffer(sealed, dtype=_NUMBER, offset=_HEADER).astype(np.int64)
    turns = np.zeros(tokens + 1, dtype=np.int8)
    turns[numbers[tokens : tokens + edges]] = 1
    return numbers[:tokens], np.bitwise_xor.accumulate(turns)[:tokens].astype(np.bool_)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST).digest()

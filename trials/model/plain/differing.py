"""The first difference between a record as it is encoded here, and as transformers makes it."""

import numpy as np

from trials.arrays import Ints
from trials.data.records.sample import IGNORED, Encoded
from trials.model.plain.plain_inputs import Expected


def difference(encoded: Encoded, expected: Expected, max_tokens: int | None) -> str | None:
    """Describe the first token id or label that differs, None where all agree; `max_tokens` cuts what is expected."""
    found, wanted = encoded.input_ids, expected.input_ids[:max_tokens]
    if len(found) != len(wanted) or (found != wanted).any():
        shared = min(len(found), len(wanted))
        (places,) = np.nonzero(found[:shared] != wanted[:shared])
        place = int(places[0]) if len(places) else shared
        return (
            f"token {place} is {_at(found, place)} instead of {_at(wanted, place)} ({len(found)} tokens instead of "
            f"{len(wanted)})"
        )
    if expected.is_target is None:
        return None
    target, free = expected.is_target[:max_tokens], expected.is_free[:max_tokens]
    labels = np.where(target, wanted, IGNORED)
    may_be = free & ((encoded.labels == IGNORED) | (encoded.labels == wanted))
    (places,) = np.nonzero((encoded.labels != labels) & ~may_be)
    if not len(places):
        return None
    place = int(places[0])
    return (
        f"the label of token {place} is {_at(encoded.labels, place)} instead of {_at(labels, place)} "
        f"({int((encoded.labels != IGNORED).sum())} targets instead of {int(target.sum())})"
    )


def _at(values: Ints, place: int) -> str:
    return str(values[place]) if place < len(values) else "missing"

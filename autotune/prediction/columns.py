"""Columns of the sizes of packs: vision units, text tokens, sum of squared lengths, 1, and targets."""

from collections.abc import Iterable

import numpy as np

from trials.arrays import Floats
from trials.costs.coefficients import KINDS, Coefficients, LayerKind
from trials.costs.layer import LayerCost

UNITS, TOKENS, SQUARES, CONSTANT, TARGETS = range(5)
EVERY = (UNITS, TOKENS, SQUARES, CONSTANT, TARGETS)
WITHOUT_TARGETS = slice(TARGETS)
"""Columns on which loading, exchanges and links depend; only layers depend on targets."""


def of_kind(kind: LayerKind, coefficients: Coefficients) -> Floats:
    """Return a cost of one kind of layer by columns, [5]: the head runs on targets, other layers on all tokens."""
    units, tokens, squares, constant = coefficients
    of_tokens, of_targets = (0.0, tokens) if kind == "head" else (tokens, 0.0)
    return np.array((units, of_tokens, squares, constant, of_targets))


def in_columns(of_kinds: Iterable[Coefficients]) -> Floats:
    """Return a cost of each kind of layer, in the order of KINDS, by columns, [kinds, 5]."""
    return np.array([of_kind(kind, each) for kind, each in zip(KINDS, of_kinds, strict=True)])


def holding_all(targets: Floats, head: LayerCost) -> Floats:
    """Return the targets that would need as many bytes as these if the head held the logits of all at once."""
    if not (most := head.chunk_targets):
        return targets
    counted: Floats = np.minimum(targets, most) + head.further_share * np.maximum(targets - most, 0)
    return counted

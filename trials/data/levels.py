"""The levels of packs to which samples belong."""

from collections.abc import Sequence

import numpy as np

from trials.arrays import Ints
from trials.data.index import DatasetIndex
from trials.errors import InvalidPlan
from trials.plan import Levelled, Packed
from trials.units import number_of


def lowest_levels(units: Ints, tokens: Ints, levels: Sequence[Packed]) -> Ints:
    """Return the first level that holds each sample, [samples], from 0; their number for a sample above the last."""
    found = np.full(len(units), len(levels), dtype=np.int64)
    for number, level in reversed([*enumerate(levels)]):
        found[(units <= level.qv) & (tokens <= level.qt)] = number
    return found


def check_levels(index: DatasetIndex, packing: Levelled, *, skips: bool) -> None:
    """Raise InvalidPlan for a level without a sample, and, unless it is skipped, for a sample above the last level."""
    units, tokens = index.vision_units.astype(np.int64), index.text_tokens.astype(np.int64)
    found = lowest_levels(units, tokens, packing.levels)
    for number, level in enumerate(packing.levels):
        if not (found == number).any():
            held = np.flatnonzero(found < number)
            longest = (
                f"the longest sample that it could hold has {units[held].max()} vision units and {tokens[held].max()} "
                f"text tokens, which level {number} holds"
                if len(held)
                else f"the shortest samples have {units.min()} vision units and {tokens.min()} text tokens"
            )
            raise InvalidPlan(
                f"level {number + 1} with qv={level.qv} qt={level.qt} holds no sample: {longest}; remove the level, or "
                "change its capacities"
            )
    above = np.flatnonzero(found == len(packing.levels))
    if len(above) and not skips:
        last, longest_row = packing.levels[-1], int(above[np.argmax(tokens[above])])
        enough = max(last.qv, int(units[above].max())), max(last.qt, int(tokens[above].max()))
        raise InvalidPlan(
            f"{number_of(len(above), 'sample is', 'samples are')} above the last level with qv={last.qv} qt={last.qt}, "
            f"such as {index.where(longest_row)} with {units[longest_row]} vision units and {tokens[longest_row]} text "
            f"tokens; raise the level to qv={enough[0]} qt={enough[1]}, or set data.oversize: skip"
        )

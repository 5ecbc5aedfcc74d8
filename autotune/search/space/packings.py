"""Packings as values of Optuna parameters: packs of one level, and ladders of levels."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeAlias

from optuna.distributions import BaseDistribution, CategoricalDistribution

from trials import plugins
from trials.data.packers import PACKERS
from trials.plan import Layout, Levelled, Packed, Packing, Padded

Degrees: TypeAlias = tuple[int, ...]
"""Sequence degree of each level: a ladder."""
Pair: TypeAlias = tuple[int, int]
"""(qv, qt)"""
ALONE: Degrees = (1,)
"""Packs of one level, each on a rank of its own."""

_SEQUENCE, _FIRST_QV, _FIRST_QT, _SAMPLES = "sequence", "level_1_qv", "level_1_qt", "samples"
_OTHER_PACKER = 0.1
"""Distance between packings of different packers, as a share of a capacity."""
_OTHER_LADDER = 10.0
"""Distance between packings of different ladders: more than any change of capacities."""
_SHARES = (1.0, 0.5, 1.5, 0.7, 0.35, 2.2)
"""Tokens of a rank in packs of the first level, as shares of what `Ladders.tokens` says."""
# A choice: packs of capacities further away are others altogether, and have starts of their own.
_STEPS = 2
"""Capacities on either side that are neighbours."""
_ROOM_FOR_UNITS, _OF_UNITS = 1.5, 0.5
"""Room for vision units in a pack, as a multiple of the data's ratio, and its weight where that of the tokens is 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladders:
    """The ladders that are searched in addition to packs of one level that no ranks share."""

    of_layouts: Mapping[Layout, tuple[Degrees, ...]]
    first: tuple[Pair, ...]
    """Capacities of the first of several levels, ascending in their qt."""
    longest: Pair
    """What the last level has to hold."""
    tokens: Mapping[Layout, float]
    """Tokens of a pack on one rank that need little or no recomputation."""
    units_per_token: float
    """Vision units of the data for each text token."""


def ladder_name(degrees: Degrees) -> str:
    """Return the name of a ladder in the study: `1-4` for a first level on single ranks, and one that 4 share."""
    return "-".join(map(str, degrees))


class Packings:
    """The packings of a space: `packer`, `qv`, `qt` and the slacks; of ladders also `sequence` and `level_1_...`.

    `qv` and `qt` are the capacities of the last level, raised to hold the longest sample where there are several. A
    level between the first and the last one gives each of its ranks as much as the first does. Where unpacked
    micro-batches are searched, `samples` is the number of their samples, 0 for packs; without any packs it is alone.
    """

    def __init__(
        self,
        packers: Sequence[str],
        capacities: Sequence[Pair],
        slacks: tuple[Sequence[int], Sequence[int]],
        ladders: Ladders | None,
        padded: Sequence[int] = (),
    ) -> None:
        """`slacks` are those of qv and of qt; of them and of the packers the usual one comes first.

        `padded` are the numbers of samples of unpacked micro-batches.
        """
        self._padded = tuple(padded)
        self._packers, self._capacities, (self._qv_slacks, self._qt_slacks) = tuple(packers), tuple(capacities), slacks
        self._relaxes = {name: plugins.load(PACKERS, name).RELAXES for name in packers}
        self._ladders = ladders
        offered = () if ladders is None else ladders.of_layouts.values()
        self._names = {ladder_name(each): each for each in (ALONE, *sorted({one for of in offered for one in of}))}
        self._has_levels = any(len(degrees) > 1 for degrees in self._names.values())

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        """Distributions by parameter name; where no ladder is searched there are only those of one level."""
        samples: dict[str, BaseDistribution] = {}
        if self._padded:
            samples[_SAMPLES] = CategoricalDistribution((*([0] if self._capacities else []), *self._padded))
        if not self._capacities:
            return samples
        found: dict[str, BaseDistribution] = samples | {
            "packer": CategoricalDistribution(self._packers),
            "qv": CategoricalDistribution(tuple(sorted({qv for qv, _ in self._capacities}))),
            "qt": CategoricalDistribution(tuple(sorted({qt for _, qt in self._capacities}))),
            "qv_slack": CategoricalDistribution(self._qv_slacks),
            "qt_slack": CategoricalDistribution(self._qt_slacks),
        }
        if self._ladders is None:
            return found
        found[_SEQUENCE] = CategoricalDistribution(tuple(self._names))
        if self._has_levels:
            found[_FIRST_QV] = CategoricalDistribution(tuple(sorted({qv for qv, _ in self._ladders.first})))
            found[_FIRST_QT] = CategoricalDistribution(tuple(sorted({qt for _, qt in self._ladders.first})))
        return found

    # --- points and packings ---

    def packing(self, point: Mapping[str, Any], layout: Layout) -> Packing | None:
        """Return the packing of a point; None where it is not one that is searched with this layout."""
        if samples := point.get(_SAMPLES):
            return Padded(samples=samples) if samples in self._padded else None
        degrees, last = self._degrees(point), (point["qv"], point["qt"])
        if last not in self._capacities or degrees not in self._of(layout):
            return None
        if len(degrees) == 1:
            return replace(self._level(point, last), sequence=degrees[0])
        assert self._ladders is not None
        first = (point[_FIRST_QV], point[_FIRST_QT])
        return self._levelled(point, first, degrees) if first in self._ladders.first else None

    def point(self, packing: Packing, layout: Layout) -> dict[str, Any] | None:
        """Return the values of the parameters that stand for exactly this packing; None for one outside the space."""
        if isinstance(packing, Padded):
            if packing.samples not in self._padded:
                return None
            # Optuna needs a value for each parameter, also for those of packs.
            of_packs = [{"qv": qv, "qt": qt, **self._usual} for qv, qt in self._capacities[:1]]
            return {**(of_packs[0] if of_packs else {}), _SAMPLES: packing.samples}
        if packing.degrees not in self._of(layout):
            return None
        last = packing.levels[-1]
        pairs = self._capacities
        if self._ladders is not None and len(packing.levels) > 1:
            pairs = tuple(pair for pair in pairs if self._raised(pair) == (last.qv, last.qt))
        # Several pairs may be raised to the same last level; the first stands for all of them.
        qv, qt = pairs[0] if (last.qv, last.qt) not in pairs and pairs else (last.qv, last.qt)
        slacks = ((last.qv, last.qv_min, self._qv_slacks), (last.qt, last.qt_min, self._qt_slacks))
        qv_slack, qt_slack = (_slack(*each) for each in slacks)
        if qv_slack is None or qt_slack is None or last.packer not in self._packers:
            return None
        point = {"packer": last.packer, "qv": qv, "qt": qt, "qv_slack": qv_slack, "qt_slack": qt_slack}
        point |= {_SAMPLES: 0} if self._padded else {}
        if self._ladders is not None:
            point[_SEQUENCE] = ladder_name(packing.degrees)
            # Optuna needs a value for each parameter, also for those of a level that there is not.
            first = packing.levels[0] if len(packing.levels) > 1 else None
            qv, qt = (first.qv, first.qt) if first else self._ladders.first[0]
            point |= {_FIRST_QV: qv, _FIRST_QT: qt} if self._has_levels else {}
        # The levels between the first and the last have no parameters: they may differ from those of the point.
        return point if self.packing(point, layout) == packing else None

    def distance(self, one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
        """Return how far two points are apart."""
        samples = one.get(_SAMPLES, 0), other.get(_SAMPLES, 0)
        if any(samples):
            return abs(math.log(samples[0] / samples[1])) if all(samples) else _OTHER_LADDER
        far: float = _OTHER_PACKER * (one["packer"] != other["packer"])
        far += abs(math.log((one["qv"] + 1) / (other["qv"] + 1))) + abs(math.log(one["qt"] / other["qt"]))
        if _SEQUENCE in one:
            far += _OTHER_LADDER * (one[_SEQUENCE] != other[_SEQUENCE])
        if len(self._degrees(other)) > 1:
            far += abs(math.log((one[_FIRST_QV] + 1) / (other[_FIRST_QV] + 1)))
            far += abs(math.log(one[_FIRST_QT] / other[_FIRST_QT]))
        return far

    # --- where to look ---

    def usual(self) -> Iterator[Packed | Padded]:
        """Yield packs of one level on single ranks, with the usual packer and slacks; then unpacked micro-batches."""
        for pair in self._capacities:
            yield self._level(self._usual, pair)
        yield from (Padded(samples=samples) for samples in self._padded)

    def of_ladders(self, layout: Layout) -> Iterator[Iterator[Packing]]:
        """Yield for each ladder some capacities, likely ones first, with the usual packer and slacks."""
        for degrees in self._of(layout)[1:]:
            points = (
                self._pointed(self._usual, degrees, *pairs) for pairs in dict.fromkeys(self._few(layout, degrees))
            )
            packings = (self.packing(point, layout) for point in points)
            yield (packing for packing in packings if packing is not None)

    def others(self, packing: Packing, layout: Layout) -> Iterator[Packing]:
        """Yield packings one step away: another packer or slack, at most one slack that is not usual.

        Ladders have other capacities of a level and other degrees instead of other slacks. Unpacked micro-batches have
        other numbers of samples.
        """
        point = self.point(packing, layout)
        if point is None:
            return
        if isinstance(packing, Padded):
            yield from (Padded(samples=samples) for samples in self._padded if samples != packing.samples)
            return
        degrees, slacks = self._degrees(point), [(self._qv_slacks[0], self._qt_slacks[0])]
        if degrees == ALONE:
            slacks = [(slack, self._qt_slacks[0]) for slack in self._qv_slacks]
            slacks += [(self._qv_slacks[0], slack) for slack in self._qt_slacks]
        changed = [
            {**point, "packer": packer, "qv_slack": qv_slack, "qt_slack": qt_slack}
            for packer in self._packers
            for qv_slack, qt_slack in slacks
        ]
        if degrees != ALONE:
            changed += self._other_levels(point, degrees, layout)
        found = (self.packing(each, layout) for each in changed)
        yield from dict.fromkeys(each for each in found if each is not None and each != packing)

    def _other_levels(self, point: Mapping[str, Any], degrees: Degrees, layout: Layout) -> Iterator[dict[str, Any]]:
        for qv, qt in _beside((point["qv"], point["qt"]), self._capacities):
            yield {**point, "qv": qv, "qt": qt}
        if self._ladders is not None and len(degrees) > 1:
            for qv, qt in _beside((point[_FIRST_QV], point[_FIRST_QT]), self._ladders.first):
                yield {**point, _FIRST_QV: qv, _FIRST_QT: qt}
        for other in self._of(layout):
            if len(other) == len(degrees) and sum(a != b for a, b in zip(other, degrees, strict=True)) == 1:
                yield {**point, _SEQUENCE: ladder_name(other)}

    def _few(self, layout: Layout, degrees: Degrees) -> Iterator[tuple[Pair, Pair | None]]:
        """Yield capacities of the last and of the first level."""
        assert self._ladders is not None
        longest = self._ladders.longest[1]
        whole, double = (self._near(times * longest, self._capacities) for times in (1, 2))
        if len(degrees) == 1:
            yield from ((whole, None), (double, None))
            return
        for share in _SHARES:
            first = self._near(share * self._ladders.tokens[layout], self._ladders.first)
            yield whole, first
            if share == 1:
                yield double, first

    def _near(self, tokens: float, pairs: Sequence[Pair]) -> Pair:
        """Return capacities of about `tokens` tokens, whose limit of vision units is seldom reached."""
        assert self._ladders is not None
        units = _ROOM_FOR_UNITS * self._ladders.units_per_token

        def far(pair: Pair) -> float:
            return abs(math.log(pair[1] / tokens)) + _OF_UNITS * abs(math.log((pair[0] + 1) / (units * pair[1] + 1)))

        return min(pairs, key=far)

    # --- levels ---

    @property
    def _usual(self) -> dict[str, Any]:
        return {"packer": self._packers[0], "qv_slack": self._qv_slacks[0], "qt_slack": self._qt_slacks[0]}

    def _of(self, layout: Layout) -> tuple[Degrees, ...]:
        """Return the ladders of a layout, first the one level of packs on single ranks."""
        return (ALONE, *(() if self._ladders is None else self._ladders.of_layouts.get(layout, ())))

    def _degrees(self, point: Mapping[str, Any]) -> Degrees:
        return self._names[point.get(_SEQUENCE, ladder_name(ALONE))]

    def _pointed(self, usual: Mapping[str, Any], degrees: Degrees, last: Pair, first: Pair | None) -> dict[str, Any]:
        point = {**usual, "qv": last[0], "qt": last[1], _SEQUENCE: ladder_name(degrees)}
        return point if first is None else {**point, _FIRST_QV: first[0], _FIRST_QT: first[1]}

    def _raised(self, pair: Pair) -> Pair:
        """Return capacities of the last of several levels."""
        assert self._ladders is not None
        return max(pair[0], self._ladders.longest[0]), max(pair[1], self._ladders.longest[1])

    def _levelled(self, point: Mapping[str, Any], first: Pair, degrees: Degrees) -> Levelled | None:
        """Return the levels; None where one would not hold longer samples than the one before."""
        last = self._raised((point["qv"], point["qt"]))
        between = [(first[0] * degree // degrees[0], first[1] * degree // degrees[0]) for degree in degrees[1:-1]]
        pairs = [first, *((min(qv, last[0]), min(qt, last[1])) for qv, qt in between), last]
        if any(one[1] >= other[1] or one[0] > other[0] for one, other in pairwise(pairs)):
            return None
        levels = (replace(self._level(point, pair), sequence=each) for pair, each in zip(pairs, degrees, strict=True))
        return Levelled(levels=tuple(levels))

    def _level(self, point: Mapping[str, Any], pair: Pair) -> Packed:
        """Return packs of these capacities, with the usual slacks where the packer relaxes nothing."""
        qv_slack, qt_slack = self._qv_slacks[0], self._qt_slacks[0]
        if self._relaxes[point["packer"]]:
            qv_slack, qt_slack = point["qv_slack"], point["qt_slack"]
        qv, qt = pair
        return Packed(qv=qv, qt=qt, qv_min=max(0, qv - qv_slack), qt_min=max(0, qt - qt_slack), packer=point["packer"])


def _slack(capacity: int, least: int, slacks: Iterable[int]) -> int | None:
    """Return the first slack that leaves `least` of the capacity; one above the capacity leaves 0."""
    return next((slack for slack in slacks if max(0, capacity - slack) == least), None)


def _beside(pair: Pair, pairs: Sequence[Pair]) -> Iterator[Pair]:
    """Yield the pairs next to one, in the order of their qt."""
    ordered = sorted(pairs, key=lambda each: (each[1], each[0]))
    place = ordered.index(pair)
    yield from ordered[max(place - _STEPS, 0) : place]
    yield from ordered[place + 1 : place + 1 + _STEPS]

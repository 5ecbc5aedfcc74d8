"""The ladders of levels that can make a training faster; others are not searched."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autotune.dimensions.folds import layout_name
from autotune.errors import JobError
from autotune.search.solver.limits import HEADROOM
from autotune.search.solver.solver import Solver
from autotune.search.space.capacities import capacities, capacity_of
from autotune.search.space.packings import ALONE, Degrees, Ladders, Pair, ladder_name
from trials.plan import SIMPLE_PACKER, Layout, Packed, Packing, Padded
from trials.workload import DataProfile, Workload

# A choice: ranks that share packs exchange in every layer, so a smaller gain is soon lost.
_WORTH_WAITING = 0.05
"""Share of the time that ranks may wait for the slowest one before smaller parts of long packs are worth a search."""
_USUAL_SAMPLES = 4
"""Mean samples of a usual pack: the longest sample decides what is recomputed only if it is longer."""
_SHORT = 2
"""Samples up to the longest one divided by this decide the capacities of the first level."""
_GRAIN = 64
"""Tokens to a multiple of which the lengths in a histogram are rounded up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The ladders that are searched."""

    ladders: Ladders | None
    reason: str | None
    """Why they are searched, or none is; None where no ranks can share packs, or the job names the ladders."""


def offered_ladders(
    workload: Workload,
    solver: Solver,
    layouts: Sequence[Layout],
    usual: Sequence[Packing],
    wanted: tuple[str, ...] | None,
) -> Offer:
    """Return the ladders that may be faster than the `usual` packs on single ranks, or those that the job wants.

    A ladder can help where the longest sample is longer than a usual pack and does not fit on one rank with nothing
    recomputed, or where ranks wait for the slowest one for more than 5 % of the time, whatever the capacities.

    Raise JobError for a wanted ladder that no layout can have.
    """
    needs = [_Needs(workload, solver, layout, usual) for layout in layouts]
    possible = {each.layout: tuple(each.possible()) for each in needs}
    if wanted is not None:
        _check(wanted, possible)
        of_layouts = {
            layout: tuple(each for each in ladders if ladder_name(each) in wanted)
            for layout, ladders in possible.items()
        }
    else:
        of_layouts = {each.layout: tuple(each.helpful()) for each in needs}
    found = {layout: ladders for layout, ladders in of_layouts.items() if ladders}
    if not found:
        can_share = any(max(each) > 1 for ladders in possible.values() for each in ladders)
        return Offer(ladders=None, reason=_why_none(needs) if wanted is None and can_share else None)
    tokens = {each.layout: each.tokens for each in needs if each.layout in found}
    shares = (workload.data.longest_text_tokens // degree for degree in solver.sequence_degrees)
    ladders = Ladders(
        of_layouts=found,
        first=_first_level(workload, {*tokens.values(), *shares}),
        longest=_longest(workload.data),
        tokens=tokens,
        units_per_token=workload.data.vision_units / workload.data.text_tokens,
    )
    return Offer(ladders=ladders, reason=_why(found) if wanted is None else None)


def _check(wanted: tuple[str, ...], possible: dict[Layout, tuple[Degrees, ...]]) -> None:
    names = {ladder_name(ALONE), *(ladder_name(each) for ladders in possible.values() for each in ladders)}
    if missing := [name for name in wanted if name not in names]:
        raise JobError(
            f"search.space.sequence: {missing[0]!r} is none of the sequence degrees that the data degrees of the "
            f"layouts, the model's attention heads and the profile allow: {', '.join(sorted(names))}"
        )


def _why(found: dict[Layout, tuple[Degrees, ...]]) -> str:
    names = ", ".join(map(layout_name, found))
    return (
        f"Levels of packs and shared packs are searched with {names}: the longest sample needs recomputation or "
        "several ranks there, or ranks wait for the slowest one"
    )


def _why_none(needs: "Sequence[_Needs]") -> str:
    waiting = max(each.waiting for each in needs)
    return (
        "Levels of packs and shared packs cannot help and are not searched: the longest sample is no longer than a "
        f"usual pack or fits without recomputation, and ranks wait {waiting:.1%} of the time"
    )


class _Needs:
    """What the longest sample needs in one layout."""

    def __init__(self, workload: Workload, solver: Solver, layout: Layout, usual: Sequence[Packing]) -> None:
        self.layout = layout
        self._data, self._solver, self._usual = workload.data, solver, usual
        self._usable = HEADROOM * workload.memory_limit_bytes
        # Powers of two alone: each further degree multiplies the ladders.
        timed = [degree for degree in solver.sequence_degrees if degree & (degree - 1) == 0]
        self._degrees = [1, *(degree for degree in timed if layout.data % degree == 0)]

    def possible(self) -> Iterator[Degrees]:
        """Yield all ladders but packs on single ranks."""
        yield from _ladders(self._degrees, self._degrees)

    def helpful(self) -> Iterator[Degrees]:
        """Yield the ladders that may be faster than usual packs."""
        least, most = self._recomputing, 1 if self.waiting <= _WORTH_WAITING else self._evening
        if least is None:
            return
        is_long = self._data.longest_text_tokens > _USUAL_SAMPLES * self._data.text_tokens / self._data.samples
        needs_more = least > 1 or (is_long and self._keeping != 1)
        if needs_more:
            most = max(most, self._keeping or self._degrees[-1])
        if needs_more or most > 1:
            yield from _ladders(self._degrees, [degree for degree in self._degrees if least <= degree <= most])

    @cached_property
    def tokens(self) -> int:
        """Tokens of a pack of the first level on one rank: about the most with which nothing is recomputed."""
        longest, most = self._data.longest_text_tokens, self._degrees[-1]
        if most == 1 or self._keeping == 1:
            return longest // _SHORT
        full = _packs(capacity_of(self._data, longest), most)
        shared = self._solver.leanest(full, self.layout, recompute=False)
        plans = replace(shared, packing=replace(full, sequence=1)), shared
        of_longest, of_share = (self._solver.fullest(plan)[0] for plan in plans)
        # On the same stages the bytes of a rank are linear in its tokens.
        of_token = (of_longest - of_share) / (longest - longest / most)
        fitting = longest - (of_longest - self._usable) / of_token
        return int(min(fitting if fitting >= 1 else longest / most, longest / _SHORT))

    @cached_property
    def waiting(self) -> float:
        """The share of the time that the mean rank waits for the slowest: of the first packs with which it is short.

        Where it is short with no packs, it is the least over all capacities.
        """
        kept = (packing for packing in self._usual if self._solver.keeps_batch(packing, self.layout))
        least = math.inf
        for packing in kept:
            least = min(least, self._solver.waiting_share(packing, self.layout))
            if least <= _WORTH_WAITING:
                break
        return least if least < math.inf else 0.0

    @property
    def _evening(self) -> int:
        """Number of ranks to which the surplus of the slowest one can be dealt."""
        # The slowest rank has 1 / (1 - waiting) times the work of the mean one.
        enough = (degree for degree in self._degrees if degree >= 1 / (1 - self.waiting))
        return next(enough, self._degrees[-1])

    @cached_property
    def _recomputing(self) -> int | None:
        """Least number of ranks on which the longest sample fits with everything recomputed."""
        return self._least_degree(recompute=True)

    @cached_property
    def _keeping(self) -> int | None:
        """Least number of ranks on which the longest sample fits with nothing recomputed."""
        return self._least_degree(recompute=False)

    def _least_degree(self, *, recompute: bool) -> int | None:
        for degree in self._degrees:
            # Without padding, one sample alone is a pack of its own.
            packing = Padded(samples=1) if degree == 1 else _packs(_longest(self._data), degree)
            leanest = self._solver.leanest(packing, self.layout, recompute=recompute)
            if self._solver.fullest(leanest)[0] <= self._usable:
                return degree
        return None


def _ladders(degrees: Sequence[int], last: Sequence[int]) -> Iterator[Degrees]:
    """Yield one level that ranks share, then one of single ranks below each of the `last`, then one in between."""
    yield from ((degree,) for degree in last if degree > 1)
    yield from ((1, degree) for degree in last)
    yield from ((1, between, degree) for degree in last for between in degrees if 1 < between < degree)


def _first_level(workload: Workload, further: Iterable[int]) -> tuple[Pair, ...]:
    """Return the capacities that the short samples fill, and those of `further` tokens, below the longest sample."""
    data = workload.data
    most = data.longest_text_tokens // _SHORT
    rows = [row for row in data.histogram if row[1] <= most] or [min(data.histogram, key=lambda row: row[1])]
    short = replace(
        data,
        samples=sum(count for *_, count in rows),
        vision_units=sum(units * count for units, _, count in rows),
        # Lengths are rounded up in the histogram, by half a grain on average.
        text_tokens=sum(max(tokens - _GRAIN // 2, 1) * count for _, tokens, count in rows),
        longest_text_tokens=max(tokens for _, tokens, _ in rows),
        most_vision_units=max(units for units, _, _ in rows),
        histogram=tuple(rows),
    )
    found = [(pair.qv, pair.qt) for pair in capacities(short, workload.global_batch_samples, hold_all=False)]
    found += (capacity_of(data, tokens) for tokens in further)
    below = sorted({pair for pair in found if pair[1] < data.longest_text_tokens}, key=lambda pair: (pair[1], pair[0]))
    return tuple(below) or ((max(short.most_vision_units, 1), short.longest_text_tokens),)


def _packs(capacities: Pair, sequence: int) -> Packed:
    qv, qt = capacities
    return Packed(qv=qv, qt=qt, qv_min=0, qt_min=0, packer=SIMPLE_PACKER, sequence=sequence)


def _longest(data: DataProfile) -> Pair:
    return max(data.most_vision_units, 1), data.longest_text_tokens

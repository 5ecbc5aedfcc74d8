"""Fit of exchanges: time and memory of each as a function of a pack's size, from the timings of all ranks."""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

import numpy as np

from autotune.prediction.columns import CONSTANT, SQUARES, TOKENS
from autotune.prediction.fit.robust import fit_not_negative
from trials.costs.coefficients import Coefficients
from trials.costs.exchange import Exchange
from trials.tasks.answer import ExchangeTiming, ProfileReport


def fit_exchanges(reports: Sequence[ProfileReport], of_node: int) -> tuple[Exchange, ...]:
    """Return each exchange that the ranks timed, `of_node` of them on each of several nodes, or 0."""
    sizes: dict[object, list[tuple[ExchangeTiming, ...]]] = {}
    for of_ranks in zip(*(report.exchanges for report in reports), strict=True):
        first = of_ranks[0]
        key = (first.name, first.ranks, first.layer, first.pipeline, first.within)
        sizes.setdefault(key, []).append(of_ranks)
    return tuple(_fit(same, of_node) for same in sizes.values())


def slowest_exchange(seconds: Sequence[float], ranks: int, of_node: int) -> float:
    """Return how long an exchange takes that groups of `ranks` neighbours run at once; `seconds` are of all ranks.

    All begin together, and the last rank of a group waits for no other, so that its time is the least. On several nodes
    a rank behind the link between them receives more by it, and ends later than its neighbours on the node; the next
    exchange waits for it. So the least is taken of ranks at the same place among those that their group has on a node,
    and the most of the places; a step waits for the slowest group.
    """
    groups = (range(first, first + ranks) for first in range(0, len(seconds), ranks))
    return max(_of_group(seconds, group, of_node or len(seconds)) for group in groups)


def _of_group(seconds: Sequence[float], group: range, of_node: int) -> float:
    on_nodes = [[seconds[rank] for rank in own] for _, own in groupby(group, lambda rank: rank // of_node)]
    if len(on_nodes) == 1:
        return min(on_nodes[0])
    # A place that a node lacks is left out: its ranks may all have waited for one on that node. The ranks behind links
    # are the first that a group has on each node.
    places: Iterable[tuple[float, ...]] = zip(*on_nodes, strict=False)
    return max(min(place) for place in places)


def _fit(sizes: Sequence[Sequence[ExchangeTiming]], of_node: int) -> Exchange:
    """Return an exchange from the timings of all ranks, by size."""
    first = sizes[0][0]
    ranks = first.ranks
    parts = np.array([(0, of_ranks[0].tokens / ranks, of_ranks[0].squares / ranks, 1) for of_ranks in sizes])
    terms = (TOKENS, CONSTANT) if parts[:, TOKENS].any() else (CONSTANT,)

    def seconds(quantity: Callable[[ExchangeTiming], float]) -> Coefficients:
        slowest = [slowest_exchange([*map(quantity, of_ranks)], ranks, of_node) for of_ranks in sizes]
        return fit_not_negative(parts, np.array(slowest), terms)

    def held(quantity: Callable[[ExchangeTiming], int | None]) -> Coefficients | None:
        if quantity(first) is None:
            return None
        most = [max(quantity(timing) or 0 for timing in of_ranks) for of_ranks in sizes]
        return fit_not_negative(parts, np.array(most, dtype=np.float64), (TOKENS, SQUARES, CONSTANT))

    return Exchange(
        name=first.name,
        ranks=ranks,
        layer=first.layer,
        pipeline=first.pipeline,
        within=first.within,
        forward_seconds=seconds(lambda timing: timing.forward_seconds),
        backward_seconds=seconds(lambda timing: timing.backward_seconds),
        recompute_seconds=seconds(lambda timing: timing.recompute_seconds),
        added_share=max(timing.added_share for of_ranks in sizes for timing in of_ranks),
        kept_bytes=held(lambda timing: timing.kept_bytes),
        shared_bytes=held(lambda timing: timing.shared_bytes),
        transient_bytes=held(lambda timing: timing.transient_bytes),
    )

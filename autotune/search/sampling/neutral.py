"""Choices among plans by their packs, which many plans share."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from trials.arrays import Floats
from trials.plan import Layout, Packing, Plan


class NeutralPlans:
    """Choice of a plan whose steps change nothing that is learned. Packs are checked once they are to be chosen."""

    def __init__(self, learning_faults: Callable[[Plan], tuple[str, ...]]) -> None:
        self._learning_faults = learning_faults
        self._has_fault: dict[tuple[Packing, int], bool] = {}
        """For packings and numbers of data ranks that were checked."""

    def best(self, plans: Sequence[Plan], worth: Floats) -> Plan | None:
        """Return the plan of most `worth` [plans] among those without a fault; None if each has one."""
        order: list[int] = np.argsort(-worth, kind="stable").tolist()
        for plan in (plans[number] for number in order):
            packs = plan.packing, plan.layout.data
            if packs not in self._has_fault:
                self._has_fault[packs] = bool(self._learning_faults(plan))
            if not self._has_fault[packs]:
                return plan
        return None

    def excludes(self, plan: Plan) -> bool:
        """Return whether packs of the plan are known to have a fault: then all plans of these packs have it."""
        return self._has_fault.get((plan.packing, plan.layout.data), False)


def at_most_of_packs(plans: Iterable[Plan], count: int) -> Iterator[Plan]:
    """Yield the first `count` plans of each packing and layout."""
    found: Counter[tuple[Packing, Layout]] = Counter()
    for plan in plans:
        packs = plan.packing, plan.layout
        found[packs] += 1
        if found[packs] <= count:
            yield plan

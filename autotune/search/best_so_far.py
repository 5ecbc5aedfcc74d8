"""The best plan of a search that still runs, compared with the baselines."""

import math
from collections.abc import Sequence

from autotune.events import BestSoFar, Gain
from autotune.search.learning.surrogate import Surrogate
from autotune.search.roles import BASELINES
from autotune.search.winner import Roles
from storage.records import FinishedTrial
from trials.plan import Plan


def best_so_far(
    best: Plan | None, trials: Sequence[FinishedTrial], roles: Roles, surrogate: Surrogate
) -> BestSoFar | None:
    """Compare a measured plan with the fastest plan of each kind of baseline, the fastest kind first.

    The trials of these plans alone count. None without a plan.

    `trials` are those that rank plans that may win; the surrogate has learnt from them.
    """
    if best is None:
        return None
    tried = dict.fromkeys(trial.plan for trial in trials)
    plans = [best, *(plan for plan in tried if not roles.get(plan, frozenset()).isdisjoint(BASELINES))]
    measured = surrogate.measured(plans)
    gains = []
    for role in BASELINES:
        numbers = [number for number, plan in enumerate(plans) if role in roles.get(plan, ())]
        if numbers:
            slower, error = measured.difference(min(numbers, key=lambda number: measured.mean[number]), 0)
            gains.append(Gain(role=str(role), gain=math.exp(slower), error=math.exp(slower) * error))
    seconds = math.exp(measured.mean[0])
    return BestSoFar(
        plan=best,
        epoch_seconds=seconds,
        epoch_seconds_error=seconds * float(measured.error[0]),
        gains=tuple(sorted(gains, key=lambda gain: gain.gain)),
    )

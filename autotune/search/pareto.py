"""The plans of a study that no other plan beats in every objective."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from autotune.search.execution.ledger import duration_seconds
from autotune.search.winner import Standing, Standings
from storage.records import FinishedTrial, ParetoPlan
from trials.plan import Plan


def pareto(
    standings: Standings, trials: Iterable[FinishedTrial], samples: int, objectives: Sequence[str]
) -> tuple[ParetoPlan, ...]:
    """Return the Pareto set, the fastest first; empty when time is the only objective. `samples` are those of an epoch.

    Plans that may win alone are compared, and not by energy where the devices do not count it.
    """
    if set(objectives) <= {"time"}:
        return ()
    counted: dict[Plan, list[FinishedTrial]] = defaultdict(list)
    for trial in trials:
        if trial.result.energy_joules is not None:
            counted[trial.plan].append(trial)
    # Mean power of all devices, start and warm-up included.
    watts = {
        plan: sum(trial.result.energy_joules or 0.0 for trial in each) / sum(map(duration_seconds, each))
        for plan, each in counted.items()
    }
    able = (standings.entries[number] for number in standings.able)
    found = [_entry(standing, watts.get(standing.plan), samples) for standing in able]
    # `reshape`, since an empty list would become an array without columns.
    values = np.array([_values(entry, objectives) for entry in found]).reshape(len(found), -1)
    # A plan is dominated when another one is no worse in any objective and better in one.
    no_worse, better = values[:, None] >= values, values[:, None] > values
    dominated = np.any(np.all(no_worse, axis=2) & np.any(better, axis=2), axis=1).tolist()
    return tuple(entry for entry, is_dominated in zip(found, dominated, strict=True) if not is_dominated)


def _entry(standing: Standing, watts: float | None, samples: int) -> ParetoPlan:
    return ParetoPlan(
        plan=standing.plan,
        estimated_samples_per_second=samples / standing.epoch_seconds,
        peak_bytes=standing.peak_bytes,
        joules_per_sample=None if watts is None else watts * standing.epoch_seconds / samples,
    )


def _values(entry: ParetoPlan, objectives: Sequence[str]) -> tuple[float, ...]:
    """Return the objectives, each to be minimized; energy that was not counted is infinite."""
    joules = math.inf if entry.joules_per_sample is None else entry.joules_per_sample
    of = {"time": 1 / entry.estimated_samples_per_second, "memory": entry.peak_bytes, "energy": joules}
    return tuple(of[objective] for objective in dict.fromkeys(objectives))

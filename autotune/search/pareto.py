"""The plans of a study that no other plan beats in every objective."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from autotune.search.winner import Standing, Standings
from storage.records import FinishedTrial, ParetoPlan
from trials.outcome import Completed
from trials.plan import Plan


def pareto(
    standings: Standings, trials: Iterable[FinishedTrial], samples: int, objectives: Sequence[str]
) -> tuple[ParetoPlan, ...]:
    """Return the Pareto set, the fastest first; empty when time is the only objective. `samples` are those of an epoch.

    Plans that may win alone are compared, and not by energy where the devices do not count it.
    """
    if set(objectives) <= {"time"}:
        return ()
    joules, seconds = defaultdict[Plan, float](float), defaultdict[Plan, float](float)
    for trial in trials:
        outcome, energy = trial.result.outcome, trial.result.energy_joules
        if isinstance(outcome, Completed) and energy is not None:
            joules[trial.plan] += energy
            seconds[trial.plan] += sum(outcome.measurement.step_seconds)
    watts = {plan: joules[plan] / seconds[plan] for plan in joules}
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

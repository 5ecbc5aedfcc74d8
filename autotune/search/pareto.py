"""The plans of a study that no other plan beats in every objective."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from autotune.predict.costs import Array
from autotune.search.execution.ledger import duration_seconds
from autotune.search.winner import Field, Standing
from storage.records import FinishedTrial, ParetoPlan
from trials.plan import Plan


def pareto(
    field: Field, trials: Iterable[FinishedTrial], samples: int, objectives: Sequence[str]
) -> tuple[ParetoPlan, ...]:
    """The fastest first; empty when time is the only objective. `samples` of an epoch.

    Where devices do not count energy, plans are not compared by it.
    """
    if set(objectives) <= {"time"}:
        return ()
    watts = _watts(trials)
    found = [_entry(standing, watts.get(standing.plan), samples) for standing in field.standings]
    values = np.array([_values(entry, objectives) for entry in found]).reshape(len(found), -1)
    return tuple(entry for entry, value in zip(found, values, strict=True) if not _is_beaten(value, values))


def _entry(standing: Standing, watts: float | None, samples: int) -> ParetoPlan:
    return ParetoPlan(
        plan=standing.plan,
        samples_per_second=samples / standing.epoch_seconds,
        peak_bytes=standing.peak_bytes,
        joules_per_sample=None if watts is None else watts * standing.epoch_seconds / samples,
    )


def _watts(trials: Iterable[FinishedTrial]) -> dict[Plan, float]:
    """Mean power of all devices in the trials of each plan, start and warm-up included."""
    spent: dict[Plan, list[tuple[float, float]]] = defaultdict(list)
    for trial in trials:
        if trial.result.energy_joules is not None:
            spent[trial.plan].append((trial.result.energy_joules, duration_seconds(trial)))
    return {
        plan: sum(joules for joules, _ in each) / sum(seconds for _, seconds in each) for plan, each in spent.items()
    }


def _values(entry: ParetoPlan, objectives: Sequence[str]) -> tuple[float, ...]:
    """Less is better; energy that was not counted is more than any that was."""
    joules = math.inf if entry.joules_per_sample is None else entry.joules_per_sample
    of = {"time": 1 / entry.samples_per_second, "memory": entry.peak_bytes, "energy": joules}
    return tuple(of[objective] for objective in dict.fromkeys(objectives))


def _is_beaten(value: Array, values: Array) -> bool:
    return bool(((values <= value).all(axis=1) & (values < value).any(axis=1)).any())

"""From the trials of a plan to its speed with an error, and from all plans to the winner. Pure functions of records."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autotune.search.ledger import BASELINES
from storage.records import Baseline, FinishedTrial
from trials.outcome import Completed, Failed, OutOfMemory
from trials.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What all completed trials of one plan say together."""

    plan: Plan
    roles: frozenset[str]
    epoch_seconds: float
    """The median over its trials: a burst of other work on the machine in one of three does not move it."""
    epoch_seconds_error: float
    """Standard error of the mean over trials, but no less than what the trials' own errors give."""
    peak_bytes: int
    """Of the fullest rank, over all trials."""
    trials: int


def standings(trials: Iterable[FinishedTrial]) -> tuple[Standing, ...]:
    """Every plan that completed and never ran out of memory, the fastest first."""
    by_plan: dict[str, list[FinishedTrial]] = defaultdict(list)
    too_large = set()
    for trial in trials:
        match trial.result.outcome:
            case Completed():
                by_plan[trial.plan.id].append(trial)
            case Failed(cause=OutOfMemory()):
                too_large.add(trial.plan.id)
    safe = (_standing(found) for plan, found in by_plan.items() if plan not in too_large)
    return tuple(sorted(safe, key=lambda entry: entry.epoch_seconds))


def _standing(trials: Sequence[FinishedTrial]) -> Standing:
    seconds = [trial.result.epoch_seconds or math.nan for trial in trials]
    errors = [trial.result.epoch_seconds_error or 0.0 for trial in trials]
    own = math.hypot(*errors) / len(errors)
    between = statistics.stdev(seconds) / math.sqrt(len(seconds)) if len(seconds) > 1 else 0.0
    return Standing(
        plan=trials[0].plan,
        roles=frozenset(trial.role for trial in trials),
        epoch_seconds=statistics.median(seconds),
        epoch_seconds_error=max(own, between),
        peak_bytes=max(
            t.result.outcome.measurement.peak_bytes for t in trials if isinstance(t.result.outcome, Completed)
        ),
        trials=len(trials),
    )


def repeated(found: Sequence[Standing]) -> Sequence[Standing]:
    """Those that ran more than once, if any did: one lucky trial neither wins nor serves for comparison."""
    return [standing for standing in found if standing.trials > 1] or found


def finalists(found: Sequence[Standing], most: int) -> tuple[Standing, ...]:
    """The fastest plans, and the fastest of each kind of baseline, which the winner is compared with."""
    chosen = {standing.plan.id: standing for standing in found[:most]}
    for best in best_baselines(found).values():
        chosen.setdefault(best.plan.id, best)
    return tuple(chosen.values())


def best_baselines(found: Sequence[Standing]) -> Mapping[str, Standing]:
    """By role, the fastest plan that ran in that role."""
    return {
        role: next(standing for standing in found if role in standing.roles)
        for role in BASELINES
        if any(role in standing.roles for standing in found)
    }


def compare(winner: Standing, found: Sequence[Standing], samples: int) -> tuple[Baseline, ...]:
    """The winner against every baseline that completed; `samples` of an epoch."""
    return tuple(
        Baseline(
            role=role,
            samples_per_second=samples / other.epoch_seconds,
            samples_per_second_error=samples / other.epoch_seconds * _relative_error(other),
            gain=other.epoch_seconds / winner.epoch_seconds,
            gain_error=other.epoch_seconds
            / winner.epoch_seconds
            * math.hypot(_relative_error(other), _relative_error(winner)),
        )
        for role, other in best_baselines(found).items()
    )


def _relative_error(standing: Standing) -> float:
    return standing.epoch_seconds_error / standing.epoch_seconds

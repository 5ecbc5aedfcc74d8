"""The speed of a tried plan, and how certain it is."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from autotune.plan_text import outcome_text
from autotune.search.study_settings import TRAINER
from storage.records import BestPlan, FinishedTrial, TriedPlan
from trials.outcome import Completed
from trials.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Samples per second over an epoch."""

    mean: float
    error: float
    """Standard error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPlan:
    """A plan, and how fast it is expected to train."""

    plan: Plan
    speed: Speed | None
    """None for a plan that no trial measured to its end, and for one that was measured under other conditions."""


def of_winner(best: BestPlan) -> KnownPlan:
    return KnownPlan(
        plan=best.plan,
        speed=Speed(mean=best.estimated_samples_per_second, error=best.estimated_samples_per_second_error),
    )


def of_tried(tried: TriedPlan) -> KnownPlan:
    """Return the plan with its speed: as its study found it where it explains the plan, else the mean of its runs."""
    if tried.won:
        return of_winner(tried.won)
    if (time := tried.time) is not None:
        mean = tried.workload.data.samples / time.epoch_seconds
        return KnownPlan(
            plan=tried.plan, speed=Speed(mean=mean, error=mean * time.epoch_seconds_error / time.epoch_seconds)
        )
    runs = counted_runs(tried)
    if not runs:
        return KnownPlan(plan=tried.plan, speed=None)
    seconds = [trial.result.epoch_seconds or math.nan for trial in runs]
    # Two standard errors of the mean: from the runs' own errors, and from the scatter between runs. The larger counts.
    own = math.hypot(*(trial.result.epoch_seconds_error or 0.0 for trial in runs)) / len(runs)
    scatter = stdev(seconds) / math.sqrt(len(runs)) if len(runs) > 1 else 0.0
    mean = tried.workload.data.samples / fmean(seconds)
    return KnownPlan(plan=tried.plan, speed=Speed(mean=mean, error=mean * max(own, scatter) / fmean(seconds)))


def is_corrected(tried: TriedPlan) -> bool:
    """Return whether the speed of a plan is corrected for drift of the machine, as its study found it."""
    return tried.won is not None or tried.time is not None


def known_text(tried: TriedPlan) -> str:
    """Return one line with the rank of the plan in its study and the number of its runs there."""
    return f"{_place(tried)}; {_evidence(tried)}"


def _place(tried: TriedPlan) -> str:
    trainer, winner = tried.study.settings.get(TRAINER), tried.winner
    name = f"{tried.study.name}, for {trainer}," if trainer else tried.study.name
    if winner is None:
        return f"Study {name} tried plan {tried.plan.id} and has no winner yet"
    if tried.won:
        return f"Study {name} found plan {tried.plan.id} to be the fastest"
    if tried.plan.id in winner.ties:
        return f"In study {name} plan {tried.plan.id} may be as fast as the winner, {winner.plan.id}"
    return f"In study {name} plan {winner.plan.id} won instead of {tried.plan.id}"


def _evidence(tried: TriedPlan) -> str:
    runs = counted_runs(tried)
    if not runs:
        finished = [trial.result for trial in tried.trials if isinstance(trial, FinishedTrial)]
        samples = tried.workload.data.samples
        ends = Counter(outcome_text(result.outcome, result.epoch_seconds, samples) for result in finished)
        results = ", ".join(f"{end} ({count}x)" if count > 1 else end for end, count in ends.items())
        return f"no run of it was completed there: {results or 'none has a result'}"
    times = f"in {len(runs)} runs" if len(runs) > 1 else "in one run only"
    disturbed = [trial for trial in runs if trial.result.disturbance]
    doubt = f", disturbed each time: the last time {disturbed[-1].result.disturbance}" if disturbed else ""
    drift = "" if is_corrected(tried) else "; its speed is not corrected for drift of the machine"
    return f"measured there {times}{doubt}{drift}"


def counted_runs(tried: TriedPlan) -> Sequence[FinishedTrial]:
    """Return the completed runs; disturbed runs only where there is no undisturbed one."""
    finished = [(trial, trial.result.outcome) for trial in tried.trials if isinstance(trial, FinishedTrial)]
    whole = [trial for trial, outcome in finished if isinstance(outcome, Completed) and not outcome.shortened]
    return [trial for trial in whole if trial.result.disturbance is None] or whole

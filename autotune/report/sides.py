"""The two plans that a report compares: the fastest baseline that may win, and what the search found."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from autotune.report.simulation import PackedEpoch, Simulated, Simulator
from autotune.report.source import StudySource
from autotune.results.headline import kind_of_baseline
from autotune.results.known_plan import Speed
from storage.explanation import PlanTime
from storage.records import BestPlan, FinishedTrial
from trials.outcome import Completed, Measurement
from trials.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ComparedPlan:
    """One of the compared plans, with what is measured and what is simulated of it."""

    key: Literal["before", "after"]
    title: str
    plan: Plan
    roles: tuple[str, ...]
    """Why it was tried."""
    speed: Speed | None
    """Measured speed; None for a plan that no run measured to its end."""
    epoch_seconds: float | None
    """Seconds of an epoch at that speed."""
    run: FinishedTrial | None
    """The newest complete run, undisturbed if there is such a run."""
    peak_bytes: Mapping[int, int]
    """Most measured bytes of each stage, by its number; empty for a plan without a complete run."""
    time: PlanTime | None
    """Where its measured time goes; None where no explanation says so."""
    simulated: Simulated | str
    """The simulation, or why there is none."""
    packs: PackedEpoch | str
    """The packs of drawn samples, or why there are none."""

    @property
    def measurement(self) -> Measurement | None:
        outcome = None if self.run is None else self.run.result.outcome
        return outcome.measurement if isinstance(outcome, Completed) else None

    @property
    def step_seconds(self) -> float | None:
        """Measured seconds of a mean step; None for a plan without a measurement."""
        if self.measurement is not None:
            return fmean(self.measurement.step_seconds)
        return None if self.time is None else self.time.epoch_seconds / self.time.steps


def sides(source: StudySource, simulator: Simulator) -> tuple[ComparedPlan, ...]:
    """Return the compared baseline and the best plan, where known; one entry where both are the same plan."""
    before, after = source.usual, source.best
    found = []
    if before is not None and before != after:
        found.append(_side(source, simulator, "before", f"Before: {_baseline(source, before)}", before))
    if after is not None:
        name = "After: the best plan" if source.winner is not None else "After: the fastest plan so far"
        found.append(_side(source, simulator, "after", name, after))
    return tuple(found)


def _baseline(source: StudySource, plan: Plan) -> str:
    seconds = (trial.result.epoch_seconds for trial in source.finished if trial.plan == plan)
    if source.time(plan) is None and all(each is None for each in seconds):
        return "a baseline without a result"
    return f"the {compared_baseline(source.winner)}"


def compared_baseline(best: BestPlan | None) -> str:
    """Return what the plan before is among the baselines of the search, in words."""
    if best is None:
        return "fastest baseline"
    return f"{kind_of_baseline(best)}{' that ran' if best.not_run else ''}"


def _side(
    source: StudySource, simulator: Simulator, key: Literal["before", "after"], title: str, plan: Plan
) -> ComparedPlan:
    runs = source.runs(plan)
    speed, simulated = source.speed(plan), simulator.simulate(plan)
    return ComparedPlan(
        key=key,
        title=title,
        plan=plan,
        roles=source.roles(plan),
        speed=speed,
        epoch_seconds=source.workload.data.samples / speed.mean if speed is not None and speed.mean > 0 else None,
        run=runs[-1] if runs else None,
        peak_bytes=source.peak_bytes(plan),
        time=source.time(plan),
        simulated=simulated,
        packs=simulator.packs(plan) if isinstance(simulated, str) else simulated.packs,
    )

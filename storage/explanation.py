"""Why a plan won: where the time of the usual settings went, and what each change of them gives."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from storage.baseline import Baseline
from trials.plan import Plan

Basis: TypeAlias = Literal["measured", "divided", "simulated", "predicted", "rest"]
"""How a part of the time is known: measured on the ranks; measured work that is divided in the profile's proportions;
simulated with measured times; from the profile, as far as trials corrected it; or the measured rest."""
IDEAL, UNEXPLAINED = "ideal", "unexplained"
"""Parts of the time that have no cause: the useful work, and the measured rest."""
BEST = "best"
"""Role of the winner."""
Change: TypeAlias = Literal["packing", "split", "recompute", "no-recompute", "recompute-alone", "shards", "zero-bubble"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePart:
    """One part of the time of an epoch."""

    name: str
    """A field of the predictor's `Breakdown`, or `unexplained`."""
    seconds: float
    """Negative for an unexplained part where the simulation takes longer than the measured steps."""
    error: float
    """Standard error."""
    basis: Basis


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTime:
    """Where the time of a measured plan goes."""

    plan: Plan
    role: str
    """BEST, the kind of baseline, or `tie` with the plan's id."""
    epoch_seconds: float
    epoch_seconds_error: float
    """Standard error."""
    steps: int
    """Steps of an epoch."""
    parts: tuple[TimePart, ...]
    """Parts of the epoch's time, which sum to `epoch_seconds`."""
    stage_peak_bytes: tuple[int, ...]
    """Measured on the fullest rank of each stage."""
    runs: int
    """Measured runs of the plan that were used."""
    disturbed: bool = False
    """Whether all of these runs were disturbed."""
    shortened: bool = False
    """Whether all of these runs ended early because the plan was clearly slower."""

    @property
    def plan_id(self) -> str:
        return self.plan.id

    @property
    def peak_bytes(self) -> int:
        """Bytes of the fullest rank."""
        return max(self.stage_peak_bytes)

    @property
    def causes(self) -> tuple[TimePart, ...]:
        """The parts in which time is lost, the largest first: all but the useful work and what is unexplained."""
        lost = (part for part in self.parts if part.name not in (IDEAL, UNEXPLAINED))
        return tuple(sorted(lost, key=lambda part: -part.seconds))

    def part(self, name: str) -> TimePart:
        return next(part for part in self.parts if part.name == name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeEffect:
    """What one change alone gives; the rest of the plan stays as it is."""

    change: Change
    plan: Plan
    epoch_seconds: float
    epoch_seconds_error: float
    """Standard error."""
    gain: float
    """How much faster the plan is with the change."""
    gain_error: float
    """Standard error."""
    peak_bytes: int
    """Peak bytes of the fullest rank."""
    fits: bool
    """Whether the memory limit allows it."""
    measured: bool
    """Whether a trial measured the plan; else all figures are predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedBaseline:
    """A baseline that was tried and has no result."""

    role: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Certainty:
    """Probability that no other plan that ran is faster than the winner, from two kinds of evidence."""

    by_runs: float
    """From the plans' own runs alone."""
    with_predictions: float
    """From their runs and from the predictions, as trials corrected them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why the winner of a study won."""

    plans: tuple[PlanTime, ...]
    """The winner, then a plan of each kind of baseline that was measured, then ties."""
    usual: str | None
    """Role of the usual settings, which are the fastest baseline that was measured, may win and is not the winner
    itself; without one the winner's own, else one that can only be compared; None if none was measured."""
    changes: tuple[ChangeEffect, ...]
    """Changes of the usual settings towards the winner, each alone."""
    further: tuple[ChangeEffect, ...]
    """Changes of the winner that other limits would allow."""
    ways: tuple[ChangeEffect, ...] = ()
    """The best plans with the winner's packs that fit the memory in one way each: recomputation alone, shards (ZeRO 3),
    and a pipeline with deferred weight gradients. Empty where the packs fit the memory without any."""
    not_run: tuple[str, ...] = ()
    """Roles of the baselines that the limits of the search left out: they may be faster than the usual settings."""
    failed: tuple[FailedBaseline, ...] = ()
    """Baselines without a result, such as for their memory."""
    tied: tuple[Baseline, ...] = ()
    """The ties, compared as baselines are, the fastest first; without those that are baselines."""
    certainty: Certainty | None = None
    """None where the winner has no confidence, and for a winner that an earlier version stored."""

    @property
    def winner(self) -> PlanTime:
        return self.plans[0]

    @property
    def of_usual(self) -> PlanTime | None:
        """The usual settings."""
        return None if self.usual is None else next(each for each in self.plans if each.role == self.usual)

    def of(self, plan_id: str) -> PlanTime | None:
        """Return where the time of a plan goes; None for a plan that was not compared."""
        return next((each for each in self.plans if each.plan_id == plan_id), None)

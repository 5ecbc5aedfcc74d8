"""The baseline that measured faster than the winner in its own runs, so that a training may better begin with it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.results.evidence import evidence_of
from storage.records import BestPlan, TrialSummary

MISSING = "two quiet repeats of both are missing: `autotune tune JOB --fresh` on an idle machine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A baseline that measured faster than the winner."""

    plan_id: str
    role: str
    speed_ratio: float
    """Its speed over that of the winner, by their own runs."""
    speed_ratio_error: float
    """Standard error."""
    is_disturbed: bool
    """Whether no run of any plan was quiet."""
    only_compared: str | None = None
    """Why it cannot win, in words; None where it may."""
    left_out: str | None = None
    """Why the trainer for which the study searched cannot hold the plan; None where it can, and without a trainer."""

    def __str__(self) -> str:
        disturbed = "all runs were disturbed, and " if self.is_disturbed else ""
        faster = (
            f"{disturbed}{self.role} ({self.plan_id}) measured faster, {self.speed_ratio:.2f} +- "
            f"{self.speed_ratio_error:.2f} times as fast as the best plan"
        )
        why_not = self.left_out or self.only_compared
        return f"{faster}; {MISSING}" if why_not is None else f"{faster}, but {why_not}"

    @property
    def may_win(self) -> bool:
        """Whether `search.space` contains the plan and it learns what the job asks for.

        Without a terminal, only such a baseline replaces the winner.
        """
        return self.only_compared is None


def rival_of(best: BestPlan, trials: Sequence[TrialSummary]) -> Rival | None:
    """Return the fastest baseline that ran faster by more than a standard error; one that search.space has, if any.

    `trials` are those behind the winner. A baseline is no rival if none of them measured its plan; one that an earlier
    version stored does not name it.
    """
    ran = {trial.plan_id for trial in trials if trial.kind == "completed"}
    rivals = (
        Rival(
            plan_id=baseline.plan_id,
            role=baseline.role,
            speed_ratio=1 / baseline.gain,
            speed_ratio_error=baseline.gain_error / baseline.gain**2,
            is_disturbed=evidence_of(best, trials).all_disturbed,
            only_compared=baseline.only_compared,
            left_out=baseline.left_out,
        )
        for baseline in best.baselines
        # The search compares logarithms of seconds, so the error is a share of the gain.
        if baseline.plan_id is not None
        and baseline.plan_id in ran
        and -math.log(baseline.gain) > baseline.gain_error / baseline.gain
    )
    return max(rivals, key=lambda rival: (rival.may_win, rival.speed_ratio), default=None)

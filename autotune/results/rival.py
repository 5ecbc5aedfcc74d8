"""Baselines and ties that measured faster than the winner in their own runs.

A training may better begin with such a baseline. A tie does not take the winner's place, as predictions count.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autotune.results.evidence import ROUNDING, evidence_of, range_text, ranges_of_runs
from storage.baseline import Baseline
from storage.records import BestPlan, TrialSummary

_REPEAT = "`autotune tune JOB --fresh` on an idle machine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A baseline or a tie that measured faster than the winner."""

    plan_id: str
    role: str
    """Kind of the baseline, or `a tie`."""
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
    lost: str | None = None
    """Why a tie did not win, in words; None for a baseline."""

    def __str__(self) -> str:
        disturbed = "all runs were disturbed, and " if self.is_disturbed else ""
        faster = (
            f"{disturbed}{self.role} ({self.plan_id}) measured faster, {self.speed_ratio:.2f} +- "
            f"{self.speed_ratio_error:.2f} times as fast as the best plan"
        )
        if self.lost is not None:
            return f"{faster}, but {self.lost}; two more quiet repeats of both decide: {_REPEAT}"
        why_not = self.left_out or self.only_compared
        missing = f"{faster}; two quiet repeats of both are missing: {_REPEAT}"
        return missing if why_not is None else f"{faster}, but {why_not}"

    @property
    def sentence(self) -> str:
        """The text as a line of its own."""
        text = str(self)
        return f"{text[0].upper()}{text[1:]}"

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
    rivals = (
        rival
        for baseline in best.baselines
        # The search compares logarithms of seconds, so the error is a share of the gain.
        if -math.log(baseline.gain) > baseline.gain_error / baseline.gain
        and (rival := _rival(best, baseline, trials)) is not None
    )
    return max(rivals, key=lambda rival: (rival.may_win, rival.speed_ratio), default=None)


def faster_tie(best: BestPlan, trials: Sequence[TrialSummary]) -> Rival | None:
    """Return the tie that ran fastest, if it ran faster than the winner; `trials` are those behind the winner."""
    tied = () if best.explanation is None else best.explanation.tied
    # Within the errors too: the winner was chosen although it was slower, which a reader of the runs will ask about.
    faster = (tie for tie in tied if tie.gain < 1 - ROUNDING)  # the fastest first
    found = (rival for tie in faster if (rival := _rival(best, tie, trials)) is not None)
    tie = next(found, None)
    if tie is None:
        return None
    runs = _counting([trial for trial in trials if trial.kind == "completed" and not trial.shortened])
    own, of_best = ([run for run in runs if run.plan_id == plan_id] for plan_id in (tie.plan_id, best.plan.id))
    lost = "it ran once" if len(own) < 2 <= len(of_best) else "predictions speak against it"
    ranges = ranges_of_runs(runs)
    if tie.plan_id in ranges and best.plan.id in ranges:
        took, best_took = (range_text(ranges[plan_id]) for plan_id in (tie.plan_id, best.plan.id))
        lost = f"{lost} (an epoch took {took} s in its runs, {best_took} s in those of the best plan)"
    return replace(tie, role="a tie", lost=lost)


def _counting(runs: Sequence[TrialSummary]) -> list[TrialSummary]:
    """Return the runs by which a search ranks plans: a disturbed one counts only for a plan without another."""
    quiet = {run.plan_id for run in runs if run.disturbance is None}
    return [run for run in runs if run.disturbance is None or run.plan_id not in quiet]


def _rival(best: BestPlan, compared: Baseline, trials: Sequence[TrialSummary]) -> Rival | None:
    """Return a plan that was compared with the winner as its rival; None where no trial measured it."""
    if compared.plan_id is None or all(
        trial.plan_id != compared.plan_id for trial in trials if trial.kind == "completed"
    ):
        return None
    return Rival(
        plan_id=compared.plan_id,
        role=compared.role,
        speed_ratio=1 / compared.gain,
        speed_ratio_error=compared.gain_error / compared.gain**2,
        is_disturbed=evidence_of(best, trials).all_disturbed,
        only_compared=compared.only_compared,
        left_out=compared.left_out,
    )

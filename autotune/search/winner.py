"""Standings of the plans of a study, its finalists, and its winner with confidence and ties."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autotune.search.learning.surrogate import Posterior, Surrogate
from autotune.search.roles import BASELINES
from storage.baseline import Baseline
from storage.explanation import Certainty
from storage.records import FinishedTrial
from trials.arrays import Floats
from trials.outcome import Completed, Failed, OutOfMemory
from trials.plan import Plan

# The usual level of significance, as a probability.
SURE = 0.95
"""Probability of being slower, by all evidence or by the runs alone, with which a plan is no tie of the winner."""
# A choice: the least width of the surrogate's grids, below which repeats hardly tell plans apart.
SMALL_LOSS = 0.003
"""Expected loss, as a share of the time, below which a further round of repeats is not worth it."""
Roles: TypeAlias = Mapping[Plan, frozenset[str]]
"""Roles in which plans were tried in this study."""
_DRAWS = 4096
"""Draws from the posterior, which give probabilities to about a per cent."""
# A choice: each finalist costs a trial in every round of repeats.
FINALISTS = 3
"""Most plans that are repeated because they may win."""
_LEAST_FINALISTS = 2
"""So that the winner is compared with another plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Result of all trials of one plan."""

    plan: Plan
    roles: frozenset[str]
    epoch_seconds: float
    """Estimate from all trials, corrected for the machine's drift."""
    epoch_seconds_error: float
    """Standard error."""
    peak_bytes: int
    """Peak of the fullest rank, over all trials."""
    trials: int
    is_disturbed: bool = False
    """Whether other programs disturbed each of them."""
    may_win: bool = True
    """False for a plan that others are only compared with, unless baselines alone completed."""
    is_neutral: bool = True
    """Whether it learns what the job asks for: another plan does not win while there is a choice."""

    @property
    def is_baseline(self) -> bool:
        return not self.roles.isdisjoint(BASELINES)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Winner:
    """The fastest of the compared plans."""

    number: int
    """Position of the plan that is most probably fastest, or of a baseline whose own runs are faster."""
    confidence: float | None
    """Probability that no other that ran is faster; None without another, and where baselines alone were measured."""
    certainty: Certainty | None
    """That probability by the plans' own runs and with predictions; None where there is no confidence."""
    ties: tuple[int, ...]
    """Positions of the plans that may be as fast."""
    loss: float
    """Expected loss from choosing the winner if another plan is faster, as a share of its time."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Standings:
    """All plans that completed and never ran out of memory, the fastest first."""

    entries: tuple[Standing, ...]
    posterior: Posterior
    """Corrected by all trials, in the order of `entries`. It decides which plans are compared, and which wins."""
    measured: Posterior
    """From the plans' own trials alone, in the order of `entries`. It gives the figures that are stated."""
    baseline_wins: bool = True
    """Whether the fastest baseline wins where no plan completed that may."""

    @property
    def compared(self) -> Sequence[int]:
        """Positions of plans that ran more than once, and of contenders whose repeat is missing or failed."""
        return sorted({*self.repeated, *self._contenders(FINALISTS)})

    @property
    def repeated(self) -> Sequence[int]:
        """Positions of plans that may win and ran more than once; all that may win if none did."""
        # One lucky trial shall not win.
        return [number for number in self.able if self.entries[number].trials > 1] or self.able

    @property
    def has_searched(self) -> bool:
        """Whether a plan completed that was asked for; otherwise the fastest baseline wins."""
        return any(standing.may_win for standing in self.entries)

    @property
    def able(self) -> list[int]:
        """Positions of plans that may win: where none that was asked for completed, of the baselines that may."""
        able = [number for number, standing in enumerate(self.entries) if standing.may_win]
        if not self.baseline_wins:
            return able
        baselines = [number for number, standing in enumerate(self.entries) if standing.is_baseline]
        return able or [number for number in baselines if self.entries[number].is_neutral] or baselines

    def contenders(self, most: int) -> tuple[Plan, ...]:
        """Return the plan that is most probably fastest, that of the fastest runs, and others of `most` that may win.

        Where both are one, the next one is returned in any case.
        """
        return tuple(self.entries[number].plan for number in self._contenders(most))

    def _contenders(self, most: int) -> list[int]:
        able = self.able
        if not able:
            return []
        # By the probability to win, not by the mean: plans that are alike share their errors, and one stands for all.
        wins = np.bincount(_drawn(self.posterior, able).argmin(axis=1), minlength=len(able))
        first, *others = np.argsort(-wins, kind="stable").tolist()
        # Under load, predictions may outweigh the measurements; a repeat decides.
        measured = int(np.argmin(self.measured.mean[able]))
        ordered = dict.fromkeys((first, measured, *others))
        return [
            able[number]
            for place, number in enumerate(islice(ordered, most))
            if place < _LEAST_FINALISTS or wins[number] > (1 - SURE) * _DRAWS
        ]

    def finalists(self, most: int) -> tuple[Plan, ...]:
        """Return the contenders, then the fastest plan of each kind of baseline: first those that may win, by speed."""
        able = self.able
        fastest = (numbers[0] for role in BASELINES if (numbers := self._of_role(role)))
        baselines = sorted(fastest, key=lambda number: (number not in able, number))
        return tuple(dict.fromkeys((*self.contenders(most), *(self.entries[number].plan for number in baselines))))

    def baseline(self, role: str) -> int | None:
        """Return the position of the plan that stands for a kind of baseline: its fastest one, repeated if any was."""
        of_role = self._of_role(role)
        # A plan that ran once may have been lucky, so a repeated one is preferred.
        repeated = (number for number in of_role if self.entries[number].trials > 1)
        return next(repeated, of_role[0] if of_role else None)

    def _of_role(self, role: str) -> list[int]:
        return [number for number, standing in enumerate(self.entries) if role in standing.roles]

    def winner(self, holds: Callable[[Plan], bool] = lambda _: True) -> Winner:
        """Return the winner of the compared plans, by draws from the posterior, the same for the same trials.

        A baseline whose own runs are faster than those of that plan wins in its place: no search ends below a baseline.
        `holds` says whether the trainer of the search can hold a plan; others do not count in the probability.
        """
        numbers = self.compared
        drawn = _drawn(self.posterior, numbers)
        fastest = drawn.argmin(axis=1)
        wins = np.bincount(fastest, minlength=len(numbers))
        # A contender without a repeat can be a tie, but not the winner.
        probable = max(map(numbers.index, self.repeated), key=wins.__getitem__)
        winner = numbers.index(self._at_least_baselines(numbers[probable]))
        sure = float((fastest == winner).mean())
        is_stated = len(numbers) > 1 and any(not each.is_baseline for each in self.entries)
        by_runs = self._sure_by_runs(numbers[winner], holds, everything=True)
        return Winner(
            number=numbers[winner],
            confidence=min(sure, self._sure_by_runs(numbers[winner], holds)) if is_stated else None,
            certainty=Certainty(by_runs=by_runs, with_predictions=sure) if is_stated else None,
            ties=self._ties(numbers, winner, drawn),
            loss=float((drawn[:, winner] - drawn.min(axis=1)).mean()),
        )

    def _ties(self, numbers: Sequence[int], winner: int, drawn: Floats) -> tuple[int, ...]:
        """Return the compared plans that are not surely slower; `winner` is the position in `numbers`.

        Where the runs of both tell them apart, a prediction that says otherwise makes no tie.
        """
        slower, measured = ((each > each[:, [winner]]).mean(axis=0) for each in (drawn, _drawn(self.measured, numbers)))
        return tuple(
            number
            for place, number in enumerate(numbers)
            if place != winner
            and slower[place] < SURE
            and (measured[place] < SURE or min(self.entries[each].trials for each in (number, numbers[winner])) < 2)
        )

    def _at_least_baselines(self, number: int) -> int:
        """Return the position of a plan, or of the fastest baseline that may win, by the plans' own runs."""
        found = (self.baseline(role) for role in BASELINES)
        able = (other for other in found if other is not None and other in self.repeated)
        return min((number, *able), key=lambda other: float(self.measured.mean[other]))

    def _sure_by_runs(self, winner: int, holds: Callable[[Plan], bool], *, everything: bool = False) -> float:
        """Return the probability that no baseline that `holds` is faster, by their own runs alone.

        With `everything` no compared plan either.

        So no probability is above what the stated gains say. Where the runs doubt the winner, it is the probability
        that no compared plan is faster either: all of its runs were disturbed, or a baseline ran faster by an error.
        Predictions that are shrunk to say that it is faster after all are then no evidence.
        """
        found = (self.baseline(role) for role in BASELINES)
        baselines = {number for number in found if number is not None and holds(self.entries[number].plan)}
        differences = (self.measured.difference(number, winner) for number in baselines - {winner})
        is_doubted = self.entries[winner].is_disturbed or any(less < -error for less, error in differences)
        numbers = sorted(baselines | {winner, *(self.compared if is_doubted or everything else ())})
        return float((_drawn(self.measured, numbers).argmin(axis=1) == numbers.index(winner)).mean())

    def compare(
        self, winner: int, samples: int, left_out: Callable[[Plan], str | None] = lambda _: None
    ) -> tuple[Baseline, ...]:
        """Compare the winner with the `baseline` of each kind, the fastest first; `samples` are those of an epoch.

        `left_out` says why the trainer of the search cannot hold a plan.
        """
        found = ((role, self.baseline(role)) for role in BASELINES)
        compared = (
            replace(self._compare(winner, role, number, samples), left_out=left_out(self.entries[number].plan))
            for role, number in found
            if number is not None
        )
        return tuple(sorted(compared, key=lambda baseline: baseline.gain))

    def compare_ties(self, winner: Winner, samples: int) -> tuple[Baseline, ...]:
        """Compare the winner with its ties in the same way, but for the plans with which `compare` does."""
        baselines = {self.baseline(role) for role in BASELINES}
        compared = (
            self._compare(winner.number, f"tie {self.entries[number].plan.id}", number, samples)
            for number in winner.ties
            if number not in baselines
        )
        return tuple(sorted(compared, key=lambda tie: tie.gain))

    def _compare(self, winner: int, role: str, number: int, samples: int) -> Baseline:
        standing = self.entries[number]
        speed = samples / standing.epoch_seconds
        # The posterior is of logarithms of seconds, so this difference is the logarithm of a ratio.
        slower, error = self.measured.difference(number, winner)
        return Baseline(
            role=str(role),
            estimated_samples_per_second=speed,
            estimated_samples_per_second_error=speed * standing.epoch_seconds_error / standing.epoch_seconds,
            gain=math.exp(slower),
            gain_error=math.exp(slower) * error,
            plan_id=standing.plan.id,
            may_win=standing.may_win,
            is_neutral=standing.is_neutral,
        )


def standings_of(
    trials: Iterable[FinishedTrial],
    surrogate: Surrogate,
    roles: Roles,
    may_win: Callable[[Plan], bool] = lambda _: True,
    is_neutral: Callable[[Plan], bool] = lambda _: True,
) -> Standings:
    """Return the standings of the trials' plans; the surrogate has learnt from these trials.

    Plans that the space lacks, or that change what is learned, may not win.
    """
    by_plan: dict[Plan, list[FinishedTrial]] = defaultdict(list)
    for trial in ranked(trials):
        by_plan[trial.plan].append(trial)
    plans = list(by_plan)
    if not plans:
        nothing = Posterior(mean=np.zeros(0), covariance=np.zeros((0, 0)))
        return Standings(entries=(), posterior=nothing, measured=nothing)
    posterior, measured = surrogate.posterior(plans), surrogate.measured(plans)
    order = np.argsort(posterior.mean, kind="stable")
    return Standings(
        entries=tuple(
            replace(
                _standing(by_plan[plan], measured, row, roles.get(plan, frozenset())),
                may_win=may_win(plan) and is_neutral(plan),
                is_neutral=is_neutral(plan),
            )
            for plan, row in ((plans[row], int(row)) for row in order)
        ),
        posterior=_part(posterior, order),
        measured=_part(measured, order),
    )


def ranked(trials: Iterable[FinishedTrial]) -> list[FinishedTrial]:
    """Return the trials that rank their plans: complete ones of plans that never ran out of memory by themselves.

    A disturbed trial ranks a plan that has no other.
    """
    too_large, whole = set(), []
    for trial in trials:
        match trial.result.outcome:
            case Failed(cause=OutOfMemory()) if not trial.result.is_disturbed:
                too_large.add(trial.plan)
            case Completed(shortened=False):
                whole.append(trial)
            case _:
                pass
    undisturbed = {trial.plan for trial in whole if not trial.result.is_disturbed}
    return [
        trial
        for trial in whole
        if trial.plan not in too_large and (not trial.result.is_disturbed or trial.plan not in undisturbed)
    ]


def _standing(trials: Sequence[FinishedTrial], measured: Posterior, row: int, roles: frozenset[str]) -> Standing:
    plan = trials[0].plan
    seconds = math.exp(measured.mean[row])
    return Standing(
        plan=plan,
        roles=roles,
        epoch_seconds=seconds,
        epoch_seconds_error=seconds * float(measured.error[row]),
        peak_bytes=max(
            t.result.outcome.measurement.peak_bytes for t in trials if isinstance(t.result.outcome, Completed)
        ),
        trials=len(trials),
        is_disturbed=all(each.result.is_disturbed for each in trials),
    )


def _part(posterior: Posterior, rows: NDArray[np.intp]) -> Posterior:
    return replace(posterior, mean=posterior.mean[rows], covariance=posterior.covariance[np.ix_(rows, rows)])


def _drawn(posterior: Posterior, numbers: Sequence[int]) -> Floats:
    """Draw logarithms of the seconds of these plans, [draws, plans]."""
    part, random = _part(posterior, np.array(numbers)), np.random.default_rng(0)
    # The eigendecomposition also takes a covariance that rounding has made slightly indefinite.
    drawn: Floats = random.multivariate_normal(part.mean, part.covariance, _DRAWS, method="eigh")
    return drawn

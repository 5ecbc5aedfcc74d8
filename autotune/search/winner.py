"""From all trials of a study to the plans' standings, the finalists, and a winner with a confidence or a tie."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autotune.predict.costs import Array
from autotune.search.execution.ledger import BASELINES
from autotune.search.learning.surrogate import Posterior, Surrogate
from storage.records import Baseline, FinishedTrial
from trials.outcome import Completed, Failed, Outcome, OutOfMemory
from trials.plan import Plan

SURE = 0.95
"""A finalist that is slower with this probability is no match for the winner."""
SMALL_LOSS = 0.003
"""Expected share of the time by which another finalist is faster: less is not worth a further repeat."""
Roles: TypeAlias = Mapping[Plan, frozenset[str]]
"""In which plans were tried; those of this search alone."""
_DRAWS = 4096
FINALISTS = 3
"""Plans that may win which are repeated, at the most."""
_LEAST = 2
"""Finalists, so that the winner is compared with something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What all trials say of one plan."""

    plan: Plan
    roles: frozenset[str]
    epoch_seconds: float
    """After all trials, the machine's drift taken out."""
    epoch_seconds_error: float
    """Standard error."""
    peak_bytes: int
    """Of the fullest rank, over all trials."""
    trials: int
    may_win: bool = True
    """False for one that only others are compared with."""
    disturbed: bool = False
    """Whether each of these trials ran on a machine that others used as well."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Verdict:
    """Which of some plans is fastest."""

    winner: int
    """Position of the plan that is most probably fastest."""
    confidence: float | None
    """Probability that no other is faster; None without another."""
    ties: tuple[int, ...]
    """Those that cannot be told from it."""
    loss: float
    """Expected share of its time by which the fastest plan beats it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Field:
    """Every plan that completed and never ran out of memory, the fastest first."""

    standings: tuple[Standing, ...]
    posterior: Posterior
    """In the same order: predictions, corrected by all trials. It decides which plans are compared, and which wins."""
    measured: Posterior
    """In the same order, from the plans' own trials alone. It gives the figures that are stated."""

    @property
    def compared(self) -> Sequence[int]:
        """Those that ran more than once, and those that may win though their repeat is not there or failed."""
        return sorted({*self.repeated, *self._contenders(FINALISTS)})

    @property
    def repeated(self) -> Sequence[int]:
        """Of those that may win the ones that ran more than once, if any did: one lucky trial does not win."""
        return [number for number in self._able if self.standings[number].trials > 1] or self._able

    @property
    def _able(self) -> list[int]:
        return [number for number, standing in enumerate(self.standings) if standing.may_win]

    def contenders(self, most: int) -> tuple[Plan, ...]:
        """The two fastest plans and others that may be as fast."""
        return tuple(self.standings[number].plan for number in self._contenders(most))

    def _contenders(self, most: int) -> list[int]:
        able = self._able
        return [number for place, number in enumerate(able[:most]) if place < _LEAST or self._may_win(number, able[0])]

    def finalists(self, most: int) -> tuple[Plan, ...]:
        """The contenders and the fastest of each kind of baseline."""
        baselines = self._best_baselines(range(len(self.standings))).values()
        return tuple(dict.fromkeys((*self.contenders(most), *(self.standings[number].plan for number in baselines))))

    def _may_win(self, number: int, fastest: int) -> bool:
        more, error = self.posterior.difference(number, fastest)
        return more <= _far(SURE) * error

    def verdict(self) -> Verdict:
        """Of the plans that are compared. Draws from the posterior, the same for the same trials.

        Where disturbed trials take part, the winner has to be the fastest by what was measured as well: the lower
        probability is stated.
        """
        numbers = self.compared
        drawn = _drawn(self.posterior, numbers)
        fastest = drawn.argmin(axis=1)
        wins = np.bincount(fastest, minlength=len(numbers))
        winner = max(map(numbers.index, self.repeated), key=wins.__getitem__)
        sure, slower = float((fastest == winner).mean()), (drawn > drawn[:, [winner]]).mean(axis=0)
        if any(self.standings[number].disturbed for number in numbers):
            again = _drawn(self.measured, numbers)
            sure = min(sure, float((again.argmin(axis=1) == winner).mean()))
            slower = np.minimum(slower, (again > again[:, [winner]]).mean(axis=0))
        ties = [numbers[other] for other in range(len(numbers)) if other != winner and slower[other] < SURE]
        return Verdict(
            winner=numbers[winner],
            confidence=sure if len(numbers) > 1 else None,
            ties=tuple(ties),
            loss=float((drawn[:, winner] - drawn.min(axis=1)).mean()),
        )

    def compare(self, winner: int, samples: int) -> tuple[Baseline, ...]:
        """The winner against the fastest of each kind of baseline, repeated ones first; `samples` of an epoch."""
        everything = range(len(self.standings))
        repeated = [number for number in everything if self.standings[number].trials > 1]
        best = {**self._best_baselines(everything), **self._best_baselines(repeated)}
        return tuple(self._compare(winner, role, best[role], samples) for role in BASELINES if role in best)

    def _compare(self, winner: int, role: str, number: int, samples: int) -> Baseline:
        standing = self.standings[number]
        speed = samples / standing.epoch_seconds
        more, error = self.measured.difference(number, winner)
        return Baseline(
            role=role,
            samples_per_second=speed,
            samples_per_second_error=speed * standing.epoch_seconds_error / standing.epoch_seconds,
            gain=math.exp(more),
            gain_error=math.exp(more) * error,
        )

    def _best_baselines(self, numbers: Sequence[int]) -> Mapping[str, int]:
        """By role, the fastest plan that ran in that role."""
        found: dict[str, int] = {}
        for role in BASELINES:
            of_role = [number for number in numbers if role in self.standings[number].roles]
            if of_role:
                found[role] = of_role[0]
        return found


def field_of(
    trials: Iterable[FinishedTrial],
    surrogate: Surrogate,
    roles: Roles,
    may_win: Callable[[Plan], bool] = lambda _: True,
) -> Field:
    """The plans of these trials, which have taught the surrogate."""
    by_plan: dict[Plan, list[FinishedTrial]] = defaultdict(list)
    for trial in ranked(trials):
        by_plan[trial.plan].append(trial)
    safe = list(by_plan)
    if not safe:
        nothing = Posterior(mean=np.zeros(0), covariance=np.zeros((0, 0)))
        return Field(standings=(), posterior=nothing, measured=nothing)
    posterior, measured = surrogate.posterior(safe), surrogate.measured(safe)
    order = np.argsort(posterior.mean, kind="stable")
    return Field(
        standings=tuple(
            _standing(by_plan[plan], measured, row, roles.get(plan, frozenset()), may_win=may_win(plan))
            for plan, row in ((safe[row], int(row)) for row in order)
        ),
        posterior=_part(posterior, order),
        measured=_part(measured, order),
    )


def ranked(trials: Iterable[FinishedTrial]) -> list[FinishedTrial]:
    """Those that rank their plans: measured to the end, of a plan that never ran out of memory on its own.

    On a machine that others used as well only where the plan has no trial without them.
    """
    trials = list(trials)
    too_large = {trial.plan for trial in trials if _ran_out_of_memory(trial)}
    whole = [trial for trial in trials if _is_whole(trial.result.outcome) and trial.plan not in too_large]
    alone = {trial.plan for trial in whole if trial.result.contamination is None}
    return [trial for trial in whole if trial.result.contamination is None or trial.plan not in alone]


def _is_whole(outcome: Outcome) -> bool:
    return isinstance(outcome, Completed) and not outcome.shortened


def _ran_out_of_memory(trial: FinishedTrial) -> bool:
    """Of its own, while no others took some."""
    outcome = trial.result.outcome
    is_short = isinstance(outcome, Failed) and isinstance(outcome.cause, OutOfMemory)
    return is_short and trial.result.contamination is None


def _standing(
    trials: Sequence[FinishedTrial], measured: Posterior, row: int, roles: frozenset[str], *, may_win: bool
) -> Standing:
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
        may_win=may_win,
        disturbed=all(trial.result.contamination is not None for trial in trials),
    )


def _part(posterior: Posterior, rows: NDArray[np.intp]) -> Posterior:
    return Posterior(mean=posterior.mean[rows], covariance=posterior.covariance[np.ix_(rows, rows)])


def _drawn(posterior: Posterior, numbers: Sequence[int]) -> Array:
    """Logarithms of the seconds of these plans, [draws, plans]."""
    part, random = _part(posterior, np.array(numbers)), np.random.default_rng(0)
    drawn: Array = random.multivariate_normal(part.mean, part.covariance, _DRAWS, method="eigh")
    return drawn


def _far(probability: float) -> float:
    """Standard deviations below which a normal variable stays with this probability."""
    return NormalDist().inv_cdf(probability)

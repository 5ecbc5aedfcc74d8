"""What trials say about plans beyond the prediction: a Gaussian process over plans and over time.

The logarithm of measured over predicted epoch seconds is modelled as a sum of: the calibration's uncertainty (linear in
a plan's parts), an error that plans with similar packs share, a smooth function of the plan, the machine's drift (an
Ornstein-Uhlenbeck process over the time of the trial), and noise of each trial's own (Rasmussen and Williams: Gaussian
Processes for Machine Learning, sections 2.2, 4.2.1 and 5.4.1). The widths of the last three are summed over on a grid,
by their posterior probability. The noise is that of Student's t with 4 degrees of freedom, by re-weighting, so that a
trial that is far off counts little.
"""

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

import numpy as np

from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.learning.coordinates import pack_coordinates, plan_coordinates
from storage.records import FinishedTrial
from trials.arrays import Floats, Ints
from trials.outcome import Completed
from trials.plan import Plan

# Choices: grids around the priors of `_USUAL`, in factors of 2 to 3. Each further value multiplies the matrices that
# are factored after a trial. Drift of minutes comes from heat and from other jobs.
_PLAN_WIDTHS = (0.003, 0.01, 0.03, 0.1)
_DRIFT_WIDTHS = (0.003, 0.02, 0.06, 0.18)
_DRIFT_SECONDS = (60.0, 600.0)
_NOISES = (0.005, 0.01, 0.02, 0.04, 0.08)
_USUAL = (0.03, 0.02, 0.02)
"""Prior of plan width, drift and noise: log-normal with a standard deviation of a factor of e."""
# 300 recorded plans of the example support a tenth.
_OWN = {0.1: 0.8, 0.5: 0.2}
"""Share of the plan variance that is independent of even the most similar plan, with its prior probability."""
# The 0.3 % lowered the regret after 12 trials from 0.15 to 0.07 % and from 0.53 to 0.35 % (means of 6 and 7 development
# machines of benchmarks/search.py, levels 0 and 1).
_PACKS_WIDTHS = {0.003: 0.2, 0.01: 0.3, 0.03: 0.5}
"""Standard deviation of the error that plans with the same packs and layout share, with its prior probability. Small
ones are improbable: a search tries few packs, and that it predicts them well says little about others."""
_PACKS_SCALE = 0.35
"""Distance in `pack_coordinates` over which half of this error falls to 1 / e; the other half is of one packing."""
_LEAST_SHARE = 0.02
"""Widths below this probability, as a share of the most probable ones, are left out."""
# A choice: matrices of 40 choices and 50 trials take 0.8 MB, which stays in the cache.
_BATCH = 40
"""Choices of widths whose evidence numpy computes at once."""
_LARGE = 1e200
"""Greater than any sum of squares of residuals over their deviations."""
# A choice: heavier tails than normal noise, for accidents, and still a finite variance.
_FREEDOM = 4.0
"""Degrees of freedom of Student's t."""
# A choice: each round of expectation maximization inverts the matrices once more.
_ROUNDS = 5
# They replace 4 times the noise of other trials, with which winners stated to be right with 36 % were right in 58 % of
# 43 searches (docs/benchmarks/people.md).
_DISTURBED = (0.05, 0.15, 0.45)
"""Noises of disturbed trials, equally probable: other programs took at least 5 % of the cores, often much more."""
_FREE = 1.0
"""Width of a plan's independent part where predictions shall have no influence."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Posterior:
    """Joint normal posterior of the logarithm of plans' epoch seconds, at the mean speed of the machine."""

    mean: Floats
    """[plans]"""
    covariance: Floats
    """[plans, plans]"""
    drift: float = 0.0
    """Standard deviation of the machine's speed from time to time, as a share of it; all plans share it."""

    @property
    def error(self) -> Floats:
        """Standard deviation of an epoch at any time, as a share of its seconds, [plans]."""
        error: Floats = np.sqrt(np.diag(self.covariance) + self.drift**2)
        return error

    def difference(self, one: int, other: int) -> tuple[float, float]:
        """Return (mean, standard deviation) of the first plan's logarithm minus the other's."""
        variance = self.covariance[one, one] + self.covariance[other, other] - 2 * self.covariance[one, other]
        return float(self.mean[one] - self.mean[other]), math.sqrt(max(float(variance), 0.0))

    def given(self, plans: Sequence[int]) -> "Posterior":
        """Return what it becomes if these plans turn out to take the expected time exactly."""
        across = self.covariance[:, list(plans)]
        # Rounding may leave less of an eigenvalue than this share of the largest one.
        inverse = np.linalg.pinv(across[list(plans)], rcond=1e-9, hermitian=True)
        return replace(self, covariance=self.covariance - across @ inverse @ across.T)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Likeness:
    """Correlations of plans with others, [plans, others] each."""

    plans: Floats
    """Correlation by the coordinates of the plans."""
    packs: Floats
    """Correlation by the coordinates of their packs."""
    same: Floats
    """1 where a plan is the other one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlanWidths:
    plan: float
    own: float
    packs: float
    free: float

    def of_plans(self, likeness: _Likeness) -> Floats:
        """Return the prior covariance of the plans' deviations from their predictions."""
        covariance: Floats = (
            self.plan**2 * ((1 - self.own) * likeness.plans + self.own * likeness.same)
            + self.packs**2 * likeness.packs
            + self.free**2 * likeness.same
        )
        return covariance


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Fit:
    """The process conditioned on the trials: sums over the choices of drift and noise, times their probabilities."""

    widths: _PlanWidths
    probability: float
    """Posterior probability of these widths, with any drift and noise."""
    weights: Floats
    """The inverse covariance of the measured values, noise included, times the residuals, [trials]."""
    precision: Floats
    """The inverse covariance less the outer product of the weights, [trials, trials]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Fits:
    of_plans: tuple[_Fit, ...]
    noise: float
    slowness: float
    """Logarithm of the factor by which the slowest machine was slower in its last trial than usual."""
    drift: float
    """Standard deviation of the machines' drift."""


class Surrogate:
    """Epoch times of plans given the trials, with their errors; deterministic for the same trials in order."""

    def __init__(self, predictor: CalibratedPredictor) -> None:
        """`predictor` gives the prior mean. Its owner updates it with each trial before this surrogate."""
        self._predictor = predictor
        self._trials: list[FinishedTrial] = []
        self._fitted: dict[float, _Fits] = {}
        """Fits by the additional width of a plan's independent part."""
        # Coordinates depend on the sizes of packs, which trials do not change.
        self._coordinates = cache(partial(plan_coordinates, predictor.corrected))
        self._pack_coordinates = cache(partial(pack_coordinates, predictor.corrected))

    def learn(self, trial: FinishedTrial) -> None:
        """Learn from a trial that was measured; others are ignored."""
        if trial.result.epoch_seconds is not None:
            self._trials.append(trial)
        # After every trial, since one that ran out of memory corrects the predictions as well.
        self._fitted.clear()

    @property
    def noise(self) -> float:
        """Relative error of one trial."""
        return self._fits().noise

    @property
    def slowness(self) -> float:
        """Factor by which a trial would take longer now than `posterior` says, on the slowest of the machines."""
        return math.exp(self._fits().slowness)

    def posterior(self, plans: Sequence[Plan]) -> Posterior:
        """Return the joint posterior of the plans: the predictions, corrected by the trials."""
        return self._posterior(plans, 0.0)

    def epoch_seconds(self, plans: Sequence[Plan]) -> list[float]:
        """Return the seconds of an epoch of each plan by the mean of `posterior`; without trials in far less time."""
        if not (self._trials and plans):
            return self._predictor.plans_epoch_seconds(plans)
        seconds: list[float] = np.exp(self.posterior(plans).mean).tolist()
        return seconds

    def measured(self, plans: Sequence[Plan]) -> Posterior:
        """Return the posterior of plans that ran from their own trials alone, without shrinkage to the predictions."""
        return self._posterior(plans, _FREE)

    def _posterior(self, plans: Sequence[Plan], free: float) -> Posterior:
        known = [trial.plan for trial in self._trials]
        prior = np.log([self._predictor.epoch_seconds(plan) for plan in plans])
        given, likeness = self._given(plans, plans), self._likeness(plans, plans)
        given_across, likeness_across = self._given(plans, known), self._likeness(plans, known)
        mean, covariance = np.zeros(len(plans)), given
        # Mean and covariance of a mixture of normal distributions, one for each choice of widths.
        for fit in self._fits(free).of_plans:
            across = given_across + fit.widths.of_plans(likeness_across)
            mean += across @ fit.weights
            own = fit.probability * fit.widths.of_plans(likeness)
            covariance = covariance + own - across @ fit.precision @ across.T
        # `precision` lacks the squares of the means, so the sums are second moments around the prior.
        covariance = covariance - np.outer(mean, mean)
        return Posterior(mean=prior + mean, covariance=covariance, drift=self._fits(free).drift)

    # --- the process ---

    def _given(self, plans: Sequence[Plan], others: Sequence[Plan]) -> Floats:
        """Return the covariance of the calibration's uncertainty, [plans, others]."""
        if not others:
            return np.zeros((len(plans), 0))
        parts, of_others = (np.array([self._predictor.shares(plan) for plan in each]) for each in (plans, others))
        covariance: Floats = parts @ self._predictor.covariance @ of_others.T
        return covariance

    def _likeness(self, plans: Sequence[Plan], others: Sequence[Plan]) -> _Likeness:
        """Return the Matern 5/2 correlation in the coordinates of plans, and an exponential one in those of packs."""
        if not others:
            none = np.zeros((len(plans), 0))
            return _Likeness(plans=none, packs=none, same=none)
        far = math.sqrt(5) * _distances(*([self._coordinates(plan) for plan in each] for each in (plans, others)))
        packs = [[(plan.packing, plan.layout) for plan in each] for each in (plans, others)]
        packs_far = _distances(*([self._pack_coordinates(*each) for each in side] for side in packs))
        return _Likeness(
            plans=(1 + far + far**2 / 3) * np.exp(-far),
            packs=(np.exp(-packs_far / _PACKS_SCALE) + _same(*packs)) / 2,
            same=_same(plans, others),
        )

    def _fits(self, free: float = 0.0) -> _Fits:
        if free not in self._fitted:
            self._fitted[free] = self._fit(free)
        return self._fitted[free]

    def _fit(self, free: float) -> _Fits:
        if not self._trials:
            usual_plan, usual_drift, usual_noise = _USUAL
            # The choices of the greatest prior probability.
            usual = _PlanWidths(plan=usual_plan, own=min(_OWN), packs=max(_PACKS_WIDTHS), free=free)
            fit = _Fit(widths=usual, probability=1.0, weights=np.zeros(0), precision=np.zeros((0, 0)))
            return _Fits(of_plans=(fit,), noise=usual_noise, slowness=0.0, drift=usual_drift)
        plans = [trial.plan for trial in self._trials]
        residuals = np.array(
            [math.log(_seconds(trial) / self._predictor.epoch_seconds(trial.plan)) for trial in self._trials]
        )
        given, likeness = self._given(plans, plans), self._likeness(plans, plans)
        widths = [
            _PlanWidths(plan=plan, own=own, packs=packs, free=free)
            for plan, own, packs in product(_PLAN_WIDTHS, _OWN, _PACKS_WIDTHS)
        ]
        of_plans = np.stack([given + each.of_plans(likeness) for each in widths])
        drifts, noises, last = _drifts(self._trials), _noises(self._trials), _last(self._trials)

        # Each choice of widths is one entry of each of the four.
        plan, drift, noise, disturbed = np.indices((len(of_plans), len(drifts), *noises.shape[:2])).reshape(4, -1)
        evidence = [
            _evidence(of_plans[plan[batch]] + drifts[drift[batch]], noises[noise[batch], disturbed[batch]], residuals)
            for batch in _batches(np.arange(len(plan)))
        ]
        of_plan, of_drift, of_noise = _PRIORS
        shares = _probabilities(np.concatenate(evidence) + of_plan[plan] + of_drift[drift] + of_noise[noise])

        weights, precision = np.zeros((len(widths), len(plans))), np.zeros_like(of_plans)
        slowness = 0.0
        for batch in _batches(np.flatnonzero(shares)):
            own = noises[noise[batch], disturbed[batch]]
            inverse = _inverse(of_plans[plan[batch]] + drifts[drift[batch]], own, residuals)
            found = inverse @ residuals
            # [widths of plans, choices]
            share = np.where(plan[batch] == np.arange(len(widths))[:, None], shares[batch], 0.0)
            weights += share @ found
            precision += np.tensordot(share, inverse - found[:, :, None] * found[:, None], 1)
            # The mean of a drift at a trial is its covariance with all trials times the weights.
            slowness += shares[batch] @ (drifts[drift[batch]][:, last] @ found[..., None]).max(axis=(1, 2))
        probabilities = np.bincount(plan, shares, len(widths))
        return _Fits(
            of_plans=tuple(
                _Fit(widths=each, probability=probability, weights=weight, precision=square)
                for each, probability, weight, square in zip(widths, probabilities, weights, precision, strict=True)
                if probability
            ),
            noise=float(shares @ np.array(_NOISES)[noise]),
            slowness=slowness,
            drift=math.sqrt(float(shares @ np.repeat(np.square(_DRIFT_WIDTHS), len(_DRIFT_SECONDS))[drift])),
        )


def _seconds(trial: FinishedTrial) -> float:
    return trial.result.epoch_seconds or math.nan


def _shrinkage(trials: Sequence[FinishedTrial]) -> Floats:
    """Return noise factors of trials with more timed steps than usual: the error of a mean falls with their root."""
    outcomes = [trial.result.outcome for trial in trials]
    steps = np.array([len(each.measurement.steps) if isinstance(each, Completed) else 1 for each in outcomes])
    shrinkage: Floats = np.minimum(1.0, np.sqrt(np.median(steps) / steps))
    return shrinkage


def _same(values: Sequence[Hashable], others: Sequence[Hashable]) -> Floats:
    """Return 1 where a value equals another one, else 0, [values, others]."""
    numbers: dict[Hashable, int] = {}
    one, other = ([numbers.setdefault(value, len(numbers)) for value in each] for each in (values, others))
    same = np.array(one)[:, None] == np.array(other, dtype=int)
    return np.asarray(same, dtype=np.float64)


def _drifts(trials: Sequence[FinishedTrial]) -> Floats:
    """Return the covariance of the machines' drift for each choice of its widths, [choices, trials, trials]."""
    times = np.array([trial.result.finished.timestamp() for trial in trials])
    agents = np.array([trial.agent_id or "" for trial in trials])
    apart = np.abs(times[:, None] - times)
    apart[agents[:, None] != agents] = np.inf  # the machines of different agents drift independently
    return np.stack([drift**2 * np.exp(-apart / seconds) for drift, seconds in product(_DRIFT_WIDTHS, _DRIFT_SECONDS)])


def _last(trials: Sequence[FinishedTrial]) -> list[int]:
    """Return the number of each machine's last trial."""
    return list({trial.agent_id or "": number for number, trial in enumerate(trials)}.values())


def _noises(trials: Sequence[FinishedTrial]) -> Floats:
    """Return the variance of each trial's own noise, [noises, noises of disturbed trials, trials].

    `_NOISES` are those of trials with the median number of timed steps. The stored error of a trial is the standard
    error of the mean of its own steps, however many they are, so it is not divided by their root again.
    """
    errors = np.array([(trial.result.epoch_seconds_error or 0.0) / _seconds(trial) for trial in trials])
    disturbed = np.array([trial.result.is_disturbed for trial in trials])
    noises = np.maximum(errors, _shrinkage(trials) * np.array(_NOISES)[:, None])
    # Without a disturbed trial, all of their noises give the same.
    least = np.array(_DISTURBED if disturbed.any() else _DISTURBED[:1])[:, None] * disturbed
    variances: Floats = np.maximum(noises[:, None], least) ** 2
    return variances


def _distances(points: Sequence[Floats], others: Sequence[Floats]) -> Floats:
    """Return the Euclidean distances, [points, others]."""
    distances: Floats = np.sqrt(((np.array(points)[:, None] - np.array(others)) ** 2).sum(axis=-1))
    return distances


def _log_prior(widths: Sequence[float], usual: float) -> Floats:
    """Return the logarithms of the prior probabilities of widths, up to a constant."""
    logarithms: Floats = -0.5 * np.log(np.array(widths) / usual) ** 2
    return logarithms


_PRIORS = (
    np.add.outer(
        np.add.outer(_log_prior(_PLAN_WIDTHS, _USUAL[0]), np.log(list(_OWN.values()))),
        np.log(list(_PACKS_WIDTHS.values())),
    ).ravel(),
    np.repeat(_log_prior(_DRIFT_WIDTHS, _USUAL[1]), len(_DRIFT_SECONDS)),
    _log_prior(_NOISES, _USUAL[2]),
)
"""Logarithms of the prior probabilities of the widths of plans, of drifts and of noises, up to a constant."""


def _batches(choices: Ints) -> Iterator[Ints]:
    return (choices[start : start + _BATCH] for start in range(0, len(choices), _BATCH))


def _evidence(smooth: Floats, noises: Floats, residuals: Floats) -> Floats:
    """Return the logarithm of the marginal likelihood for each of [choices, trials, trials], up to a constant."""
    # With the residuals below the covariance, the last row of the factor is that of the covariance applied to them.
    bordered = np.empty((len(smooth), len(residuals) + 1, len(residuals) + 1))
    bordered[:, :-1, :-1] = smooth + noises[:, :, None] * np.eye(len(residuals))
    bordered[:, -1, :-1] = residuals
    # Keeps the matrix positive definite; the last entry of the factor, which depends on it, is not used.
    bordered[:, -1, -1] = _LARGE
    lower = np.linalg.cholesky(bordered)
    determinants = np.log(np.diagonal(lower, axis1=-2, axis2=-1)[:, :-1]).sum(axis=-1)
    evidence: Floats = -0.5 * (lower[:, -1, :-1] ** 2).sum(axis=-1) - determinants
    return evidence


def _probabilities(logarithms: Floats) -> Floats:
    """Return the probabilities of choices of widths, without those that are far less probable than the best."""
    # The largest one is subtracted so that the exponentials do not underflow.
    shares = np.exp(logarithms - max(logarithms))
    shares[shares < _LEAST_SHARE] = 0
    probabilities: Floats = shares / shares.sum()
    return probabilities


def _inverse(smooth: Floats, noises: Floats, residuals: Floats) -> Floats:
    """Return the inverse covariances, with Student's t noise, for each of [choices, trials, trials]."""
    # Expectation maximization over the scale of each trial's noise: a trial that is far off counts little.
    diagonal = np.eye(len(residuals))
    scaled = noises
    for _ in range(_ROUNDS):
        inverse = np.linalg.inv(smooth + scaled[:, :, None] * diagonal)
        left = scaled * (inverse @ residuals)
        variance = scaled * (1 - scaled * np.diagonal(inverse, axis1=-2, axis2=-1))
        scaled = (_FREEDOM * noises + left**2 + variance) / (_FREEDOM + 1)
    return np.linalg.inv(smooth + scaled[:, :, None] * diagonal).astype(np.float64)

"""What trials say about plans beyond the prediction: a Gaussian process over plans and over time.

The logarithm of measured over predicted epoch seconds is modelled as a sum of: the calibration's uncertainty (linear in
a plan's parts), a smooth function of the plan, the machine's drift (an Ornstein-Uhlenbeck process over the time of
the trial), and noise of each trial's own (Rasmussen and Williams: Gaussian Processes for Machine Learning, sections
2.2, 4.2.1 and 5.4.1). Their widths are summed over on a grid, by their posterior probability. The noise is that of
Student's t with 4 degrees of freedom, by re-weighting, so that a trial that is far off counts little.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product

import numpy as np

from autotune.prediction.costs import Array
from autotune.prediction.predictor import Predictor
from autotune.search.learning.calibrated import CalibratedPredictor
from storage.records import FinishedTrial
from trials import plugins
from trials.data.packers import PACKERS
from trials.outcome import Completed
from trials.plan import Packed, Plan

_PLAN_WIDTHS = (0.003, 0.01, 0.03, 0.1)
_DRIFT_WIDTHS = (0.003, 0.02, 0.06, 0.18)
_DRIFT_SECONDS = (60.0, 600.0)
_NOISES = (0.005, 0.01, 0.02, 0.04, 0.08)
_USUAL = (0.03, 0.02, 0.02)
"""Prior of plan width, drift and noise: log-normal with a standard deviation of a factor of e."""
_OWN = {0.1: 0.8, 0.5: 0.2}
"""Share of the plan variance that is independent of even the most similar plan, with its prior probability."""
_LEAST_SHARE = 0.02
"""Widths below this probability, as a share of the most probable ones, are left out."""
_BATCH = 40
"""Choices of widths whose evidence numpy computes at once."""
_FREEDOM = 4.0
"""Degrees of freedom of Student's t."""
_ROUNDS = 5
_DISTURBED = 4.0
"""Factor of the noise for a disturbed trial."""
_LEAST_DISTURBED = 0.05
"""Least noise of a disturbed trial: others took at least this share of the cores, and may have hit one plan alone."""
_PACKER_NAMES = plugins.names(PACKERS)
_PACKER = 0.3 / math.sqrt(2)
"""Coordinate of a packer on an axis of its own, so that any two of them are 0.3 apart."""
_FREE = 1.0
"""Width of a plan's independent part where predictions shall have no influence."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Posterior:
    """Joint normal posterior of the logarithm of plans' epoch seconds, without drift and noise."""

    mean: Array
    """[plans]"""
    covariance: Array
    """[plans, plans]"""

    @property
    def error(self) -> Array:
        """Standard deviation, as a share of the time, [plans]."""
        error: Array = np.sqrt(np.diag(self.covariance))
        return error

    def difference(self, one: int, other: int) -> tuple[float, float]:
        """Return (mean, standard deviation) of the first plan's logarithm minus the other's."""
        variance = self.covariance[one, one] + self.covariance[other, other] - 2 * self.covariance[one, other]
        return float(self.mean[one] - self.mean[other]), math.sqrt(max(float(variance), 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Widths:
    plan: float
    own: float
    drift: float
    drift_seconds: float
    noise: float

    def of_plans(self, likeness: Array, same: Array) -> Array:
        """Return the prior covariance of the plans' deviations from their predictions."""
        covariance: Array = self.plan**2 * ((1 - self.own) * likeness + self.own * same)
        return covariance


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Fit:
    """The process conditioned on the trials, for one choice of widths."""

    widths: _Widths
    probability: float
    inverse: Array
    """Inverse covariance of the measured values, noise included, [trials, trials]."""
    weights: Array
    """The inverse times the residuals, [trials]."""
    slowness: float
    """Logarithm of the factor by which the slowest machine was slower in its last trial than usual."""


class Surrogate:
    """Epoch times of plans given the trials, with their errors; deterministic for the same trials in order."""

    def __init__(self, predictor: CalibratedPredictor) -> None:
        """`predictor` gives the prior mean. Its owner updates it with each trial before this surrogate."""
        self._predictor = predictor
        self._trials: list[FinishedTrial] = []
        self._fitted: dict[float, list[_Fit]] = {}
        """Fits by the additional width of a plan's independent part."""
        self._coordinates = cache(partial(_coordinates, predictor.base))

    def learn(self, trial: FinishedTrial) -> None:
        """Learn from a trial that was measured; others are ignored."""
        if trial.result.epoch_seconds is not None:
            self._trials.append(trial)
        self._fitted.clear()

    @property
    def noise(self) -> float:
        """Relative error of one trial."""
        return sum(fit.probability * fit.widths.noise for fit in self._fits())

    @property
    def slowness(self) -> float:
        """Factor by which a trial would take longer now than `posterior` says, on the slowest of the machines."""
        return math.exp(sum(fit.probability * fit.slowness for fit in self._fits()))

    def posterior(self, plans: Sequence[Plan]) -> Posterior:
        """Return the joint posterior of the plans: the predictions, corrected by the trials."""
        return self._posterior(plans, 0.0)

    def measured(self, plans: Sequence[Plan]) -> Posterior:
        """Return the posterior of plans that ran from their own trials alone, without shrinkage to the predictions."""
        return self._posterior(plans, _FREE)

    def _posterior(self, plans: Sequence[Plan], free: float) -> Posterior:
        known = [trial.plan for trial in self._trials]
        prior = np.log([self._predictor.epoch_seconds(plan) for plan in plans])
        linear, likeness = self._linear(plans, plans), self._likeness(plans, plans)
        linear_across, likeness_across = self._linear(plans, known), self._likeness(plans, known)
        same, same_across = _same(plans, plans), _same(plans, known)
        mean, square = np.zeros(len(plans)), np.zeros((len(plans), len(plans)))
        for fit in self._fits(free):
            across = linear_across + fit.widths.of_plans(likeness_across, same_across) + free**2 * same_across
            shift = across @ fit.weights
            own = fit.widths.of_plans(likeness, same) + free**2 * same
            covariance = linear + own - across @ fit.inverse @ across.T
            # Mean and covariance of a mixture of normal distributions, one for each choice of widths.
            mean += fit.probability * shift
            square += fit.probability * (covariance + np.outer(shift, shift))
        return Posterior(mean=prior + mean, covariance=square - np.outer(mean, mean))

    # --- the process ---

    def _linear(self, plans: Sequence[Plan], others: Sequence[Plan]) -> Array:
        """Return the covariance that the calibration's uncertainty causes, [plans, others]."""
        if not others:
            return np.zeros((len(plans), 0))
        parts, of_others = (np.array([self._predictor.shares(plan) for plan in each]) for each in (plans, others))
        linear: Array = parts @ self._predictor.covariance @ of_others.T
        return linear

    def _likeness(self, plans: Sequence[Plan], others: Sequence[Plan]) -> Array:
        """Return the Matern 5/2 correlation in the coordinates of plans, [plans, others]."""
        if not others:
            return np.zeros((len(plans), 0))
        one, other = (np.array([self._coordinates(plan) for plan in each]) for each in (plans, others))
        far = math.sqrt(5) * np.sqrt(((one[:, None] - other[None]) ** 2).sum(axis=-1))
        likeness: Array = (1 + far + far**2 / 3) * np.exp(-far)
        return likeness

    def _fits(self, free: float = 0.0) -> list[_Fit]:
        if free not in self._fitted:
            self._fitted[free] = self._all_fits(free)
        return self._fitted[free]

    def _all_fits(self, free: float) -> list[_Fit]:
        plan, drift, noise = _USUAL
        usual = _Widths(plan=plan, own=min(_OWN), drift=drift, drift_seconds=_DRIFT_SECONDS[0], noise=noise)
        if not self._trials:
            return [_Fit(widths=usual, probability=1.0, inverse=np.zeros((0, 0)), weights=np.zeros(0), slowness=0.0)]
        plans = [trial.plan for trial in self._trials]
        times = np.array([trial.result.finished.timestamp() for trial in self._trials])
        residuals = np.array(
            [math.log(_seconds(trial) / self._predictor.epoch_seconds(trial.plan)) for trial in self._trials]
        )
        errors = np.array([(trial.result.epoch_seconds_error or 0.0) / _seconds(trial) for trial in self._trials])
        disturbed = np.array([trial.result.is_disturbed for trial in self._trials])
        factors, least = np.where(disturbed, _DISTURBED, 1.0), np.where(disturbed, _LEAST_DISTURBED, 0.0)
        factors *= _shrinkage(self._trials)
        linear, likeness, same = self._linear(plans, plans), self._likeness(plans, plans), _same(plans, plans)
        apart = np.abs(times[:, None] - times)
        agents = np.array([trial.agent_id or "" for trial in self._trials])
        last = [int(np.flatnonzero(agents == agent)[-1]) for agent in dict.fromkeys(agents)]
        apart[agents[:, None] != agents] = np.inf  # the machines of different agents drift independently

        def drifts(widths: _Widths) -> Array:
            drift: Array = widths.drift**2 * np.exp(-apart / widths.drift_seconds)
            return drift

        def smooth(widths: _Widths) -> Array:
            total: Array = linear + widths.of_plans(likeness, same) + free**2 * same + drifts(widths)
            return total

        def noises(widths: _Widths) -> Array:
            noises: Array = np.maximum(factors * np.maximum(errors, widths.noise), least) ** 2
            return noises

        candidates = [
            _Widths(plan=plan, own=own, drift=drift, drift_seconds=seconds, noise=noise)
            for plan, own, drift, seconds, noise in product(_PLAN_WIDTHS, _OWN, _DRIFT_WIDTHS, _DRIFT_SECONDS, _NOISES)
        ]
        batches = (candidates[start : start + _BATCH] for start in range(0, len(candidates), _BATCH))
        evidence = [
            _evidence(np.stack([smooth(each) + np.diag(noises(each)) for each in batch]), residuals)
            for batch in batches
        ]
        logarithms = np.concatenate(evidence) + [_prior(each) for each in candidates]
        # The largest one is subtracted so that the exponentials do not underflow.
        shares = np.exp(logarithms - max(logarithms))
        shares[shares < _LEAST_SHARE] = 0
        shares /= shares.sum()
        return [
            _weighted(widths, float(share), smooth(widths), noises(widths), residuals, drifts=drifts(widths)[last])
            for widths, share in zip(candidates, shares, strict=True)
            if share
        ]


def _seconds(trial: FinishedTrial) -> float:
    return trial.result.epoch_seconds or math.nan


def _shrinkage(trials: Sequence[FinishedTrial]) -> Array:
    """Factors of the noise for trials with more timed steps than usual: the error of a mean falls with their root."""
    outcomes = [trial.result.outcome for trial in trials]
    steps = np.array([len(each.measurement.steps) if isinstance(each, Completed) else 1 for each in outcomes])
    shrinkage: Array = np.minimum(1.0, np.sqrt(np.median(steps) / steps))
    return shrinkage


def _same(plans: Sequence[Plan], others: Sequence[Plan]) -> Array:
    """1 where a plan is one of the others, [plans, others]."""
    numbers: dict[Plan, int] = {}
    one, other = ([numbers.setdefault(plan, len(numbers)) for plan in each] for each in (plans, others))
    same = np.array(one)[:, None] == np.array(other, dtype=int)
    return np.asarray(same, dtype=np.float64)


def _evidence(covariances: Array, residuals: Array) -> Array:
    """Return the logarithm of the marginal likelihood for each of [choices, trials, trials], up to a constant."""
    lower = np.linalg.cholesky(covariances)
    determinants = np.log(np.diagonal(lower, axis1=-2, axis2=-1)).sum(axis=-1)
    evidence: Array = -0.5 * (np.linalg.solve(lower, residuals) ** 2).sum(axis=-1) - determinants
    return evidence


def _prior(widths: _Widths) -> float:
    found = (widths.plan, widths.drift, widths.noise)
    apart = sum(math.log(width / usual) ** 2 for width, usual in zip(found, _USUAL, strict=True))
    return math.log(_OWN[widths.own]) - 0.5 * apart


def _weighted(
    widths: _Widths, probability: float, smooth: Array, noises: Array, residuals: Array, *, drifts: Array
) -> _Fit:
    """Fit with Student's t noise; `drifts` are the covariances of each machine's last drift, [machines, trials]."""
    # Expectation maximization over the scale of each trial's noise: a trial that is far off counts little.
    scale = np.ones_like(noises)
    for _ in range(_ROUNDS):
        inverse = np.linalg.inv(smooth + np.diag(noises * scale)).astype(np.float64)
        left = noises * scale * (inverse @ residuals)
        variance = noises * scale * (1 - noises * scale * np.diag(inverse))
        scale = (_FREEDOM + (left**2 + variance) / noises) / (_FREEDOM + 1)
    inverse = np.linalg.inv(smooth + np.diag(noises * scale)).astype(np.float64)
    weights = inverse @ residuals
    slowness = float((drifts @ weights).max())
    return _Fit(widths=widths, probability=probability, inverse=inverse, weights=weights, slowness=slowness)


def _coordinates(predictor: Predictor, plan: Plan) -> Array:
    """Return the coordinates of a plan; plans at a distance of 1 have little in common."""
    packing, stages, sizes = plan.packing, plan.stages, predictor.sizes(plan.packing, plan.layout)
    slack = (0.0, 0.0)
    if isinstance(packing, Packed):
        slack = 1 - packing.qv_min / max(packing.qv, 1), 1 - packing.qt_min / packing.qt
    # The layers up to each quarter of the stages compare splits over different numbers of stages.
    ends = np.cumsum([0, *(stage.vision + stage.language for stage in stages)])
    share = np.interp((0.25, 0.5, 0.75), np.linspace(0, 1, len(ends)), ends / ends[-1])
    vision, language = sum(stage.vision for stage in stages), sum(stage.language for stage in stages)
    return np.array(
        [
            math.log2(plan.layout.pipeline),
            0.5 * plan.layout.zero,
            isinstance(packing, Packed),
            *(_PACKER * (isinstance(packing, Packed) and packing.packer == name) for name in _PACKER_NAMES),
            math.log2(sizes.epoch.micro_batches) / 2,
            math.log(sizes.mean[0, 0]) / 2,
            math.log(sizes.mean[0, 1]) / 2,
            *slack,
            *(4 * share),
            sum(stage.recompute_vision for stage in stages) / max(vision, 1),
            sum(stage.recompute_language for stage in stages) / max(language, 1),
        ]
    )

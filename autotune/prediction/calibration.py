"""Correction of predictions by measured trials: a factor for each part of the time and of the memory, with errors.

Bayesian linear regression (Bishop: Pattern Recognition and Machine Learning, section 3.3) of measured on predicted
parts, as shares of the predicted sum. The prior is that the profile is right, within the widths below. Errors of times
and bytes are those of Student's t, by re-weighting (Lange, Little, Taylor 1989), so that a measurement that is far off
has little weight. The scale of the errors is estimated with the factors, and so is a factor of each disturbed trial.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.prediction.features import COSTS, FEATURES, Features
from autotune.prediction.memory import StageBytes
from trials.arrays import Floats

# The widths are choices, wide where a profile says least: links are timed without the load of a training, and the
# constant time of a pack is a small difference of times.
_MACHINE_WIDTH = 0.20
"""Prior standard deviation of a factor that all computation shares, such as another clock or load."""
_OWN_WIDTHS = {
    "vision": 0.10,
    "language": 0.10,
    "head": 0.20,
    "recompute": 0.20,
    "pack": 0.50,
    "loading": 0.50,
    "communication": 1.0,
    "update": 0.50,
    "schedule": 0.10,
}
"""Prior standard deviation of each factor alone. That of the schedule is a share of the step with mean 0."""
# A choice: after ten recorded trials, half of them lengthened by 0 to 60 %, predictions of other plans are too long by
# 13 % where disturbed trials count like others, by 2 % with 0.15, and by less than 1 % with 0.3.
_DISTURBED_WIDTH = 0.3
"""Prior standard deviation of the share by which other programs lengthened all times of a disturbed trial."""
# Choices above the errors of 32 plans on CPU ranks (at most 0.8 %), since a GPU's allocator counts more.
_BYTE_WIDTHS = (0.02, 0.05)
"""Prior standard deviations of the factors of static and of kept bytes."""
_TIME_NOISE, _BYTE_NOISE = 0.03, 0.005
"""Prior of the relative error of one measurement."""
_TIME_NOISE_WEIGHT, _BYTE_NOISE_WEIGHT = 5.0, 2.0
"""Measurements that these priors count as."""
_ELSEWHERE = 0.3
"""Share of the prior's widths by which factors may differ between similar workloads."""
_LEAST_FACTOR = 0.01
"""Everything takes some time, however wrong the profile is."""
_TIME_FREEDOM, _BYTE_FREEDOM = 3.0, 10.0
"""Degrees of freedom of Student's t. Other programs disturb times; errors of bytes are nearly normal."""
# A choice: each round solves for some ten factors; fewer might end before the weights settle.
_ROUNDS = 20
"""Number of re-weightings."""
_WIDTH = 2.0
"""Standard errors on each side of an interval: 95 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Measured seconds, and the predicted seconds by feature."""

    features: Features
    seconds: float
    disturbed_trial: int | None = None
    """Number of the trial if other programs disturbed it: all of its times are longer by one share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Measured peak bytes of a stage, and those predicted for the same steps."""

    predicted: StageBytes
    measured: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationState:
    """Final posterior of a calibration, from which the calibration of a similar workload can start."""

    time_mean: tuple[float, ...]
    """Means of the factors of FEATURES."""
    time_covariance: tuple[tuple[float, ...], ...]
    byte_mean: tuple[float, ...]
    """Means of the factors of static and of kept bytes."""
    byte_covariance: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Factors:
    """Normal distribution of factors."""

    mean: Floats
    covariance: Floats
    noise: float
    """Relative error of one measurement."""
    noise_weight: float
    """Measurements that this error counts as."""
    freedom: float
    """Degrees of freedom of its distribution, Student's t."""

    def fitted(self, rows: Floats, values: Floats) -> "_Factors":
        """Return the posterior after measuring `values` [n] of predicted parts `rows` [n, factors]."""
        if not len(rows):
            return self
        # Errors as shares of the predicted sum: long and short measurements count alike.
        scale = rows @ self.mean
        rows, values = rows / scale[:, None], values / scale
        prior = np.linalg.inv(self.covariance).astype(np.float64)
        covariance = self.covariance
        mean: Floats = self.mean
        noise, weights = self.noise, np.ones(len(values))
        for _ in range(_ROUNDS):
            precision = prior + (rows * weights[:, None]).T @ rows / noise**2
            covariance = np.linalg.inv(precision).astype(np.float64)
            mean = covariance @ (prior @ self.mean + rows.T @ (weights * values) / noise**2)
            squares = (values - rows @ mean) ** 2
            weights = (self.freedom + 1) / (self.freedom + squares / noise**2)
            # The prior of the noise is conjugate: as if `noise_weight` measurements with it came before.
            total = self.noise_weight * self.noise**2 + float((weights * squares).sum())
            noise = math.sqrt(total / (self.noise_weight + len(values)))
        return replace(self, mean=mean, covariance=covariance, noise=noise)

    def after(self, mean: Sequence[float], covariance: Sequence[Sequence[float]]) -> "_Factors":
        """Return a prior with the mean and covariance of a similar workload, widened by a share of this one's."""
        widened = np.array(covariance) + _ELSEWHERE**2 * self.covariance
        return replace(self, mean=np.array(mean), covariance=widened)

    def predict(self, row: Floats) -> tuple[float, float]:
        """Return (mean, standard error of a new measurement)."""
        mean = float(row @ self.mean)
        return mean, math.sqrt(float(row @ self.covariance @ row) + (self.noise * mean) ** 2)


def _prior(state: CalibrationState | None) -> tuple[_Factors, _Factors]:
    """Return the priors of time and bytes: around the profile, or around the state of a similar workload."""
    own = np.diag([_OWN_WIDTHS[name] ** 2 for name in FEATURES])
    # A faster machine computes everything faster, but does not send or load faster.
    shared = np.array([name not in ("loading", "communication", "schedule") for name in FEATURES], dtype=np.float64)
    time = _Factors(
        mean=np.array([1.0] * len(COSTS) + [0.0]),
        covariance=own + _MACHINE_WIDTH**2 * np.outer(shared, shared),
        noise=_TIME_NOISE,
        noise_weight=_TIME_NOISE_WEIGHT,
        freedom=_TIME_FREEDOM,
    )
    memory = _Factors(
        mean=np.ones(2),
        covariance=np.diag(np.square(_BYTE_WIDTHS)),
        noise=_BYTE_NOISE,
        noise_weight=_BYTE_NOISE_WEIGHT,
        freedom=_BYTE_FREEDOM,
    )
    # A state of an older version may lack a feature.
    if state is None or len(state.time_mean) != len(time.mean):
        return time, memory
    return (
        time.after(state.time_mean, state.time_covariance),
        memory.after(state.byte_mean, state.byte_covariance),
    )


class Calibration:
    """Correction of the predictions of one workload; without observations it only gives their errors."""

    def __init__(self, time: _Factors, memory: _Factors) -> None:
        self._time, self._memory = time, memory

    @classmethod
    def fit(
        cls,
        observations: Sequence[Observation] = (),
        peaks: Sequence[Peak] = (),
        exceeded: Sequence[Peak] = (),
        state: CalibrationState | None = None,
    ) -> "Calibration":
        """Fit the factors to the trials, beginning with the `state` of a similar workload if given.

        `exceeded` are stages that ran out of memory, with lower bounds of their peaks. A bound counts only where it is
        above the peak that the other measurements predict.
        """
        time, memory = _prior(state)
        return cls(
            _fitted_times(time, observations),
            _fitted_bytes(memory, peaks, exceeded),
        )

    @property
    def state(self) -> CalibrationState:
        """Posterior of the factors, for the calibration of a similar workload."""
        return CalibrationState(
            time_mean=tuple(self._time.mean.tolist()),
            time_covariance=tuple(map(tuple, self._time.covariance.tolist())),
            byte_mean=tuple(self._memory.mean.tolist()),
            byte_covariance=tuple(map(tuple, self._memory.covariance.tolist())),
        )

    @property
    def factors(self) -> tuple[float, ...]:
        """Factors of COSTS with which to scale the layer costs; all are positive."""
        return tuple(np.maximum(self._time.mean[: len(COSTS)], _LEAST_FACTOR).tolist())

    @property
    def byte_factors(self) -> tuple[float, float]:
        """Factors of static and of kept bytes; both are positive."""
        static, kept = np.maximum(self._memory.mean, _LEAST_FACTOR).tolist()
        return static, kept

    @property
    def byte_noise(self) -> float:
        """Relative standard error of the bytes of a plan that no factor explains."""
        return self._memory.noise

    @property
    def covariance(self) -> Floats:
        """Posterior covariance of the factors of FEATURES, [features, features]."""
        return self._time.covariance

    @property
    def schedule_factor(self) -> float:
        """Ratio of the seconds of a step to those simulated with the scaled costs."""
        return 1 + float(self._time.mean[-1])

    def seconds(self, features: Features) -> tuple[float, float]:
        """Return (mean, standard error) of the seconds of a step with these predicted parts."""
        return self._time.predict(np.array(features))

    def bytes(self, stage: StageBytes) -> StageBytes:
        """Return the corrected interval, in which 95 % of the measured peaks are expected."""
        lowest, error = self._memory.predict(_byte_row(stage, stage.low))
        expected, _ = self._memory.predict(_byte_row(stage, stage.expected))
        highest, high_error = self._memory.predict(_byte_row(stage, stage.high))
        return replace(
            stage,
            static=stage.static * float(self._memory.mean[0]),
            low=max(0.0, lowest - _WIDTH * error),
            expected=expected,
            high=highest + _WIDTH * high_error,
        )


def _fitted_times(prior: _Factors, observations: Sequence[Observation]) -> _Factors:
    """Fit the factors of times together with the slowdown of each disturbed trial, which is then dropped."""
    factors = len(prior.mean)
    rows = np.array([observation.features for observation in observations]).reshape(-1, factors)
    of_trials = [observation.disturbed_trial for observation in observations]
    disturbed = sorted({trial for trial in of_trials if trial is not None})
    count = len(disturbed)
    shares = (rows @ prior.mean)[:, None] * [[trial == other for other in disturbed] for trial in of_trials]
    covariance = np.pad(prior.covariance, (0, count))
    covariance[factors:, factors:] = _DISTURBED_WIDTH**2 * np.eye(count)
    joint = replace(prior, mean=np.pad(prior.mean, (0, count)), covariance=covariance).fitted(
        np.hstack([rows, shares]), np.array([observation.seconds for observation in observations])
    )
    return replace(joint, mean=joint.mean[:factors], covariance=joint.covariance[:factors, :factors])


def _fitted_bytes(prior: _Factors, peaks: Sequence[Peak], exceeded: Sequence[Peak]) -> _Factors:
    """Fit the factors of bytes. A stage that exceeded its memory counts while it needed more than the fit predicts.

    The stage furthest above the prediction is added first: a lower bound that the fit explains adds no information, and
    as a measurement it would pull the factors down.
    """
    counted, left = list(peaks), list(exceeded)
    while True:
        factors = prior.fitted(
            np.array([_byte_row(peak.predicted, peak.predicted.expected) for peak in counted]),
            np.array([peak.measured for peak in counted]),
        )
        above = {
            number: peak.measured / factors.predict(_byte_row(peak.predicted, peak.predicted.expected))[0]
            for number, peak in enumerate(left)
        }
        furthest = max(above, key=lambda number: above[number], default=None)
        if furthest is None or above[furthest] <= 1:
            return factors
        counted.append(left.pop(furthest))


def _byte_row(stage: StageBytes, total: float) -> Floats:
    """Return (static, kept) bytes."""
    return np.array((stage.static, total - stage.static))

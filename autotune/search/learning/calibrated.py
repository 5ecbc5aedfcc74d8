"""Predictions that are corrected by the trials of a search."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from statistics import fmean

import numpy as np

from autotune.prediction.calibration import Calibration, CalibrationState, Observation, Peak
from autotune.prediction.chosen_steps import ChosenSteps
from autotune.prediction.features import COSTS, LAYER_COSTS, Features, scaled, stage_features, step_features
from autotune.prediction.memory import StageBytes
from autotune.prediction.predictor import EpochOf, Prediction, Predictor
from autotune.prediction.sizes import ExcerptSizes
from autotune.prediction.trial_steps import trial_steps, warmup_of
from autotune.search.learning.excerpt import Excerpt
from storage.records import FinishedTrial
from trials.arrays import Floats
from trials.costs.layer_costs import LayerCosts
from trials.data.epoch import CostWeights, EpochSettings, build_epoch
from trials.data.index import DatasetIndex
from trials.data.neutral import neutrality
from trials.job import Job, SearchSection
from trials.outcome import Completed, Failed, Measurement, OutOfMemory, Rejected
from trials.plan import Layout, Packing, Plan

# A choice: 0.6 GB at most, for what would take seconds to pack again.
_KEPT_SAMPLES = 6_000_000
"""Samples of all excerpts that are kept together: their packs take less than 0.1 GB for a million."""
_KEPT_WHOLE = 8
"""Whole epochs that are kept where they are long: one of a million samples takes about 0.2 GB."""
_STEPS = 16
"""Steps that stand for an epoch where the error of its time is estimated."""


class CalibratedPredictor:
    """A predictor whose times and bytes are corrected by measurements; deterministic for the same trials in order."""

    def __init__(
        self,
        base: Predictor,
        state: CalibrationState | None = None,
        *,
        excerpt: Predictor | None = None,
        share: float = 1.0,
    ) -> None:
        """`state` is the final calibration of a similar workload, to begin with.

        Plans are compared on an `excerpt`, which takes this share of the time of an epoch; by default on whole epochs.
        """
        self.base = base
        """Predictor from the profile alone, of whole epochs."""
        self.profiled = excerpt or base
        """Predictor from the profile alone, of the excerpt."""
        self.corrected = self.profiled
        """Predictor with corrected layer costs and bytes, but without the factor `schedule`."""
        self._share = share
        self.learning_faults: Callable[[Plan], tuple[str, ...]] = cache(self._learning_faults)
        """Return in what the steps of a plan learn otherwise than the job asks for, in words."""
        self.trials = 0
        """Trials that the predictor has learnt from."""
        self._observations: list[Observation] = []
        self._peaks: list[Peak] = []
        self._exceeded: list[Peak] = []
        self._initial_state = state
        self._epoch_seconds: dict[Plan, float] = {}
        self._shares: dict[Plan, Floats] = {}
        self._heavier: dict[tuple[Packing, Layout], float] = {}
        """Kept bytes of the whole epoch's packs over the excerpt's, for plans that came to a trial."""
        self._fit()

    def _learning_faults(self, plan: Plan) -> tuple[str, ...]:
        epoch = self.base.sizes(plan.packing, plan.layout).epoch
        return tuple(neutrality(epoch).faults(epoch.settings.mixed))

    @classmethod
    def of_job(
        cls,
        job: Job,
        index: DatasetIndex,
        weights: CostWeights,
        *,
        costs: LayerCosts,
        element_bytes: int,
        state: CalibrationState | None = None,
    ) -> "CalibratedPredictor":
        """Return the predictor of a job's first epoch. Where it is long, plans are compared on an excerpt."""
        settings = EpochSettings.of_job(job, weights)

        def epoch_of(index: DatasetIndex) -> EpochOf:
            return lambda packing, data: build_epoch(index, packing, settings, data_parallel=data)

        excerpt = Excerpt.of(index, settings)
        kept = max(_KEPT_SAMPLES // len(excerpt.index), _KEPT_WHOLE)
        if excerpt.index is index:
            return cls(Predictor(costs, epoch_of(index), element_bytes, kept_epochs=kept), state)
        compared = Predictor(costs, epoch_of(excerpt.index), element_bytes, sizes=ExcerptSizes, kept_epochs=kept)
        whole = Predictor(costs, epoch_of(index), element_bytes, kept_epochs=_KEPT_WHOLE)
        return cls(whole, state, excerpt=compared, share=excerpt.share)

    def predict(self, plan: Plan) -> Prediction:
        """Predict corrected seconds and bytes of a whole epoch.

        The breakdown lacks what steps take besides the schedule.
        """
        prediction = self.base.with_costs(self.corrected.costs).predict(plan)
        return replace(
            prediction,
            step_seconds=prediction.step_seconds * self._calibration.schedule_factor,
            stage_memory=tuple(map(self._bytes, prediction.stage_memory)),
        )

    def memory(self, plan: Plan) -> tuple[StageBytes, ...]:
        """Return the corrected bytes of each stage."""
        return self.plans_memory((plan,))[0]

    def plans_memory(self, plans: Iterable[Plan]) -> list[tuple[StageBytes, ...]]:
        """Return the corrected bytes of each stage of each plan, in less time than one by one.

        They are those in the excerpt, times what is known of how much heavier packs of the whole epoch are.
        """

        def bytes_of(plan: Plan, profiled: Iterable[StageBytes]) -> tuple[StageBytes, ...]:
            factor = self._heavier.get((plan.packing, plan.layout), self._usually_heavier)
            return tuple(self._bytes(stage.keeping(factor)) for stage in profiled)

        plans = list(plans)
        return list(map(bytes_of, plans, self.profiled.plans_memory(plans)))

    def epoch_seconds(self, plan: Plan) -> float:
        """Return the corrected seconds of an epoch, cached until the next trial."""
        return self.plans_epoch_seconds((plan,))[0]

    def plans_epoch_seconds(self, plans: Iterable[Plan]) -> list[float]:
        """Return the corrected seconds of an epoch of each plan, in less time than one by one."""
        plans, factor = list(plans), self.epoch_factor
        new = [plan for plan in plans if plan not in self._epoch_seconds]
        seconds = (profiled * factor for profiled in self.corrected.plans_epoch_seconds(new))
        self._epoch_seconds |= dict(zip(new, seconds, strict=True))
        return [self._epoch_seconds[plan] for plan in plans]

    def shares(self, plan: Plan) -> Floats:
        """Return the shares of the profiled time that grow with each factor of FEATURES; all but the last sum to 1."""
        if plan not in self._shares:
            profiled = np.array(step_features(self.profiled, plan, self._spread(plan), (1.0,) * len(COSTS)))
            self._shares[plan] = profiled / profiled[-1]
        return self._shares[plan]

    @property
    def is_inherited(self) -> bool:
        """Whether all that corrects the profile comes from a search on a similar workload."""
        return self._initial_state is not None and self.trials == 0

    @property
    def state(self) -> CalibrationState:
        """Calibration state for a search on a similar workload."""
        return self._calibration.state

    def steps_seconds(self, plans: Iterable[Plan]) -> Floats:
        """Return the corrected mean seconds of a step of each plan, [plans]."""
        plans = list(plans)
        steps = [self.profiled.sizes(plan.packing, plan.layout).epoch_steps for plan in plans]
        seconds: Floats = self._share * np.array(self.plans_epoch_seconds(plans)) / steps
        return seconds

    @property
    def epoch_factor(self) -> float:
        """Factor from the seconds that `corrected` predicts for the excerpt to those of an epoch."""
        return self._calibration.schedule_factor / self._share

    @property
    def factors(self) -> Floats:
        """Factors by which the profile was corrected: of LAYER_COSTS, then of static and kept bytes."""
        return np.array([*self._calibration.factors[: len(LAYER_COSTS)], *self._byte_factors])

    @property
    def byte_noise(self) -> float:
        """Relative standard error of the bytes of a plan that no factor explains."""
        return self._calibration.byte_noise

    @property
    def covariance(self) -> Floats:
        """Posterior covariance of the factors of FEATURES, [features, features]."""
        return self._calibration.covariance

    def drawn(self, random: np.random.Generator, count: int) -> Iterator[Predictor]:
        """Yield predictors without bytes whose costs are draws from the posterior of the factors."""
        mean = np.array([*self._calibration.factors, self._calibration.schedule_factor - 1])
        # Unlike Cholesky's method it takes a covariance that rounding has made slightly indefinite.
        for factors in random.multivariate_normal(mean, self.covariance, count, method="eigh"):
            # The tail of a normal draw may be negative, which no cost is.
            yield self.base.with_costs(scaled(self.base.costs, np.maximum(factors[: len(COSTS)], 0.0)))

    def relative_error(self, plan: Plan) -> float:
        """Return the standard error of the predicted `epoch_seconds`, as a share of it."""
        mean, error = self._calibration.seconds(self._features(self.profiled, plan, self._spread(plan)))
        return error / mean

    def _spread(self, plan: Plan) -> tuple[int, ...]:
        """Return steps that stand for the excerpt, evenly spaced."""
        count = sum(map(len, self.profiled.sizes(plan.packing, plan.layout).timed_blocks))
        return tuple(np.unique(np.linspace(0, count - 1, min(count, _STEPS)).round()).astype(int).tolist())

    def learn(self, trial: FinishedTrial, settings: SearchSection, *, base: Predictor | None = None) -> None:
        """Learn from a trial that completed or ran out of memory; other failures are ignored.

        A rejected plan teaches how much heavier packs of the whole epoch are than those of the excerpt, as these do.
        `base` has the layer costs for the number of devices that the trial ran on, where that is another one.
        """
        plan, result = trial.plan, trial.result
        match result.outcome:
            case Completed(measurement=measurement):
                self.observe(plan, measurement, settings.warmup_steps, is_disturbed=result.is_disturbed, base=base)
            case Failed(cause=OutOfMemory() as cause):
                steps = trial_steps(self.base.predict(plan), settings.warmup_steps, settings.timed_steps)
                # The stage failed in one of these steps; which one is unknown, so all of them count.
                predicted = _bytes_in(self.base, plan, (*steps.warmup_steps, *steps.timed_steps))[cause.stage]
                self._exceeded.append(Peak(predicted=predicted, measured=cause.needed_bytes))
                self.trials += 1
                self._weigh(plan)
                self._fit()
            case Rejected() if self.profiled is not self.base:
                self._weigh(plan)
                self._fit()
            case _:
                pass

    def observe(
        self,
        plan: Plan,
        measurement: Measurement,
        warmup_steps: int,
        *,
        is_disturbed: bool = False,
        base: Predictor | None = None,
    ) -> None:
        """Learn from a measurement, which came after `warmup_steps` that were not timed.

        A disturbed one teaches how the times of its parts compare: what slowed all of them is fitted apart.
        A measurement of steps that this epoch does not have, as of a job with another seed, is ignored.
        """
        base, steps = base or self.base, measurement.steps
        if max(steps) >= self.base.sizes(plan.packing, plan.layout).epoch.steps:
            return
        # The whole step tells what the sum of its parts does not: the schedule, and communication.
        measured = [(self._features(base, plan, steps), sum(measurement.step_seconds) / len(steps))]
        updates = []
        for stage in measurement.stages:
            load, forward, backward, update = stage_features(
                base, plan, steps, self._calibration.factors, stage=stage.stage, data_rank=stage.data_rank
            )
            measured.append((load, stage.load_seconds))
            # A rank waits for the others where all of them exchange.
            if not plan.layout.shards_weights:
                measured.append((forward, stage.forward_seconds))
            # Averages during a pass take a part of the machine.
            if not (plan.layout.shards_gradients or plan.layout.bucket_bytes):
                measured.append((backward, stage.backward_seconds))
            # Some of the waiting for other ranks of the stage may be left in the update of the last one.
            if plan.layout.grid.of_stage == 1:
                updates.append((update, stage.optimizer_seconds))
        # ZeRO and clipping add up the norms of all stages, for which stages that end early wait inside their update.
        measured += sorted(_predicted(updates), key=lambda each: each[1] / sum(each[0]))[:1]
        trial = self.trials if is_disturbed else None
        self._observations += [
            Observation(features=features, seconds=seconds, disturbed_trial=trial)
            for features, seconds in _predicted(measured)
        ]
        self._peaks += peaks(self.base, plan, measurement, warmup_steps)
        self.trials += 1
        self._weigh(plan)
        self._fit()

    def _weigh(self, plan: Plan) -> None:
        """Learn how much heavier the heaviest packs of the whole epoch are than those of the excerpt."""
        if self.profiled is self.base:
            return
        whole, part = (each.plans_memory((plan,))[0] for each in (self.base, self.profiled))
        fullest = int(np.argmax([stage.expected for stage in whole]))
        kept, in_excerpt = (stages[fullest].expected - stages[fullest].static for stages in (whole, part))
        self._heavier[plan.packing, plan.layout] = kept / max(in_excerpt, 1.0)

    @property
    def _usually_heavier(self) -> float:
        """Mean of `_heavier` and of 1, so that the first plan alone does not decide about other packs."""
        return fmean((1.0, *self._heavier.values()))

    @property
    def _byte_factors(self) -> tuple[float, float]:
        """Factors of static and of kept bytes of the excerpt."""
        static, kept = self._calibration.byte_factors
        return static, kept * self._usually_heavier

    def _fit(self) -> None:
        self._calibration = Calibration.fit(self._observations, self._peaks, self._exceeded, self._initial_state)
        self._epoch_seconds.clear()
        self._bytes: Callable[[StageBytes], StageBytes] = cache(self._calibration.bytes)
        self.corrected = self.profiled.with_costs(
            scaled(self.base.costs, self._calibration.factors), self._byte_factors
        )

    def _features(self, base: Predictor, plan: Plan, steps: tuple[int, ...]) -> Features:
        return step_features(base, plan, steps, self._calibration.factors)


def _predicted(measured: Iterable[tuple[Features, float]]) -> list[tuple[Features, float]]:
    """Return the measured times of which the predicted one is not 0."""
    return [(features, seconds) for features, seconds in measured if sum(features) > 0]


def peaks(predictor: Predictor, plan: Plan, measurement: Measurement, warmup_steps: int) -> list[Peak]:
    """Return each stage's measured peak with the predicted one, of the steps that the trial ran."""
    warmup = warmup_of(predictor.predict(plan), warmup_steps)  # the measurement does not name them
    return [
        Peak(
            predicted=of_stage,
            measured=max(stage.peak_bytes for stage in measurement.stages if stage.stage == number),
        )
        for number, of_stage in enumerate(_bytes_in(predictor, plan, (*measurement.steps, *warmup)))
    ]


def _bytes_in(predictor: Predictor, plan: Plan, steps: Iterable[int]) -> tuple[StageBytes, ...]:
    """Return the predicted bytes of each stage in these steps alone."""
    sizes = ChosenSteps(predictor.sizes(plan.packing, plan.layout), tuple({*steps}))
    return predictor.stage_memory(plan, sizes)

"""Forecasts of plans without devices or ranks, as `autotune predict` makes them."""

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Self

import numpy as np
import torch

from autotune.data_problems import check_media, warn_of_bad_data
from autotune.dimensions.folds import unprofiled
from autotune.dimensions.sequence import knows_sequence
from autotune.errors import PredictError
from autotune.events import Listener, unheard
from autotune.folders import lengths_folder
from autotune.forecast.cluster import Cluster
from autotune.held_out import hold_out
from autotune.machine.hardware import default_workers
from autotune.prediction.calibration import CalibrationState
from autotune.prediction.predictor import Prediction
from autotune.prediction.sizes import EpochSizes
from autotune.prediction.timeline import Timeline, timeline
from autotune.search.execution.ledger import is_conclusive
from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.learning.surrogate import Surrogate
from autotune.search.solver.limits import Limits
from autotune.search.solver.solver import Solver
from autotune.search.space.feasible import feasible_space
from autotune.search.study_settings import packs_of, search_of, teaches
from storage.explanation import UNEXPLAINED
from storage.records import FinishedTrial, StudyRecord
from trials.costs.layer_costs import LayerCosts
from trials.data.epoch import Epoch
from trials.data.index import DatasetIndex, profile
from trials.data.indexing import IndexReport, build_index
from trials.data.levels import check_levels
from trials.data.pack_cost import cost_weights
from trials.errors import DataError, InvalidPlan
from trials.job import Job
from trials.model.cut import check_layers
from trials.model.inputs.encoders import load_measurer
from trials.model.refusals.compiling import check_compilable
from trials.model.refusals.heads import check_degrees
from trials.model.refusals.tensor import check_tensor
from trials.model.skeleton import build_skeleton, load_config
from trials.outcome import Completed
from trials.plan import Layout, Levelled, Packing, Padded, Plan
from trials.units import number_of
from trials.workload import ModelShape, Workload

_log = logging.getLogger(__name__)
_DRAWS = 8
"""Random orders of packs whose mean stands for all."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Forecast:
    """Forecast of one plan."""

    plan: Plan
    prediction: Prediction
    timeline: Timeline
    """Simulation of a typical step."""
    relative_error: float
    """Standard error of the epoch's seconds, as a share of them."""
    predicted_samples_per_second: float
    memory_limit_bytes: int
    host_limit_bytes: float
    """Most bytes that a rank may offload to the host's memory."""

    @property
    def epoch_seconds_error(self) -> float:
        return self.prediction.epoch_seconds * self.relative_error

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of each part of the epoch, which sum to the whole.

        The last part, `unexplained`, is the measured time of trials beyond the simulated one; it may be negative.
        """
        simulated = self.prediction.breakdown.totals
        return {**simulated, UNEXPLAINED: self.prediction.epoch_seconds - sum(simulated.values())}

    @property
    def fits(self) -> bool:
        """Whether every stage is expected to stay within the limit, and what it offloads within the host's memory."""
        return not (self.exceeds_limit or self.exceeds_host)

    @property
    def exceeds_limit(self) -> bool:
        """Whether a stage is expected to need more memory than the limit."""
        return max(self.prediction.stage_bytes) > self.memory_limit_bytes

    @property
    def exceeds_host(self) -> bool:
        """Whether a stage is expected to offload more than may be of the host's memory."""
        return max(stage.host for stage in self.prediction.stage_memory) > self.host_limit_bytes

    @property
    def keeps_batch(self) -> bool:
        """Whether the mean global batch is near enough to the job's for a search to run the plan."""
        return self.prediction.keeps_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastData:
    """The samples of a job that are trained on."""

    index: DatasetIndex
    report: IndexReport

    @classmethod
    def of(cls, job: Job, listener: Listener = unheard) -> Self:
        """Read the job's data, and log what is skipped or unused as warnings.

        Raise what `build_index` and `check_media` raise.
        """
        measurer = load_measurer(job.model, job.data)
        index, report = build_index(job.data, measurer, Path(), listener, cache=lengths_folder())
        warn_of_bad_data(report)
        check_media(report, measurer)
        return cls(index=hold_out(index, job.evaluation)[0], report=report)


def workload_on(cluster: Cluster, job: Job, shape: ModelShape, data: ForecastData) -> Workload:
    return Workload(
        model=shape,
        data=profile(data.index),
        hardware=cluster.profiled.hardware.resized(cluster.devices),
        software=cluster.profiled.software,
        oversize=job.data.oversize,
        global_batch_samples=job.training.global_batch_samples,
        memory_limit_bytes=cluster.memory_limit_bytes,
    )


class Forecaster:
    """Forecasts for one job on one cluster."""

    def __init__(
        self,
        job: Job,
        shape: ModelShape,
        cluster: Cluster,
        data: ForecastData,
        *,
        state: CalibrationState | None = None,
    ) -> None:
        """`state` is what trials with other data taught about the layer costs, to begin with."""
        self.job, self.shape = job, shape
        self.index, self.report = data.index, data.report
        self.workload = workload_on(cluster, job, shape, data)
        self.cluster = cluster.for_data(self.workload.data)
        self._config = load_config(job.model.path, trust_remote_code=job.model.trust_remote_code)
        self._predictor = CalibratedPredictor.of_job(
            job,
            self.index,
            cost_weights(shape),
            costs=self._costs_on(cluster.devices),
            element_bytes=shape.element_bytes,
            state=state,
        )
        self._surrogate = Surrogate(self._predictor)
        self._ran: dict[Plan, None] = {}
        """Plans that trials completed."""

    @property
    def trials(self) -> int:
        """Number of trials that have corrected the forecasts."""
        return self._predictor.trials

    @property
    def calibration(self) -> CalibrationState:
        """What the trials taught about the layer costs, for forecasts with other data."""
        return self._predictor.state

    def learn(self, trials: Iterable[tuple[StudyRecord, FinishedTrial]]) -> None:
        """Correct all forecasts by trials of a comparable workload, in this order, each with its study.

        The trials may have run on another number of devices: they correct the costs of layers, links and reduction.
        Those on as many devices also tell how far plans like theirs are from their predictions. Trials whose ranks
        exchange what the profile has not timed are left out, with a warning.
        """
        packs, left_out = packs_of(self.index), 0
        for study, trial in trials:
            if not (is_conclusive(trial) and teaches(study, self.job.training, self._loading_workers, packs)):
                continue
            # Reductions depend on the number of devices that the trial ran on.
            costs = self._costs_on(trial.plan.layout.world_size)
            try:
                _check_profiled(costs, trial.plan)
            except PredictError:
                left_out += 1
                continue
            base = self._predictor.base.with_costs(costs)
            search = search_of(study.settings, self.job.search)
            self._predictor.learn(trial, search, base=base)
            if trial.plan.layout.world_size == self.cluster.devices:
                self._surrogate.learn(trial)
            if isinstance(trial.result.outcome, Completed):
                self._ran[trial.plan] = None
        if left_out:
            _log.warning(
                "%s of the store cannot correct the predictions, since the profile has not timed what their ranks "
                "exchange; it times more with `autotune profile JOB --fresh` on as many devices",
                number_of(left_out, "trial"),
            )

    def _is_candidate(self, plan: Plan) -> bool:
        """Return whether a search of this job might choose a plan that ran: of packs, over all devices."""
        packing, layout = plan.packing, plan.layout
        if isinstance(packing, Padded) or layout.world_size != self.cluster.devices:
            return False
        try:
            self._check(plan)
        except PredictError:  # such as exchanges that this profile has not timed
            return False
        return self.epoch(packing, layout.data).keeps_batch and not self._predictor.learning_faults(plan)

    @property
    def _loading_workers(self) -> int:
        if (workers := self.job.data.workers) is not None:
            return workers
        cluster = self.cluster
        hardware, shared_bytes = cluster.profiled.hardware.resized(cluster.devices), cluster.shared_bytes
        return default_workers(hardware, self.job.search.parallel, shared_bytes=shared_bytes)

    def _costs_on(self, devices: int) -> LayerCosts:
        return self.cluster.costs_on(devices).with_workers(self._loading_workers)

    def of(self, plan: Plan) -> Forecast:
        """Return the forecast of a plan.

        Raise PredictError for a plan of another model, or one that needs more devices or packs than there are.
        """
        self._check(plan)
        return self._forecast(plan)

    def best(self, count: int, *, remedy: str = "give more --memory or --devices") -> tuple[Forecast, ...]:
        """Return the plans predicted fastest, one for each layout and capacities; plans that fit come first.

        They are those that the solver finds, which leave a little memory free, and those that trials completed. A
        solved plan may not fit once trials have corrected its predicted memory.

        Raise NoFeasiblePlan, which ends with `remedy`, when none fits the memory and keeps the global batch.
        """
        space = feasible_space(
            self.workload, self.solver(), remedy=remedy, batch_tolerance=self.job.training.batch_tolerance
        )
        distinct: dict[tuple[Layout, tuple[tuple[int, int, int], ...]], tuple[tuple[bool, float], Plan]] = {}
        ratios = [1.0]

        def compare(plans: Sequence[Plan]) -> None:
            peaks = (max(stage.expected for stage in stages) for stages in self._predictor.plans_memory(plans))
            found = self.epoch_seconds(plans)
            ratios.extend(np.divide(found, self._predictor.plans_epoch_seconds(plans)))
            for plan, peak, seconds in zip(plans, peaks, found, strict=True):
                assert not isinstance(plan.packing, Padded)  # as all starts of a space are
                key = plan.layout, tuple((level.qv, level.qt, level.sequence) for level in plan.packing.levels)
                entry = (peak > self.cluster.memory_limit_bytes, seconds), plan
                distinct[key] = min(distinct.get(key, entry), entry, key=lambda entry: entry[0])

        compare(tuple(filter(self._is_candidate, self._ran)))
        for bound, origin in space.by_bound():
            fastest = sorted(distinct.values(), key=lambda entry: entry[0])[:count]
            # Trials may have found plans faster than predicted, and the bound is a predicted time.
            if len(fastest) == count and fastest[-1][0] <= (False, bound * min(ratios)):
                break  # all further plans take longer
            compare(space.solved(origin))
        plans = [plan for _, plan in sorted(distinct.values(), key=lambda entry: entry[0])[:count]]
        # The epoch may differ a little from the excerpt on which the plans were compared.
        forecasts = map(self._forecast, plans)
        return tuple(sorted(forecasts, key=lambda each: (each.exceeds_limit, each.prediction.epoch_seconds)))

    def solver(self) -> Solver:
        """Return a solver by the forecasts, as they are corrected by now."""
        return Solver(self._predictor.corrected, Limits.of(self.workload, self.job.search.parallel))

    def epoch_seconds(self, plans: Sequence[Plan]) -> list[float]:
        """Return the predicted epoch seconds of each plan, in less time than `of`."""
        return self._surrogate.epoch_seconds(plans)

    def ranked(self, plans: Iterable[Plan]) -> list[tuple[float, Plan]]:
        """Return (epoch seconds, plan) of those that are expected to fit and keep the batch, the fastest first."""
        distinct = list(dict.fromkeys(plans))
        usable = Limits.of(self.workload, self.job.search.parallel).usable_bytes
        memory = self._predictor.plans_memory(distinct)
        fitting = [
            plan
            for plan, stages in zip(distinct, memory, strict=True)
            if max(stage.expected for stage in stages) <= usable
            and self.epoch(plan.packing, plan.layout.data).keeps_batch
        ]
        seconds = self.epoch_seconds(fitting)
        return sorted(zip(seconds, fitting, strict=True), key=lambda each: each[0])

    def epoch(self, packing: Packing, data_parallel: int) -> Epoch:
        """Return the first epoch on a number of data ranks. Raise DataError where it cannot pack the data."""
        layout = Layout(pipeline=1, data=data_parallel, zero=0)
        return self._predictor.base.sizes(packing, layout).epoch

    def waiting_ratio(self, plan: Plan) -> float:
        """Return the epoch time with packs in random order, over that with packs as they are arranged.

        No ranks of the plan share packs.
        """
        base = self._predictor.base.with_costs(self._predictor.corrected.costs)
        arranged, random = base.sizes(plan.packing, plan.layout), np.random.default_rng(self.job.training.seed)
        packs = arranged.epoch.assignment

        def seconds(sizes: EpochSizes) -> float:
            return float(base.plans_step_seconds((plan,), sizes).sum())

        def shuffled() -> EpochSizes:
            drawn = random.permutation(packs.ravel()).reshape(packs.shape)
            return EpochSizes(replace(arranged.epoch, arranged=lambda: drawn), plan.layout.tensor)

        return fmean(seconds(shuffled()) for _ in range(_DRAWS)) / seconds(arranged)

    def _check(self, plan: Plan) -> None:
        try:
            check_layers(
                plan,
                vision_layers=self.shape.vision_layers,
                language_layers=self.shape.language_layers,
                dtype=self.shape.dtype,
            )
            if self.job.training.compile:
                check_compilable(plan.layout)
            tensor = plan.layout.tensor
            if tensor > 1:
                skeleton = build_skeleton(self._config, torch.float32)
                layers = skeleton.modules(skeleton.chain.language_layers)
                check_tensor(self._config, layers, tensor, adapters=self.job.training.lora.rank is not None)
            check_degrees(self._config.get_text_config(), plan.packing.degrees, tensor)
            if isinstance(plan.packing, Levelled):
                check_levels(self.index, plan.packing, skips=self.job.data.oversize == "skip")
        except InvalidPlan as error:
            raise PredictError(f"the plan is not one of {self.shape.name}: {error}") from error
        _check_profiled(self.cluster.costs, plan)
        needed, devices = plan.layout.world_size, self.cluster.devices
        of_tensor = f" x tensor {tensor}" if tensor > 1 else ""
        if needed > devices:
            raise PredictError(
                f"the plan needs pipeline {plan.layout.pipeline} x data {plan.layout.data}{of_tensor} = {needed} "
                f"devices but {devices} are given; give --devices {needed} or another layout"
            )
        try:
            epoch = self._predictor.base.sizes(plan.packing, plan.layout).epoch
        except DataError as error:
            raise PredictError(f"the plan cannot pack the data: {error}") from error
        # An empty pack only fills up a row of data ranks.
        degrees = epoch.degrees[epoch.packs.counts > 0]
        if degrees.sum() < plan.layout.data:
            each = f" for {degrees.max()} ranks each" if degrees.max() > 1 else ""
            raise PredictError(
                f"the plan has {plan.layout.data} data ranks but the epoch only "
                f"{number_of(len(degrees), 'pack')}{each}; lower its data degree"
            )

    def _forecast(self, plan: Plan) -> Forecast:
        prediction, posterior = self._predictor.predict(plan), self._surrogate.posterior((plan,))
        beyond = math.exp(posterior.mean[0]) / self._predictor.epoch_seconds(plan)
        prediction = replace(prediction, step_seconds=prediction.step_seconds * beyond)
        return Forecast(
            plan=plan,
            prediction=prediction,
            timeline=timeline(self._predictor.corrected, plan, prediction),
            relative_error=float(posterior.error[0]),
            predicted_samples_per_second=float(prediction.step_samples.sum()) / prediction.epoch_seconds,
            memory_limit_bytes=self.cluster.memory_limit_bytes,
            host_limit_bytes=Limits.of(self.workload, self.job.search.parallel).host_limit_bytes,
        )


def _check_profiled(costs: LayerCosts, plan: Plan) -> None:
    """Raise PredictError for a plan whose ranks exchange what the profile has not timed."""
    tensor = plan.layout.tensor
    if missing := unprofiled(costs, plan.layout):
        raise PredictError(
            f"the profile has no times of {missing}: an older version wrote it, or its devices cannot; measure "
            "them with `autotune profile JOB --fresh`, or give a plan without"
        )
    for degree in (each * tensor for each in plan.packing.degrees):
        if not knows_sequence(costs, degree):
            raise PredictError(
                f"the profile has no times of what {degree} ranks exchange that share a pack: an older version "
                f"wrote it, or its devices cannot share one; measure them on {degree} devices or more with "
                "`autotune profile JOB --fresh`"
            )

"""A small workload to predict and search: layer costs, data of random lengths, and ranks that only calculate."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from autotune.predict.chosen_steps import ChosenSteps
from autotune.predict.costs import KINDS, LayerCost, LayerCosts, LinkCost, LoadCost, UpdateCost
from autotune.predict.features import stage_features
from autotune.predict.parts import Parts
from autotune.predict.predictor import EpochOf, Predictor
from autotune.predict.robust_fit import Coefficients
from autotune.search.limits import Limits
from autotune.search.solver import Solver
from autotune.workload import Prepared
from storage.records import FinishedTrial, TrialResult
from tests import storage_values
from tests.data_values import index_of
from tests.training_values import job_of
from trials.data.epoch import CostWeights, Epoch, build_epoch
from trials.data.index import DatasetIndex, profile
from trials.engine.engine import seat
from trials.model.cut import cut
from trials.outcome import Cause, Outcome, StageMeasurement
from trials.plan import Packing, Padded, Plan
from trials.run.pool import Answers, WarmPool
from trials.run.report import TrialReport
from trials.run.request import Request, Trial
from trials.workload import Workload

VISION_LAYERS, LANGUAGE_LAYERS = 5, 4
BATCH = 16
WEIGHTS = CostWeights(unit=100.0, token=1.0, square=0.01)
MEBI = 1 << 20


def layer_cost(
    seconds: tuple[float, float, float, float],
    kept: tuple[float, float, float, float],
    output: tuple[float, float, float, float],
    parameters: int = 50_000,
) -> LayerCost:
    """A layer whose backward pass takes twice its forward pass."""
    units, tokens, squares, constant = seconds
    return LayerCost(
        forward_seconds=seconds,
        backward_seconds=(2 * units, 2 * tokens, 2 * squares, 2 * constant),
        recompute_seconds=seconds,
        kept_bytes=kept,
        output_bytes=output,
        parameters=parameters,
    )


NO_LOADING = LoadCost()


def costs_of(*layers: LayerCost, loading: LoadCost = NO_LOADING) -> LayerCosts:
    """In the order of KINDS."""
    return LayerCosts(
        layers=tuple(zip(KINDS, layers, strict=True)),
        loading=loading,
        link=LinkCost(latency_seconds=0.0, seconds_per_byte=0.0),
        updates=(UpdateCost(zero=0, data_parallel=1, seconds_per_parameter=2e-9),),
        reduce_seconds_per_byte=1e-9,
        residual=0.02,
    )


COSTS = costs_of(
    layer_cost((1e-4, 0, 0, 1e-5), (4e4, 0, 0, 0), (3e4, 0, 0, 0)),
    layer_cost((1e-3, 0, 0, 1e-4), (5e5, 0, 0, 0), (3e4, 0, 0, 0)),
    layer_cost((1e-4, 1e-7, 0, 1e-5), (6e4, 800, 0, 0), (0, 700, 0, 0)),
    layer_cost((0, 1e-5, 5e-9, 1e-4), (0, 9000, 0, 1e4), (0, 700, 0, 0)),
    layer_cost((0, 2e-5, 0, 1e-5), (0, 4000, 0, 0), (0, 0, 0, 4)),
    loading=LoadCost(pixels_seconds=(1e-4, 1e-7, 0, 1e-5), labels_seconds=(5e-5, 1e-7, 0, 1e-5)),
)


def keeping(factor: float) -> LayerCosts:
    """Layers that keep so many times what was profiled."""
    layers = tuple(
        (kind, replace(cost, kept_bytes=times(cost.kept_bytes, factor), output_bytes=times(cost.output_bytes, factor)))
        for kind, cost in COSTS.layers
    )
    return replace(COSTS, layers=layers)


def times(coefficients: Coefficients, factor: float) -> Coefficients:
    units, tokens, squares, constant = coefficients
    return factor * units, factor * tokens, factor * squares, factor * constant


def random_rows(count: int, seed: int = 0) -> list[tuple[int, int]]:
    """(vision units, text tokens) of samples."""
    random = np.random.default_rng(seed)
    return list(zip(random.integers(0, 6, count).tolist(), random.integers(20, 300, count).tolist(), strict=True))


INDEX = index_of(random_rows(240))

layer_costs = st.builds(
    lambda scales: costs_of(
        *(
            replace(
                cost,
                forward_seconds=tuple(scale * value for value in cost.forward_seconds),
                backward_seconds=tuple(scale * value for value in cost.backward_seconds),
                recompute_seconds=tuple(scale * value for value in cost.recompute_seconds),
                kept_bytes=tuple(scale * value for value in cost.kept_bytes),
            )
            for (_, cost), scale in zip(COSTS.layers, scales, strict=True)
        ),
        loading=COSTS.loading,
    ),
    st.lists(st.floats(1, 4), min_size=len(KINDS), max_size=len(KINDS)),
)
"""Layers in other proportions; what each keeps is never less than what it hands on."""


def epoch_of(index: DatasetIndex = INDEX, batch: int = BATCH) -> EpochOf:
    def epoch(packing: Packing, data_parallel: int) -> Epoch:
        return build_epoch(
            index,
            packing,
            data_parallel=data_parallel,
            global_batch_samples=batch,
            weights=WEIGHTS,
            seed=0,
            epoch=0,
            oversize="own-pack",
        )

    return epoch


def predictor_of(costs: LayerCosts = COSTS, index: DatasetIndex = INDEX, batch: int = BATCH) -> Predictor:
    return Predictor(costs, epoch_of(index, batch), 4)


def limits_of(memory_bytes: int, vision: int = VISION_LAYERS, language: int = LANGUAGE_LAYERS) -> Limits:
    return Limits(vision_layers=vision, language_layers=language, memory_bytes=memory_bytes)


def solver_of(memory_bytes: int, predictor: Predictor | None = None) -> Solver:
    return Solver(predictor or predictor_of(), limits_of(memory_bytes))


def workload_of(memory_bytes: int = 1 << 40, devices: int = 2, dtype: str = "float32") -> Workload:
    """The small model on INDEX."""
    return replace(
        storage_values.WORKLOAD,
        model=replace(
            storage_values.WORKLOAD.model, dtype=dtype, vision_layers=VISION_LAYERS, language_layers=LANGUAGE_LAYERS
        ),
        data=profile(INDEX),
        hardware=replace(storage_values.WORKLOAD.hardware, devices=devices),
        global_batch_samples=BATCH,
        memory_limit_bytes=memory_bytes,
    )


def prepared_of(folder: Path, memory_bytes: int = 1 << 40, **search: object) -> Prepared:
    """The workload with a job, as if it had been looked at."""
    return Prepared(
        job=job_of(folder, folder, search=search, training={"global_batch_samples": BATCH}),
        workload=workload_of(memory_bytes),
        index=INDEX,
        index_file=folder / "index.npz",
        weights=WEIGHTS,
    )


def finished(plan: Plan, outcome: Outcome, number: int = 0, role: str = "sampled", **fields: float) -> FinishedTrial:
    """A trial that ended so; `fields` are `epoch_seconds` and its error."""
    result = TrialResult(
        trial_id=f"{number:032x}",
        outcome=outcome,
        epoch_seconds=fields.get("epoch_seconds"),
        epoch_seconds_error=fields.get("epoch_seconds_error"),
        finished=storage_values.NOON,
    )
    return FinishedTrial(
        id=result.trial_id,
        study_id="5" * 32,
        number=number,
        plan=plan,
        role=role,
        parameters={},
        started=storage_values.NOON,
        result=result,
    )


def completed(plan: Plan, epoch_seconds: float, error: float = 0.0, role: str = "sampled") -> FinishedTrial:
    """A trial that measured so long an epoch."""
    return finished(plan, storage_values.completed(), role=role, epoch_seconds=epoch_seconds, epoch_seconds_error=error)


def padded_plan(number: int) -> Plan:
    """A plan of its own for each number."""
    return replace(storage_values.PADDED_PLAN, packing=Padded(samples=number))


class SimulatedPool(WarmPool):
    """Answers trials from the prediction, with noise, instead of starting ranks."""

    def __init__(
        self,
        predictor: Predictor,
        cause_of: Callable[[Plan], Cause | None] = lambda _: None,
        factor_of: Callable[[Plan], float] = lambda _: 1.0,
    ) -> None:
        """`cause_of` says which plans fail; `factor_of` by how much a plan is slower than predicted."""
        super().__init__((), Path())
        self.asked: list[Plan] = []
        self._predictor = predictor
        self._cause_of = cause_of
        self._factor_of = factor_of
        self._random = np.random.default_rng(0)

    def ask(
        self,
        request: Request,
        timeout_seconds: float,
        on_wait: Callable[[], None] = lambda: None,
        on_step: Callable[[float], bool] | None = None,
    ) -> Answers | Cause:
        plan, task = request.plan, request.task
        assert isinstance(task, Trial)
        self.asked.append(plan)
        if cause := self._cause_of(plan):
            return cause
        predicted = self._predictor.predict(plan).step_seconds[list(task.timed_steps)]
        seconds = predicted * self._factor_of(plan) * self._random.normal(1, 0.01, len(predicted))
        stages = [self._stage(plan, task, rank) for rank in range(plan.layout.world_size)]
        return Answers(reports=tuple(_report(stage, seconds) for stage in stages))

    def _stage(self, plan: Plan, task: Trial, rank: int) -> StageMeasurement:
        """What the prediction says of that rank, slower by the plan's factor."""
        where, factor = seat(plan, rank), self._factor_of(plan)
        parts = stage_features(self._predictor, plan, task.timed_steps, where.stage, where.data_rank)
        load, forward, backward, update = (sum(features) * factor for features in parts)
        steps = (*task.warmup_steps, *task.timed_steps)
        sizes = ChosenSteps(self._predictor.sizes(plan.packing, plan.layout), steps)
        memory = self._predictor.stage_memory(Parts.of(cut(plan)), plan.layout, sizes)[where.stage]
        return StageMeasurement(
            stage=where.stage,
            data_rank=where.data_rank,
            load_seconds=load,
            forward_seconds=forward,
            backward_seconds=backward,
            optimizer_seconds=update,
            idle_seconds=0.0,
            peak_bytes=round(memory.expected),
            static_bytes=round(memory.static),
        )


def _report(stage: StageMeasurement, seconds: np.ndarray) -> TrialReport:
    return TrialReport(
        step_seconds=tuple(seconds.tolist()),
        losses=(1.0,) * len(seconds),
        samples=BATCH * len(seconds),
        text_tokens=1000,
        vision_units=10,
        stage=stage,
    )

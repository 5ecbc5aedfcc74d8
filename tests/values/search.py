"""A small workload to predict and search: layer costs, data of random lengths, and runs on a simulated machine."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from autotune.dimensions.usual import layouts
from autotune.exporting.trainers import EXPORTS
from autotune.prediction.predictor import EpochOf, Predictor
from autotune.search.execution.runner import Runner
from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.solver.limits import Limits
from autotune.search.solver.solver import Solver
from autotune.search.space.abilities import Target
from autotune.search.space.space import Axes
from autotune.workload import Prepared
from storage.records import FinishedTrial, TrialResult
from tests.machines.simulated import SimulatedLauncher, Undisturbed
from tests.values import storage as storage_values
from tests.values.data import WEIGHTS, build, index_of
from tests.values.exchanges import averages
from tests.values.training import job_of
from trials import plugins
from trials.arrays import Floats
from trials.costs.coefficients import KINDS, NOTHING, Coefficients, LayerKind, times
from trials.costs.layer import LayerCost
from trials.costs.layer_costs import LayerCosts, LinkCost, LoadCost, UpdateCost
from trials.data.epoch import Epoch
from trials.data.index import DatasetIndex, profile
from trials.outcome import Outcome
from trials.plan import Packing, Padded, Plan
from trials.stage import TOWERS
from trials.workload import Workload

VISION_LAYERS, LANGUAGE_LAYERS = 5, 4
BATCH = 16
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
    """Return costs of layers in the order of KINDS."""
    return LayerCosts(
        layers=tuple(zip(KINDS, layers, strict=True)),
        loading=loading,
        link=LinkCost(latency_seconds=0.0, seconds_per_byte=0.0),
        updates=(UpdateCost(zero=0, data_parallel=1, seconds_per_parameter=2e-9),),
        residual=0.02,
        exchanges=(averages(1e-9),),
    )


COSTS = costs_of(
    layer_cost((1e-4, 0, 0, 1e-5), (4e4, 0, 0, 0), (3e4, 0, 0, 0)),
    layer_cost((1e-3, 0, 0, 1e-4), (5e5, 0, 0, 0), (3e4, 0, 0, 0)),
    layer_cost((1e-4, 1e-7, 0, 1e-5), (6e4, 800, 0, 0), (0, 700, 0, 0)),
    layer_cost((0, 1e-5, 5e-9, 1e-4), (0, 9000, 0, 1e4), (0, 700, 0, 0)),
    layer_cost((0, 4e-5, 0, 1e-5), (0, 8000, 0, 0), (0, 0, 0, 4)),
    loading=LoadCost(pixels_seconds=(1e-4, 1e-7, 0, 1e-5), labels_seconds=(5e-5, 1e-7, 0, 1e-5)),
)


def by_size(kind: LayerKind, coefficients: Coefficients) -> Floats:
    """Return a layer's coefficients of a pack's units, tokens, squares, 1 and targets, on which alone the head runs."""
    units, tokens, squares, constant = coefficients
    return np.array((units, 0, squares, constant, tokens) if kind == "head" else (*coefficients, 0))


def keeping(factor: float) -> LayerCosts:
    """Return costs of layers that keep a multiple of the profiled bytes."""
    layers = tuple(
        (kind, replace(cost, kept_bytes=times(cost.kept_bytes, factor), output_bytes=times(cost.output_bytes, factor)))
        for kind, cost in COSTS.layers
    )
    return replace(COSTS, layers=layers)


def deferring(costs: LayerCosts, seconds: float = 0.4, kept: float = 0.8) -> LayerCosts:
    """Return costs of layers that can defer these shares of their backward pass and of their kept bytes."""
    layers = (
        (
            kind,
            replace(
                cost,
                weight_seconds=times(cost.backward_seconds, seconds),
                weight_bytes=times(cost.kept_bytes, kept),
            )
            if kind in TOWERS
            else cost,
        )
        for kind, cost in costs.layers
    )
    return replace(costs, layers=tuple(layers))


def frozen_vision() -> LayerCosts:
    """Return the costs where the vision tower does not train: it has no backward pass and keeps nothing."""
    layers = tuple((kind, _frozen(cost) if kind.startswith("vision") else cost) for kind, cost in COSTS.layers)
    return replace(COSTS, layers=layers)


def _frozen(cost: LayerCost) -> LayerCost:
    return replace(
        cost,
        backward_seconds=NOTHING,
        recompute_seconds=NOTHING,
        kept_bytes=NOTHING,
        frozen_parameters=cost.parameters,
    )


def random_rows(count: int, seed: int = 0) -> list[tuple[int, int]]:
    """(vision units, text tokens) of samples."""
    random = np.random.default_rng(seed)
    return list(zip(random.integers(0, 6, count).tolist(), random.integers(20, 300, count).tolist(), strict=True))


INDEX = index_of(random_rows(240))


def scaled(scales: Sequence[float]) -> LayerCosts:
    """Return costs of layers in other proportions; with at least 1 each keeps at least what it outputs."""
    layers = (
        replace(
            cost,
            forward_seconds=times(cost.forward_seconds, scale),
            backward_seconds=times(cost.backward_seconds, scale),
            recompute_seconds=times(cost.recompute_seconds, scale),
            kept_bytes=times(cost.kept_bytes, scale),
        )
        for (_, cost), scale in zip(COSTS.layers, scales, strict=True)
    )
    return costs_of(*layers, loading=COSTS.loading)


layer_costs = st.builds(scaled, st.lists(st.floats(1, 4), min_size=len(KINDS), max_size=len(KINDS)))


def epoch_of(index: DatasetIndex = INDEX, batch: int = BATCH) -> EpochOf:
    def epoch(packing: Packing, data_parallel: int) -> Epoch:
        return build(index, packing, ranks=data_parallel, batch=batch)

    return epoch


def predictor_of(costs: LayerCosts = COSTS, index: DatasetIndex = INDEX, batch: int = BATCH) -> Predictor:
    return Predictor(costs, epoch_of(index, batch), 4)


def limits_of(memory_limit_bytes: int, vision: int = VISION_LAYERS, language: int = LANGUAGE_LAYERS) -> Limits:
    return Limits(vision_layers=vision, language_layers=language, memory_limit_bytes=memory_limit_bytes)


def solver_of(memory_limit_bytes: int, predictor: Predictor | None = None) -> Solver:
    return Solver(predictor or predictor_of(), limits_of(memory_limit_bytes))


def axes_of(devices: int = 2, **changes: Any) -> Axes:
    """A few values of each axis; `changes` are those of the Axes."""
    usual: dict[str, Any] = {
        "layouts": layouts(workload_of().model, devices),
        "packers": ("best-fit", "isf"),
        "capacities": ((6, 320), (9, 480), (12, 480)),
        "qv_slacks": (0, 1, 2),
        "qt_slacks": (64, 0, 128),
    }
    return Axes(**(usual | changes))


def workload_of(memory_limit_bytes: int = 1 << 40, devices: int = 2, dtype: str = "float32") -> Workload:
    """The small model on INDEX."""
    return replace(
        storage_values.WORKLOAD,
        model=replace(
            storage_values.WORKLOAD.model, dtype=dtype, vision_layers=VISION_LAYERS, language_layers=LANGUAGE_LAYERS
        ),
        data=profile(INDEX),
        hardware=replace(storage_values.WORKLOAD.hardware, devices=devices),
        global_batch_samples=BATCH,
        memory_limit_bytes=memory_limit_bytes,
    )


def target_of(trainer: str) -> Target:
    """A trainer with its limits for a job in bfloat16."""
    exporter = plugins.load(EXPORTS, trainer)
    job = job_of(Path(), Path(), model={"dtype": "bfloat16"})
    return Target(name=trainer, title=exporter.TITLE, abilities=exporter.abilities(job))


def prepared_of(folder: Path, memory_limit_bytes: int = 1 << 40, **search: object) -> Prepared:
    """Return the workload with a job, as after `prepare`."""
    return Prepared(
        job=job_of(folder, folder, search=search, training={"global_batch_samples": BATCH}),
        workload=workload_of(memory_limit_bytes),
        index=INDEX,
        index_file=folder / "index.npz",
        weights=WEIGHTS,
    )


def finished(
    plan: Plan, outcome: Outcome, number: int = 0, role: str = "sampled", seconds: float = 0.0, **fields: float
) -> FinishedTrial:
    """Return a trial with this outcome, started after `seconds`; `fields` are `epoch_seconds` and its error."""
    started = storage_values.NOON + timedelta(seconds=seconds)
    result = TrialResult(
        trial_id=f"{number:032x}",
        outcome=outcome,
        epoch_seconds=fields.get("epoch_seconds"),
        epoch_seconds_error=fields.get("epoch_seconds_error"),
        finished=started,
    )
    return FinishedTrial(
        id=result.trial_id,
        study_id="5" * 32,
        number=number,
        plan=plan,
        role=role,
        parameters={},
        started=started,
        result=result,
    )


def completed(plan: Plan, epoch_seconds: float, error: float = 0.0, role: str = "sampled") -> FinishedTrial:
    """Return a completed outcome that measured this epoch time."""
    return finished(plan, storage_values.completed(), role=role, epoch_seconds=epoch_seconds, epoch_seconds_error=error)


def padded_plan(number: int) -> Plan:
    """Return a different plan for each number."""
    return replace(storage_values.PADDED_PLAN, packing=Padded(samples=number))


def runner_of(
    folder: Path,
    launcher: SimulatedLauncher,
    memory_limit_bytes: int = 1 << 40,
    predictor: Predictor | None = None,
    **search: object,
) -> Runner:
    """Return a runner on a machine without other users; it predicts with `predictor`."""
    calibrated = CalibratedPredictor(predictor or predictor_of())
    return Runner(prepared_of(folder, memory_limit_bytes, **search), calibrated, launcher, watch=Undisturbed)

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.prediction.features import scaled
from autotune.prediction.predictor import Predictor
from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.learning.warm_start import inherited_calibration, inherited_plans, moved
from autotune.search.solver.solver import Solver
from autotune.search.space.space import Space
from storage.store import Store, open_store
from tests.machines.simulated import SimulatedLauncher
from tests.values.data import WEIGHTS, index_of
from tests.values.search import (
    BATCH,
    COSTS,
    LANGUAGE_LAYERS,
    VISION_LAYERS,
    axes_of,
    limits_of,
    predictor_of,
    random_rows,
    runner_of,
    solver_of,
    workload_of,
)
from tests.values.storage import best_of, concluded
from tests.values.training import plan_of
from trials import wire
from trials.data.epoch import Epoch, EpochSettings, build_epoch
from trials.data.packs import Oversize
from trials.job import SearchSection
from trials.model.cut import check_layers
from trials.outcome import Completed
from trials.plan import Packed, Packing, Plan
from trials.workload import Workload

PREDICTOR = predictor_of()
SOLVER = solver_of(1 << 40, PREDICTOR)
SPACE = Space(axes_of(), SOLVER)
PLAN = next(plan for plan in SPACE.starts if plan.layout.pipeline == 2)
SETTINGS = SearchSection()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"sqlite:///{tmp_path}/store.db") as opened:
        yield opened


def keep(store: Store, workload: Workload, plan: Plan, calibration_state: str = "{}") -> None:
    """Store a finished study on that workload with this winner."""
    study = store.create_study(store.add_workload(workload), {}, seed=0)
    concluded(store, best_of(study.id, plan=plan, workload=workload), calibration_state)


def bigger(workload: Workload) -> Workload:
    """With one more language layer."""
    model = replace(workload.model, language_layers=LANGUAGE_LAYERS + 1, config_digest="bigger")
    return replace(workload, model=model)


def test_the_winner_of_a_similar_workload_is_inherited(store: Store) -> None:
    keep(store, replace(workload_of(), global_batch_samples=17), PLAN)
    assert inherited_plans(store, workload_of(), SPACE) == [PLAN]


@pytest.mark.parametrize("name", ["another", f"{workload_of().hardware.device_name} MIG 1g.10gb"])
def test_winners_on_other_devices_are_not(store: Store, name: str) -> None:
    other = replace(workload_of(), hardware=replace(workload_of().hardware, device_name=name))
    keep(store, other, PLAN)
    assert inherited_plans(store, workload_of(), SPACE) == []


def test_the_nearest_workloads_come_first_and_two_are_enough(store: Store) -> None:
    plans = [plan for plan in SPACE.starts if plan.layout == PLAN.layout][:3]
    far = replace(workload_of(), global_batch_samples=17, memory_limit_bytes=1 << 39, oversize="skip")
    for changed, plan in zip((far, replace(far, oversize="own-pack"), workload_of()), plans, strict=True):
        keep(store, changed, plan)
    assert inherited_plans(store, workload_of(), SPACE) == [plans[2], plans[1]]


def test_a_split_is_moved_in_proportion_to_a_model_of_other_layers() -> None:
    layers = (VISION_LAYERS, 2 * LANGUAGE_LAYERS + VISION_LAYERS)
    solver = Solver(PREDICTOR, limits_of(1 << 40, *layers))
    model = replace(workload_of().model, vision_layers=layers[0], language_layers=layers[1])
    found = moved(PLAN, replace(workload_of(), model=model), Space(axes_of(), solver))
    assert found is not None
    assert found.packing == PLAN.packing
    check_layers(found, vision_layers=layers[0], language_layers=layers[1], dtype=model.dtype)
    before, after = PLAN.stages[0].vision + PLAN.stages[0].language, found.stages[0].vision + found.stages[0].language
    assert after == round(before * sum(layers) / (VISION_LAYERS + LANGUAGE_LAYERS))


def test_a_plan_for_another_number_of_devices_is_not_moved() -> None:
    assert moved(PLAN, workload_of(devices=4), Space(axes_of(devices=4), SOLVER)) is None


@pytest.mark.parametrize("oversize", ["fail", "skip"])
def test_a_winner_whose_packs_hold_no_sample_of_this_data_is_passed_over(store: Store, oversize: Oversize) -> None:
    longer = index_of([(units, tokens + 1000) for units, tokens in random_rows(240)])
    settings = EpochSettings(global_batch_samples=BATCH, weights=WEIGHTS, oversize=oversize)

    def epoch_of(packing: Packing, data_parallel: int) -> Epoch:
        return build_epoch(longer, packing, settings, data_parallel=data_parallel)

    solver = solver_of(1 << 40, Predictor(COSTS, epoch_of, 4))
    space = Space(axes_of(capacities=((12, 1400), (12, 2800))), solver)
    keep(store, replace(workload_of(), global_batch_samples=17), PLAN)
    assert inherited_plans(store, workload_of(), space) == []
    fitting = next(iter(space.starts))
    keep(store, workload_of(), fitting)
    assert inherited_plans(store, workload_of(), space) == [fitting]


def test_a_winner_whose_ranks_share_packs_as_was_never_timed_here_is_passed_over(store: Store) -> None:
    of_two_ranks = replace(COSTS, updates=(replace(COSTS.updates[0], data_parallel=2),))
    space = Space(axes_of(), solver_of(1 << 40, predictor_of(of_two_ranks)))
    shared = Packed(qv=12, qt=480, qv_min=12, qt_min=416, sequence=2)
    keep(store, workload_of(), plan_of("5+4", data=2, packing=shared))
    assert inherited_plans(store, workload_of(), space) == []


def test_the_calibration_state_of_one_search_is_used_by_the_next(store: Store, tmp_path: Path) -> None:
    slower = predictor_of(scaled(COSTS, (1.5, 0.8, 1, 1, 1, 1, 1, 1)))
    launcher, first = SimulatedLauncher(slower), CalibratedPredictor(PREDICTOR)
    runner = runner_of(tmp_path, launcher, predictor=PREDICTOR)
    for plan in SPACE.starts[::3]:
        outcome = runner.run(plan).outcome
        assert isinstance(outcome, Completed)
        first.observe(plan, outcome.measurement, SETTINGS.warmup_steps)
    keep(store, bigger(workload_of()), PLAN, wire.encode(first.state))
    second = CalibratedPredictor(PREDICTOR, inherited_calibration(store, workload_of()))
    truth = slower.epoch_seconds(PLAN)
    assert second.epoch_seconds(PLAN) == pytest.approx(truth, rel=0.03)
    assert PREDICTOR.epoch_seconds(PLAN) != pytest.approx(truth, rel=0.1)
    assert second.relative_error(PLAN) > first.relative_error(PLAN)


def test_a_calibration_state_of_another_kind_of_model_or_format_is_not_used(store: Store) -> None:
    assert inherited_calibration(store, workload_of()) is None
    keep(store, replace(workload_of(), model=replace(workload_of().model, dtype="bfloat16")), PLAN, "{}")
    assert inherited_calibration(store, workload_of()) is None
    keep(store, workload_of(), PLAN, '{"another": "form"}')
    assert inherited_calibration(store, workload_of()) is None

from dataclasses import replace
from itertools import pairwise

import pytest

from autotune.search.baselines import BaselinePlan, baselines, default_layout
from autotune.search.roles import Role
from autotune.search.solver.solver import Solver
from autotune.search.space.capacities import omnibal_capacities
from tests.values.search import LANGUAGE_LAYERS, VISION_LAYERS, limits_of, predictor_of, solver_of, workload_of
from trials.model.cut import check_layers
from trials.plan import Layout, Packed, Padded, Plan
from trials.workload import Workload

PREDICTOR = predictor_of()
AMPLE = 1 << 50


def baselines_of(workload: Workload, memory_limit_bytes: int = AMPLE) -> list[BaselinePlan]:
    limits = limits_of(memory_limit_bytes)
    return list(baselines(workload, PREDICTOR, Solver(PREDICTOR, limits), limits, hold_all=False))


def omnibal_of(workload: Workload, memory_limit_bytes: int = AMPLE) -> list[Plan]:
    return [each.plan for each in baselines_of(workload, memory_limit_bytes) if each.role == Role.OMNIBAL]


def ends_of(plan: Plan) -> tuple[int, ...]:
    counts = [stage.vision + stage.language for stage in plan.stages]
    return tuple(sum(counts[: number + 1]) for number in range(len(counts)))


@pytest.mark.parametrize(
    "devices", [6, *(pytest.param(devices, marks=pytest.mark.long) for devices in (1, 2, 3, 4, 8))]
)
def test_every_baseline_is_a_plan_of_the_model_on_all_devices(devices: int) -> None:
    found = baselines_of(workload_of(devices=devices))
    assert [each.role for each in found[:3]] == [Role.PACKED, Role.DEFAULT, Role.OMNIBAL]
    assert {each.role for each in found[3:]} <= {Role.OMNIBAL}
    for each in found:
        check_layers(each.plan, vision_layers=VISION_LAYERS, language_layers=LANGUAGE_LAYERS, dtype="float32")
        assert each.plan.layout.world_size == devices


@pytest.mark.parametrize(
    ("devices", "pipeline"), [(1, 1), (2, 2), (3, 3), (4, 4), (5, 1), (6, 3), (8, 4), (12, 4), (64, 4)]
)
def test_the_default_is_a_pipeline_of_up_to_four_stages(devices: int, pipeline: int) -> None:
    assert default_layout(workload_of(devices=devices)) == Layout(pipeline=pipeline, data=devices // pipeline, zero=0)


def test_the_default_pipeline_has_no_more_stages_than_the_model_has_layers() -> None:
    workload = workload_of(devices=4)
    small = replace(workload, model=replace(workload.model, vision_layers=2, language_layers=1))
    assert default_layout(small).pipeline == 2


def test_bfloat16_defaults_to_zero_1() -> None:
    assert default_layout(workload_of(devices=8, dtype="bfloat16")) == Layout(pipeline=4, data=2, zero=1)


@pytest.mark.parametrize(
    ("devices", "split"), [(1, [(5, 4)]), (2, [(5, 0), (0, 4)]), (4, [(3, 0), (2, 0), (0, 2), (0, 2)])]
)
def test_the_default_splits_uniformly_and_recomputes_everything_or_nothing(
    devices: int, split: list[tuple[int, int]]
) -> None:
    # Where no packs fit, nothing else tells what recomputing nothing gives.
    default, kept, *_ = baselines_of(workload_of(devices=devices), 1)
    for each in (default, kept):
        assert each.plan.packing == Padded(samples=4)
        assert [(stage.vision, stage.language) for stage in each.plan.stages] == split
    recomputed = [
        [(stage.recompute_vision, stage.recompute_language) for stage in each.plan.stages] for each in (default, kept)
    ]
    assert recomputed == [split, [(0, 0)] * len(split)]


@pytest.mark.parametrize("devices", [4, *(pytest.param(devices, marks=pytest.mark.long) for devices in (2, 8))])
def test_a_uniform_split_is_deepspeeds(devices: int) -> None:
    from deepspeed.runtime.utils import partition_uniform  # noqa: PLC0415 - seconds to import

    default = next(each.plan for each in baselines_of(workload_of(devices=devices)) if each.role == Role.DEFAULT)
    assert [0, *ends_of(default)] == partition_uniform(VISION_LAYERS + LANGUAGE_LAYERS, default.layout.pipeline)


@pytest.mark.parametrize("devices", [4, *(pytest.param(devices, marks=pytest.mark.long) for devices in (2, 8))])
def test_omnibal_starts_at_the_balanced_forward_split_and_continues_with_its_neighbours(devices: int) -> None:
    anchor, *neighbours = omnibal_of(workload_of(devices=devices))
    assert ends_of(anchor) == solver_of(1, PREDICTOR).forward_boundaries(anchor.packing, anchor.layout)
    moves = [tuple(new - old for old, new in zip(ends_of(anchor), ends_of(plan), strict=True)) for plan in neighbours]
    assert len(set(moves)) == len(moves) > 0
    assert all(abs(by) <= 1 for move in moves for by in move)
    distances = [sum(map(abs, move)) for move in moves]
    assert distances == sorted(distances)
    assert min(distances) == 1


def test_omnibal_moves_each_boundary_both_ways_unless_a_stage_would_be_empty() -> None:
    found = {ends_of(plan) for plan in omnibal_of(workload_of(devices=4))}
    anchor = ends_of(omnibal_of(workload_of(devices=4))[0])
    possible = {
        (a, b, c, 9)
        for a in range(anchor[0] - 1, anchor[0] + 2)
        for b in range(anchor[1] - 1, anchor[1] + 2)
        for c in range(anchor[2] - 1, anchor[2] + 2)
        if all(start < end for start, end in pairwise((0, a, b, c, 9)))
    }
    assert found == possible


@pytest.mark.parametrize("devices", [4, *(pytest.param(devices, marks=pytest.mark.long) for devices in (1, 2, 8))])
def test_omnibal_packs_by_its_own_capacities_within_the_global_batch(devices: int) -> None:
    workload = workload_of(devices=devices)
    (packing,) = {plan.packing for plan in omnibal_of(workload)}
    layout = default_layout(workload)
    candidates = omnibal_capacities(workload.data, 4, hold_all=False)
    deviations = {each: PREDICTOR.sizes(each, layout).epoch.batch_deviation for each in candidates}
    assert isinstance(packing, Packed)
    assert packing in candidates
    assert deviations[packing] <= 0.1 or min(deviations.values()) > 0.1


def test_omnibal_takes_the_most_even_of_its_packings() -> None:
    workload = workload_of(devices=2)
    layout = default_layout(workload)

    def unevenness(packing: Packed) -> float:
        sizes = PREDICTOR.sizes(packing, layout).table
        return float(sum(sizes[:, column].std() / sizes[:, column].mean() for column in (0, 1)))

    fitting = [
        packing
        for packing in omnibal_capacities(workload.data, 4, hold_all=False)
        if PREDICTOR.sizes(packing, layout).epoch.batch_deviation <= 0.1
    ]
    assert len(fitting) > 1
    assert omnibal_of(workload)[0].packing == min(fitting, key=unevenness)


def test_omnibal_recomputes_just_what_the_memory_asks() -> None:
    workload = workload_of(devices=2)
    packing = omnibal_of(workload)[0].packing
    least = solver_of(1, PREDICTOR).least_bytes(packing, default_layout(workload))
    limit = round(1.3 * least)
    plans = omnibal_of(workload, limit)
    assert any(stage.recompute_vision + stage.recompute_language for plan in plans for stage in plan.stages)
    for plan in plans:
        assert plan == solver_of(limit, PREDICTOR).fit(packing, plan.layout, ends_of(plan))
        assert max(PREDICTOR.predict(plan).stage_bytes) <= limit


def test_omnibal_has_no_plan_where_no_recompute_fits() -> None:
    assert [each.role for each in baselines_of(workload_of(), 1)] == [Role.DEFAULT, Role.DEFAULT_NO_RECOMPUTE]

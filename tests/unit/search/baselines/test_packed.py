"""Packs of one length without a pipeline, as trainings have them whose people care for speed."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from autotune.prediction.predictor import Predictor
from autotune.search.packed import fastest_packed
from autotune.search.solver.solver import Solver
from tests.unit.search.space.test_sharded_layouts import AMPLE, predictor
from tests.values.search import BATCH, INDEX, LANGUAGE_LAYERS, VISION_LAYERS, limits_of, predictor_of, workload_of
from trials.plan import Packed, Plan, ZeroStage
from trials.stage import Stage

PREDICTOR = predictor_of()
KEPT = Stage(vision=VISION_LAYERS, language=LANGUAGE_LAYERS)
OF_VISION = replace(KEPT, recompute_vision=VISION_LAYERS)
RECOMPUTED = replace(OF_VISION, recompute_language=LANGUAGE_LAYERS)


def packed(
    memory: int = AMPLE,
    devices: int = 2,
    dtype: str = "float32",
    costs: Predictor = PREDICTOR,
    *,
    hold_all: bool = True,
) -> Plan | None:
    limits = limits_of(memory)
    plans = fastest_packed(workload_of(memory, devices, dtype), Solver(costs, limits), limits, hold_all=hold_all)
    return plans[0] if plans else None


@pytest.mark.parametrize("devices", [4, *(pytest.param(devices, marks=pytest.mark.long) for devices in (1, 2, 8))])
def test_with_ample_memory_it_has_one_stage_all_devices_in_data_parallelism_and_recomputes_nothing(
    devices: int,
) -> None:
    plan = packed(devices=devices)
    assert plan is not None
    assert (plan.layout.pipeline, plan.layout.data, plan.layout.zero) == (1, devices, 0)
    assert plan.stages == (KEPT,)
    assert PREDICTOR.sizes(plan.packing, plan.layout).epoch.batch_deviation <= 0.1


def test_its_packs_are_filled_by_length_alone_and_hold_the_longest_sample() -> None:
    plan = packed()
    assert plan is not None
    packing = plan.packing
    assert isinstance(packing, Packed)
    assert packing.packer == "best-fit"
    assert packing.qv >= INDEX.vision_units.sum()
    assert (packing.qv_min, packing.qt_min) == (packing.qv, packing.qt)
    assert packing.qt >= INDEX.text_tokens.max()


def test_its_length_is_the_fastest_of_those_that_give_each_rank_one_two_and_four_packs() -> None:
    plan = packed()
    assert plan is not None
    assert isinstance(plan.packing, Packed)
    mean = INDEX.text_tokens.mean()
    lengths = [16 * int(np.ceil(BATCH * mean / 2 / packs / 16)) for packs in (1, 2, 4)]
    others = [replace(plan, packing=replace(plan.packing, qt=qt, qt_min=qt)) for qt in lengths]
    seconds = [PREDICTOR.epoch_seconds(each) for each in others]
    assert len({round(each, 6) for each in seconds}) == 3
    assert PREDICTOR.epoch_seconds(plan) == min(seconds)


def test_with_less_memory_it_is_the_fastest_that_fits_of_all_lengths_and_switches_and_with_too_little_none() -> None:
    ample = packed()
    assert ample is not None
    assert isinstance(ample.packing, Packed)
    solver, mean = Solver(PREDICTOR, limits_of(AMPLE)), INDEX.text_tokens.mean()
    lengths = {16 * int(np.ceil(max(BATCH * mean / 2 / packs, INDEX.text_tokens.max()) / 16)) for packs in (1, 2, 4, 8)}
    plans = [
        replace(ample, packing=replace(ample.packing, qt=qt, qt_min=qt), stages=(stage,))
        for qt in lengths
        for stage in (KEPT, OF_VISION, RECOMPUTED)
    ]
    kept = [plan for plan in plans if solver.keeps_batch(plan.packing, plan.layout)]
    needed, chosen = solver.fullest(ample)[0], set()
    for share in np.linspace(0.1, 1.1, 30).tolist():
        limits = limits_of(round(share * needed))
        fitting = [plan for plan in kept if solver.fullest(plan)[0] <= limits.usable_bytes]
        found = packed(round(share * needed))
        assert (found is None) == (not fitting)
        if found is not None and found.layout.zero == 0:
            assert PREDICTOR.epoch_seconds(found) == min(map(PREDICTOR.epoch_seconds, fitting))
        chosen.add(found and found.stages)
    assert chosen == {None, (KEPT,), (OF_VISION,), (RECOMPUTED,)}


def test_its_zero_stage_is_the_least_that_the_dtype_allows_and_that_fits() -> None:
    costs = predictor(0.0)
    plain, half = packed(costs=costs, devices=4), packed(costs=costs, devices=4, dtype="bfloat16")
    assert plain is not None
    assert half is not None
    assert (plain.layout.zero, half.layout.zero) == (0, 1)
    most = Solver(costs, limits_of(AMPLE)).fullest(plain)[0]
    found = {memory: packed(memory, costs=costs, devices=4) for memory in np.linspace(1, most, 40).astype(int).tolist()}
    fitting = {memory: plan for memory, plan in found.items() if plan is not None}
    assert {plan.layout.zero for plan in fitting.values()} >= {1, 2, 3}
    for memory, plan in fitting.items():
        solver, limits = Solver(costs, limits_of(memory)), limits_of(memory)
        assert solver.fullest(plan)[0] <= limits.usable_bytes
        lower: Iterable[ZeroStage] = (zero for zero in (0, 1, 2) if zero < plan.layout.zero)
        for zero in lower:
            less = replace(plan, layout=replace(plan.layout, zero=zero))
            assert solver.fullest(less)[0] > limits.usable_bytes


def test_there_is_none_where_no_packs_keep_the_global_batch() -> None:
    assert packed(devices=64) is None

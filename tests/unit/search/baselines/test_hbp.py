"""HBP's recipe as a baseline."""

from dataclasses import replace

import numpy as np

from autotune.prediction.parts import Parts
from autotune.prediction.predictor import Predictor
from autotune.search.baselines import baselines
from autotune.search.hbp import hbp_plan
from autotune.search.roles import Role
from autotune.search.solver.solver import Solver
from tests.unit.prediction.test_shared_packs import sharing
from tests.unit.search.space.test_ladders import ALIKE, BATCH, COSTS, MIXED, SHORT_OF_ALL, TIGHT, workload
from tests.values.search import limits_of, predictor_of
from trials.data.index import DatasetIndex
from trials.plan import Levelled, Packed, Plan


def plan_of(memory: int, index: DatasetIndex = MIXED, devices: int = 4, costs: Predictor | None = None) -> Plan | None:
    predictor = costs or predictor_of(COSTS, index, BATCH)
    return hbp_plan(workload(index, memory, devices), predictor, Solver(predictor, limits_of(memory)))


def test_steps_have_one_level_and_levels_are_the_lengths_of_the_recipe() -> None:
    plan = plan_of(SHORT_OF_ALL)
    assert plan is not None
    packing, longest = plan.packing, int(MIXED.text_tokens.max())
    assert isinstance(packing, Levelled)
    assert packing.whole_steps
    best, *_, last = packing.levels
    assert last.qt == longest
    assert last.sequence > 1
    assert {level.packer for level in packing.levels} == {"isf"}
    lengths = {longest >> halvings for halvings in range(5)}
    assert best.qt in {length // degree for length in lengths for degree in (1, 2, 4)}
    assert (plan.layout.pipeline, plan.layout.data) == (1, 4)


def test_the_longest_length_has_the_degree_with_the_least_time() -> None:
    predictor = predictor_of(COSTS, MIXED, BATCH)
    plan = plan_of(SHORT_OF_ALL)
    assert plan is not None
    assert isinstance(plan.packing, Levelled)
    longest, solver = plan.packing.levels[-1], Solver(predictor, limits_of(SHORT_OF_ALL))
    seconds = {}
    for degree in (1, 2, 4):
        packing = replace(longest, sequence=degree)
        fewest = solver.fit_fewest(packing, plan.layout, plan.boundaries)
        if fewest is not None:
            sizes, (parts,) = predictor.sizes(packing, plan.layout), Parts.of_levels(fewest)
            passes = predictor.times.pass_seconds(parts, plan.layout, sizes.mean)
            exchanges = predictor.times.exchange_seconds(parts, plan.layout, sizes.mean, np.array([degree]))
            seconds[degree] = float(sum(side.sum() for side in (*passes, *exchanges))) / sizes.mean[0, 1]
    assert 1 not in seconds
    assert longest.sequence == min(seconds, key=lambda degree: seconds[degree])


def test_dear_exchanges_make_the_recipe_share_less() -> None:
    cheap, dear = (plan_of(SHORT_OF_ALL, costs=predictor_of(sharing(seconds), MIXED, BATCH)) for seconds in (1e-7, 1.0))
    assert cheap is not None
    assert dear is not None
    assert max(dear.packing.degrees) <= max(cheap.packing.degrees)
    assert max(dear.packing.degrees) == 2


def test_it_recomputes_the_fewest_layers_that_fit() -> None:
    plan = plan_of(TIGHT)
    assert plan is not None
    predictor = predictor_of(COSTS, MIXED, BATCH)
    assert plan == Solver(predictor, limits_of(TIGHT)).fit_fewest(plan.packing, plan.layout, plan.boundaries)
    assert max(predictor.predict(plan).stage_bytes) <= TIGHT


def test_where_all_samples_are_alike_the_recipe_has_usual_packs_or_levels_of_them() -> None:
    plan = plan_of(1 << 50, ALIKE)
    assert plan is None or isinstance(plan.packing, Levelled | Packed)
    assert plan is None or plan.packing.degrees != (1,)


def test_it_is_a_baseline_where_levels_may_help() -> None:
    predictor, limits = predictor_of(COSTS, MIXED, BATCH), limits_of(TIGHT)
    solver, work = Solver(predictor, limits), workload(MIXED, TIGHT, 4)
    for levels in (False, True):
        found = [each.role for each in baselines(work, predictor, solver, limits, hold_all=False, levels=levels)]
        assert found.count(Role.HBP) == levels

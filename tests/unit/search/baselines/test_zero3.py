"""The usual settings of ZeRO 3 as a baseline."""

from autotune.prediction.predictor import Predictor
from autotune.search.baselines import baselines, zero3_plan
from autotune.search.roles import Role
from autotune.search.solver.solver import Solver
from tests.unit.search.space.test_sharded_layouts import AMPLE, heavy, predictor
from tests.values.search import BATCH, LANGUAGE_LAYERS, VISION_LAYERS, limits_of, predictor_of, workload_of
from trials.plan import Layout, Padded, Plan
from trials.stage import Stage

ALL_RECOMPUTED = Stage(
    vision=VISION_LAYERS,
    language=LANGUAGE_LAYERS,
    recompute_vision=VISION_LAYERS,
    recompute_language=LANGUAGE_LAYERS,
)


def usual_of_zero3(memory: int, devices: int = 4, named: tuple[str, ...] = (), seconds: float = 0.0) -> Plan | None:
    limits = limits_of(memory)
    return zero3_plan(workload_of(memory, devices), Solver(predictor(seconds), limits), limits, named)


def test_the_baseline_has_the_largest_micro_batch_that_fits() -> None:
    solver = Solver(predictor(0.0), limits_of(AMPLE))
    plans = [
        Plan(packing=Padded(samples=samples), layout=Layout(pipeline=1, data=4, zero=3), stages=(ALL_RECOMPUTED,))
        for samples in (1, 2, 4)
    ]
    needed = [solver.fullest(plan)[0] for plan in plans]
    assert needed == sorted(needed)
    assert BATCH == 4 * 4
    for number, plan in enumerate(plans):
        between = needed[number] / 0.97 + 1000
        assert usual_of_zero3(round(between), named=("p1-d4-z3",)) == plan
        assert usual_of_zero3(round(between)) == plan  # ZeRO 1 does not fit with so many samples
    assert usual_of_zero3(round(needed[0] / 0.97) - 1000, named=("p1-d4-z3",)) is None


def test_the_baseline_runs_where_zero_1_lacks_the_memory_or_where_its_layout_is_named() -> None:
    assert usual_of_zero3(AMPLE) is None
    found = usual_of_zero3(AMPLE, named=("p2-d2-z1", "p1-d4-z3"))
    assert found is not None
    assert found.packing == Padded(samples=4)
    assert found.stages == (ALL_RECOMPUTED,)
    assert usual_of_zero3(AMPLE, devices=1, named=("p1-d1-z3",)) is None


def test_the_baseline_is_the_last_one_and_needs_a_profile_that_knows_it() -> None:
    plan = usual_of_zero3(AMPLE, named=("p1-d4-z3",))
    assert plan is not None
    memory = round(Solver(predictor(0.0), limits_of(AMPLE)).fullest(plan)[0] / 0.96)
    limits = limits_of(memory)

    def roles(of_costs: Predictor) -> list[Role]:
        solver = Solver(of_costs, limits)
        return [each.role for each in baselines(workload_of(memory, 4), of_costs, solver, limits, hold_all=False)]

    assert roles(predictor(0.0))[-1] == Role.ZERO3
    assert Role.ZERO3 not in roles(predictor_of(heavy()))

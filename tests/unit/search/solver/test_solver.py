from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.prediction.comparison import MOST_STEPS
from autotune.prediction.memory import StageMemory
from autotune.prediction.parts import LANGUAGE, VISION, Parts
from autotune.prediction.predictor import Predictor
from autotune.prediction.sizes import EpochSizes
from autotune.search.solver.limits import Limits
from autotune.search.solver.problem import Problem
from autotune.search.solver.rungs import rungs_of
from autotune.search.solver.solver import Solver
from autotune.search.solver.splits import WantedSplits
from benchmarks.references.splits import Program
from tests.values.data import index_of
from tests.values.parameters import examples
from tests.values.search import (
    INDEX,
    epoch_of,
    frozen_vision,
    limits_of,
    predictor_of,
    random_rows,
    solver_of,
)
from tests.values.solver import problems
from trials.arrays import Floats, Ints
from trials.data.epoch import Epoch
from trials.errors import InvalidPlan
from trials.model.cut import cut
from trials.plan import Layout, Packed, Packing, Padded, Plan
from trials.stage import TOWERS, Recomputed, Stage, Tower

HEADROOM = 0.97
Ends = tuple[int, ...]


def splits(layers: int, stages: int) -> list[Ends]:
    """Ends of the stages of every split."""
    return [(*inner, layers) for inner in combinations(range(1, layers), stages - 1)]


def stage_of(limits: Limits, start: int, end: int) -> Stage:
    vision = min(end, limits.vision_layers) - min(start, limits.vision_layers)
    return Stage(vision=vision, language=end - start - vision)


class BruteForce:
    """Tries every split, with every pair of rungs of the layers of every stage."""

    def __init__(self, predictor: Predictor, limits: Limits, packing: Packing, layout: Layout) -> None:
        self._predictor, self._limits, self._packing, self._layout = predictor, limits, packing, layout
        self._sizes = predictor.sizes(packing, layout)

    def plans(self) -> list[tuple[float, Plan]]:
        """Return (seconds of a step, plan) of all plans that fit and of which no stage could have fewer rungs."""
        found = []
        for ends in splits(self._limits.layers, self._layout.pipeline):
            found += [(self._seconds(chosen), self._plan(chosen)) for chosen in product(*self._options(ends))]
        return sorted(found, key=lambda entry: entry[0])

    def _options(self, ends: Ends) -> Iterator[list[tuple[float, Stage]]]:
        """(seconds on the mean pack, stage), for each stage."""
        bare = tuple(stage_of(self._limits, start, end) for start, end in pairwise((0, *ends)))
        parts = Parts.of(cut(Plan(packing=self._packing, layout=self._layout, stages=bare)))
        for number, stage in enumerate(bare):
            options = [
                stage.recomputing([Recomputed(**of_vision, **of_language)])
                for of_vision, of_language in product(
                    self._rungs("vision", stage.vision), self._rungs("language", stage.language)
                )
            ]
            seconds, needed = self._judged(parts[number : number + 1], number, options)
            fitting = [option for option, of_option in zip(options, needed, strict=True) if of_option]
            times = dict(zip(options, seconds, strict=True))
            yield [(times[o], o) for o in fitting if not any(_is_less(other, o) for other in fitting)]

    def _rungs(self, tower: Tower, layers: int) -> Iterator[dict[str, int]]:
        """Counts of whole and selective layers."""
        two = Problem(self._predictor, self._limits, self._packing, self._layout).rungs[TOWERS.index(tower)] > 1
        if two:
            yield from ({tower: 0, f"selective_{tower}": selective} for selective in range(layers))
        for whole in range(layers + 1):
            yield {tower: whole, f"selective_{tower}": two * (layers - whole)}

    def _judged(self, part: Parts, number: int, options: list[Stage]) -> tuple[list[float], list[bool]]:
        recomputed, selective = np.zeros((2, len(options), part.layers.shape[1]))
        for tower, kind in zip(TOWERS, (VISION, LANGUAGE), strict=True):
            recomputed[:, kind] = [option.recomputed[0].whole(tower) for option in options]
            selective[:, kind] = [option.recomputed[0].selective(tower) for option in options]
        layers = np.repeat(part.layers, len(options), axis=0)
        parts = Parts.of_layers(layers, recomputed, selective)
        seconds = mean_seconds(self._predictor, parts, self._layout, self._sizes.mean)
        needed = self._predictor.memory.expected(parts, self._layout, number, self._sizes)
        return seconds.tolist(), (needed <= self._limits.memory_limit_bytes * HEADROOM).tolist()

    def _seconds(self, chosen: tuple[tuple[float, Stage], ...]) -> float:
        times = [seconds for seconds, _ in chosen]
        return sum(times) + (self._sizes.epoch.micro_batches - 1) * max(times)

    def _plan(self, chosen: tuple[tuple[float, Stage], ...]) -> Plan:
        return Plan(packing=self._packing, layout=self._layout, stages=tuple(stage for _, stage in chosen))


def _is_less(one: Stage, other: Stage) -> bool:
    (less,), (more,) = one.recomputed, other.recomputed
    return one != other and all(rungs_of(less, tower, 2) <= rungs_of(more, tower, 2) for tower in TOWERS)


def mean_seconds(predictor: Predictor, parts: Parts, layout: Layout, mean: Floats) -> Floats:
    """Return the seconds of the mean pack on each stage."""
    forward, backward = predictor.times.pass_seconds(parts, layout, mean)
    seconds: Floats = (predictor.times.load_seconds(parts, mean) + forward + backward)[0]
    return seconds


def closed_form(predictor: Predictor, plan: Plan) -> float:
    sizes = predictor.sizes(plan.packing, plan.layout)
    times = mean_seconds(predictor, Parts.of(cut(plan)), plan.layout, sizes.mean)
    return float(times.sum() + (sizes.epoch.micro_batches - 1) * times.max())


@given(problems(), st.integers(1, 12), st.sampled_from([1.1, np.inf]))
@settings(max_examples=examples(60))
def test_the_best_plans_are_those_of_all_splits_with_the_best_of_all_recompute_counts(
    problem: tuple[Predictor, Limits, Packing, Layout], count: int, within: float
) -> None:
    predictor, limits, packing, layout = problem
    of_all = BruteForce(predictor, limits, packing, layout).plans()
    found = Solver(predictor, limits).solutions(packing, layout, WantedSplits(count=count, within=within))
    seconds = sorted(closed_form(predictor, plan) for plan in found)
    of_splits: dict[Ends, float] = {}
    for of_plan, plan in of_all:
        of_splits.setdefault(_ends(plan), of_plan)
    near = [of_split for of_split in of_splits.values() if of_split <= within * of_all[0][0] * (1 + 1e-9)]
    assert seconds == pytest.approx(near[:count])
    assert len(set(map(_ends, found))) == len(found)
    assert set(found) <= {plan for _, plan in of_all}


@given(problems())
@settings(max_examples=examples(25))
def test_a_given_split_is_filled_with_the_least_time_for_recomputation(
    problem: tuple[Predictor, Limits, Packing, Layout],
) -> None:
    predictor, limits, packing, layout = problem
    of_all = BruteForce(predictor, limits, packing, layout).plans()
    for ends in splits(limits.layers, layout.pipeline):
        found = Solver(predictor, limits).fit(packing, layout, ends)
        same = [seconds for seconds, plan in of_all if _ends(plan) == ends]
        assert (found is None) == (not same)
        if found is not None:
            assert closed_form(predictor, found) == pytest.approx(min(same))


def _ends(plan: Plan) -> Ends:
    counts = [stage.vision + stage.language for stage in plan.stages]
    return tuple(np.cumsum(counts).tolist())


@given(problems())
@settings(max_examples=examples(25))
def test_the_fewest_recomputed_layers_are_taken_vision_layers_first(
    problem: tuple[Predictor, Limits, Packing, Layout],
) -> None:
    predictor, limits, packing, layout = problem
    for ends in splits(limits.layers, layout.pipeline):
        bare = [stage_of(limits, start, end) for start, end in pairwise((0, *ends))]
        plans = [_recomputing(packing, layout, bare, count) for count in range(limits.layers + 1)]
        needed = [predictor.predict(plan).stage_bytes for plan in plans]
        fitting = [
            [
                plan.stages[number]
                for plan, of_plan in zip(plans, needed, strict=True)
                if of_plan[number] <= limits.usable_bytes
            ]
            for number in range(layout.pipeline)
        ]
        found = Solver(predictor, limits).fit_fewest(packing, layout, ends)
        assert (found is None) == (not all(fitting))
        assert found is None or found.stages == tuple(stages[0] for stages in fitting)


def _recomputing(packing: Packing, layout: Layout, bare: list[Stage], count: int) -> Plan:
    """Recompute this number of layers of every stage, or all that it has."""
    vision = [min(count, stage.vision) for stage in bare]
    language = [min(count - of_vision, stage.language) for of_vision, stage in zip(vision, bare, strict=True)]
    stages = (
        replace(stage, recompute_vision=of_vision, recompute_language=of_language)
        for stage, of_vision, of_language in zip(bare, vision, language, strict=True)
    )
    return Plan(packing=packing, layout=layout, stages=tuple(stages))


@given(problems())
@settings(max_examples=examples(15))
def test_the_least_bytes_are_those_of_the_leanest_split_with_everything_recomputed(
    problem: tuple[Predictor, Limits, Packing, Layout],
) -> None:
    predictor, limits, packing, layout = problem
    needed = []
    for ends in splits(limits.layers, layout.pipeline):
        bare = [stage_of(limits, start, end) for start, end in pairwise((0, *ends))]
        needed.append(max(predictor.predict(_recomputing(packing, layout, bare, limits.layers)).stage_bytes))
    assert Solver(predictor, limits).least_bytes(packing, layout) == pytest.approx(min(needed))


PACKED, PIPELINE = Packed(qv=12, qt=600, qv_min=12, qt_min=500), Layout(pipeline=2, data=1, zero=0)


def test_with_memory_to_spare_nothing_is_recomputed_and_without_nothing_fits() -> None:
    least = solver_of(1).least_bytes(PACKED, PIPELINE)
    assert solver_of(round(least * HEADROOM)).solve(PACKED, PIPELINE) is None
    tight, ample = solver_of(round(least * 1.05)).solve(PACKED, PIPELINE), solver_of(1 << 50).solve(PACKED, PIPELINE)
    assert tight is not None
    assert ample is not None
    recomputed = [
        [stage.recompute_vision + stage.recompute_language for stage in plan.stages] for plan in (tight, ample)
    ]
    assert sum(recomputed[0]) > 0
    assert recomputed[1] == [0, 0]


def test_few_stages_are_weighed_with_too_little_memory_and_with_enough() -> None:
    least = Solver(predictor_of(), limits_of(1, 40, 40)).least_bytes(PACKED, PIPELINE)
    weighed = {}
    for name, limit in (("too little", least * 0.9), ("enough", least * 1.02)):
        predictor = predictor_of()
        predictor.memory = counting = Counting(predictor.costs, 4, (1.0, 1.0))
        solver = Solver(predictor, limits_of(round(limit / HEADROOM), 40, 40))
        assert (solver.solve(PACKED, PIPELINE) is None) == (name == "too little")
        weighed[name] = counting.stages
    # 79 splits of 2 stages, with up to 40 x 40 recompute counts each.
    assert max(weighed.values()) < 6 * 2 * 79


class Counting(StageMemory):
    """Counts the stages whose memory is asked for."""

    stages = 0

    def expected(self, parts: Parts, layout: Layout, numbers: Ints | int, sizes: EpochSizes) -> Floats:
        self.stages += len(parts)
        return super().expected(parts, layout, numbers, sizes)


def test_the_solutions_are_ordered_by_the_time_of_the_real_packs() -> None:
    predictor = predictor_of()
    solver = solver_of(round(solver_of(1, predictor).least_bytes(PACKED, PIPELINE) * 3), predictor)
    found = solver.solutions(PACKED, PIPELINE, WantedSplits(count=8, within=np.inf))
    simulated = [predictor.predict(plan).epoch_seconds for plan in found]
    closed = [closed_form(predictor, plan) for plan in found]
    assert len(found) == 8
    assert simulated == sorted(simulated)
    assert closed != sorted(closed)


@given(problems())
@settings(max_examples=examples(60))
def test_the_plan_is_never_slower_on_the_whole_epoch_than_the_best_of_the_closed_form(
    problem: tuple[Predictor, Limits, Packing, Layout],
) -> None:
    predictor, limits, packing, layout = problem
    solver = Solver(predictor, limits)
    plan, best = solver.solve(packing, layout), closed_form_best(solver, packing, layout)
    assert (plan is None) == (best is None)
    if plan is not None and best is not None:
        epoch = predictor.sizes(packing, layout).epoch
        ours, theirs = (predictor.predict(found).step_seconds for found in (plan, best))
        # Of more steps, some are looked at: the mean of their differences is off by its standard error.
        sampling = 4 * np.std(ours - theirs) * epoch.steps / np.sqrt(MOST_STEPS) if epoch.steps > MOST_STEPS else 0.0
        assert ours.sum() <= theirs.sum() * (1 + 1e-9) + sampling


def closed_form_best(solver: Solver, packing: Packing, layout: Layout) -> Plan | None:
    return next(iter(solver.solutions(packing, layout, WantedSplits(count=1, within=1.0))), None)


def test_the_plan_is_the_fastest_on_real_packs_among_many_that_are_good_on_the_mean_pack() -> None:
    predictor = predictor_of(index=index_of(random_rows(90, seed=3)))
    solver = solver_of(1 << 50, predictor)
    layout = Layout(pipeline=3, data=2, zero=1)
    plan, best = solver.solve(PACKED, layout), closed_form_best(solver, PACKED, layout)
    assert plan is not None
    assert best is not None
    assert predictor.sizes(PACKED, layout).epoch.steps <= MOST_STEPS
    several = solver.solutions(PACKED, layout)
    seconds = [predictor.predict(found).epoch_seconds for found in several]
    assert predictor.predict(plan).epoch_seconds == min(seconds) < predictor.predict(best).epoch_seconds


@given(problems())
@settings(max_examples=examples(20))
def test_the_same_problem_has_the_same_solution(problem: tuple[Predictor, Limits, Packing, Layout]) -> None:
    predictor, limits, packing, layout = problem
    again = Solver(predictor.with_costs(predictor.costs), limits)
    assert again.solutions(packing, layout) == Solver(predictor, limits).solutions(packing, layout)


def test_the_forward_split_ignores_memory_and_the_backward_pass() -> None:
    predictor = predictor_of()
    packing, layout = Padded(samples=4), Layout(pipeline=3, data=1, zero=0)
    limits = limits_of(1)
    mean = predictor.sizes(packing, layout).mean

    def slowest(ends: Ends) -> float:
        stages = tuple(stage_of(limits, start, end) for start, end in pairwise((0, *ends)))
        plan = Plan(packing=packing, layout=layout, stages=stages)
        return float(predictor.times.pass_seconds(Parts.of(cut(plan)), layout, mean)[0].max())

    found = Solver(predictor, limits).forward_boundaries(packing, layout)
    assert slowest(found) == pytest.approx(min(map(slowest, splits(limits.layers, 3))))


def test_one_stage_more_than_layers_is_refused() -> None:
    layout = Layout(pipeline=10, data=1, zero=0)
    with pytest.raises(
        InvalidPlan, match="10 stages need a layer each but the model has 9; use a pipeline of at most 9"
    ):
        solver_of(1 << 50).solve(PACKED, layout)


def test_a_step_without_micro_batches_is_refused() -> None:
    def empty(packing: Packing, data: int) -> Epoch:
        return replace(epoch_of(INDEX)(packing, data), micro_batches=0)

    predictor = predictor_of()
    with pytest.raises(InvalidPlan, match="a step needs at least 1 micro-batch, not 0"):
        Solver(Predictor(predictor.costs, empty, 4), limits_of(1 << 50)).solve(PACKED, PIPELINE)


@pytest.mark.parametrize(
    ("vision", "language", "stages", "room"),
    [
        *(pytest.param(*each, marks=pytest.mark.long) for each in ((5, 5, 3, 1.02), (5, 5, 4, 1.1), (3, 7, 4, 1.02))),
        *(pytest.param(*each, marks=pytest.mark.long) for each in ((4, 8, 4, 1.5), (8, 6, 3, 1.05))),
        (6, 4, 3, 1.3),
        (5, 5, 2, 0.9),
    ],
)
def test_an_independent_integer_program_finds_the_same_optimum(
    vision: int, language: int, stages: int, room: float
) -> None:
    predictor, layout = predictor_of(), Layout(pipeline=stages, data=2, zero=1)
    least = Solver(predictor, limits_of(1, vision, language)).least_bytes(PACKED, layout)
    limits = limits_of(round(least / HEADROOM * room), vision, language)
    program = Program(predictor.costs, predictor.sizes(PACKED, layout), layout, (vision, language), limits.usable_bytes)
    optimum = program.solve(element_bytes=4, time_limit=20)
    found = closed_form_best(Solver(predictor, limits), PACKED, layout)
    assert (found is None) == (optimum is None) == (room < 1)
    if found is not None:
        assert optimum is not None
        assert optimum.proven
        assert closed_form(predictor, found) == pytest.approx(optimum.seconds, rel=1e-6)
        theirs = Plan(packing=PACKED, layout=layout, stages=optimum.stages)
        assert closed_form(predictor, theirs) == pytest.approx(optimum.seconds, rel=1e-6)
        assert max(predictor.predict(theirs).stage_bytes) <= limits.usable_bytes * (1 + 1e-6)


def test_a_frozen_vision_tower_moves_language_layers_to_its_stage_and_is_never_recomputed() -> None:
    whole, frozen = (solver_of(1 << 40, predictor) for predictor in (predictor_of(), predictor_of(frozen_vision())))
    usual, found = (solver.solve(PACKED, PIPELINE) for solver in (whole, frozen))
    assert usual is not None
    assert found is not None
    assert found.boundaries[0] > usual.boundaries[0]
    tight = solver_of(round(frozen.least_bytes(PACKED, PIPELINE) / HEADROOM) + 1, predictor_of(frozen_vision()))
    leanest = tight.solve(PACKED, PIPELINE)
    assert leanest is not None
    assert [stage.recompute_vision for stage in leanest.stages] == [0, 0]
    assert any(stage.recompute_language for stage in leanest.stages)

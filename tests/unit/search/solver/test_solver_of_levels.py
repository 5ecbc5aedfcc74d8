"""The solver's plans with levels of packs and with packs that ranks share, compared with all plans."""

from dataclasses import replace
from functools import cache
from itertools import pairwise, product

import numpy as np
import pytest

from autotune.prediction.columns import TARGETS
from autotune.prediction.parts import Parts
from autotune.prediction.predictor import Predictor
from autotune.search.solver.limits import Limits
from autotune.search.solver.solver import Solver
from autotune.search.solver.splits import WantedSplits
from tests.unit.prediction.test_levels_memory import PLAIN, live_bytes
from tests.unit.prediction.test_predictor import PACKED
from tests.unit.prediction.test_shared_packs import levelled
from tests.unit.prediction.test_tied_ends import with_head
from tests.unit.search.solver.test_solver import HEADROOM, Ends, splits, stage_of
from tests.values.data import index_of
from tests.values.search import limits_of, predictor_of, random_rows
from trials.arrays import Floats, Ints
from trials.costs.coefficients import KINDS
from trials.engine.static_memory import static_bytes
from trials.model.cut import Cut, cut
from trials.plan import Layout, Packed, Packing, Plan
from trials.stage import Recomputed, Stage

LAYERS = 2, 2
SHARED: Packing = replace(PACKED, sequence=2)


def packing_of(*degrees: int) -> Packing:
    if len(degrees) == 1:
        return replace(PACKED, sequence=degrees[0])
    return levelled("5+4", degrees=(degrees[0], degrees[1]), data=4, further=((0, 0),)).packing


def problem(number: int) -> tuple[Predictor, Limits, Packing, Layout]:
    """Return a random problem with levels."""
    random = np.random.default_rng([number, 7])
    degrees = ((1, 1), (1, 2), (2, 4))[number % 3]
    pipeline = int(random.integers(1, 4))
    layout = Layout(pipeline=pipeline, data=4, zero=(0, 1)[random.integers(2)])
    costs = replace(
        PLAIN,
        layers=tuple(
            (
                kind,
                replace(
                    cost,
                    parameters=int(random.choice([1000, 50_000])),
                    kept_bytes=tuple((np.array(cost.kept_bytes) * random.uniform(1, 4)).tolist()),
                    recompute_seconds=tuple((np.array(cost.recompute_seconds) * random.uniform(0.2, 3)).tolist()),
                ),
            )
            for kind, cost in PLAIN.layers
        ),
    )
    layers = int(random.integers(1, 4)), int(random.integers(1, 4))
    if pipeline > sum(layers):
        layers = 2, 2
    predictor = predictor_of(costs, index_of(random_rows(16, seed=number)), batch=int(random.choice([8, 16])))
    packing = packing_of(*degrees)
    least = Solver(predictor, limits_of(1, *layers)).least_bytes(packing, layout)
    return predictor, limits_of(round(least * random.uniform(0.75, 2.0)), *layers), packing, layout


class BruteForce:
    """Tries every split, and at each stage and level every pair of recompute counts."""

    def __init__(self, predictor: Predictor, limits: Limits, packing: Packing, layout: Layout) -> None:
        self._predictor, self._limits, self._packing, self._layout = predictor, limits, packing, layout
        self._sizes = predictor.sizes(packing, layout)

    def least_seconds(self) -> float:
        """Return the time of a step of the mean row under the fastest plan; infinite if none fits."""
        return min(map(self._seconds, splits(self._limits.layers, self._layout.pipeline)))

    def step_seconds(self, plan: Plan) -> float:
        return self._step(
            [
                sum(
                    self._level_seconds(plan.stages, number, level, again)
                    for level, again in enumerate(stage.recomputed)
                )
                for number, stage in enumerate(plan.stages)
            ]
        )

    def _seconds(self, ends: Ends) -> float:
        stages = tuple(stage_of(self._limits, start, end) for start, end in pairwise((0, *ends)))
        return self._step([self._stage_seconds(stages, number) for number in range(len(stages))])

    def _step(self, times: list[float]) -> float:
        others = self._sizes.epoch.micro_batches - 1
        return sum(times) + (others * max(times) if others else 0.0)

    def _stage_seconds(self, stages: tuple[Stage, ...], number: int) -> float:
        """The least seconds of the mean row on a stage, of all counts at every level with which its packs fit."""
        whole, levels = stages[number], range(len(self._packing.degrees))
        pairs = product(range(whole.vision + 1), range(whole.language + 1))
        counts = [Recomputed(vision=vision, language=language) for vision, language in pairs]
        bare = self._part(stages, number, counts[0])
        held = (int(bare.embeds), len(bare.vision), int(bare.projects), len(bare.language), int(bare.heads))
        parameters = sum(n * self._predictor.costs[kind].parameters for kind, n in zip(KINDS, held, strict=True))
        usable = self._limits.memory_limit_bytes * HEADROOM - static_bytes(parameters, 4, self._layout)
        bytes_of = {
            (level, again): self._pack_bytes(self._part(stages, number, again), level)
            for level in levels
            for again in counts
        }
        seconds = {
            (level, again): self._level_seconds(stages, number, level, again) for level in levels for again in counts
        }
        windows = self._windows(number)
        least = np.inf
        for mixture in product(counts, repeat=len(levels)):
            takes = sum(seconds[each] for each in enumerate(mixture))
            if takes < least:
                running, waiting = np.sum([bytes_of[each] for each in enumerate(mixture)], axis=0)
                most = (running[windows[:, 0]] + waiting[windows[:, 1:]].sum(axis=1)).max()
                least = takes if most <= usable * (1 + 1e-12) else least
        return least

    def _windows(self, number: int) -> Ints:
        """Each pack of each step of each rank, and those behind it that are in flight on a stage, -1 for none."""
        epoch, found = self._sizes.epoch, []
        for step in range(epoch.steps):
            for packs in epoch.rows(step).T.tolist():
                in_flight = min(self._layout.pipeline - number, epoch.micro_batches)
                filled = [*packs, *[-1] * in_flight]
                found += [filled[first : first + in_flight] for first in range(len(packs))]
        return np.array(found)

    def _pack_bytes(self, part: Cut, level: int) -> Floats:
        """(most bytes in the backward pass, bytes before it) of each pack of a level; 0 for the others and for none."""
        degree, found = self._packing.degrees[level], np.zeros((2, len(self._sizes.levels) + 1))
        for pack in np.flatnonzero(self._sizes.levels == level).tolist():
            described = (self._sizes.table[pack], 0, degree)
            alone = live_bytes(self._predictor.costs, part, [described])
            found[:, pack] = alone, live_bytes(self._predictor.costs, part, [described, described]) - alone
        return found

    def _part(self, stages: tuple[Stage, ...], number: int, again: Recomputed) -> Cut:
        changed = replace(
            stages[number], recompute_vision=again.vision, recompute_language=again.language, further_levels=()
        )
        bare = tuple(replace(stage, further_levels=()) for stage in stages)
        packing = Packed(qv=1, qt=1, qv_min=0, qt_min=0)
        plan = Plan(packing=packing, layout=self._layout, stages=(*bare[:number], changed, *bare[number + 1 :]))
        return cut(plan)[number]

    @cache  # noqa: B019
    def _level_seconds(self, stages: tuple[Stage, ...], number: int, level: int, again: Recomputed) -> float:
        sizes, of_level = self._sizes, self._sizes.levels == level
        if not of_level.any():
            return 0.0
        parts = Parts.of([self._part(stages, number, again)])
        mean = sizes.table[of_level].mean(axis=0, keepdims=True)
        loaded = sizes.whole[of_level].mean(axis=0, keepdims=True)
        degrees = np.array([self._packing.degrees[level]])
        exchanges = self._predictor.times.exchange_seconds(parts, self._layout, mean, degrees)
        passes = self._predictor.times.pass_seconds(parts, self._layout, mean), exchanges
        seconds = float(np.sum(passes) + self._predictor.times.load_seconds(parts, loaded).sum())
        return seconds * float(sizes.degrees[of_level].sum() / sizes.degrees.sum())


def check(number: int) -> bool:
    """Compare the solver with the brute force, and return whether a plan fits."""
    predictor, limits, packing, layout = problem(number)
    solver, every = Solver(predictor, limits), BruteForce(predictor, limits, packing, layout)
    found, least = solver.solutions(packing, layout, WantedSplits(count=1, within=1.0)), every.least_seconds()
    assert bool(found) == np.isfinite(least)
    for plan in found:
        assert every.step_seconds(plan) == pytest.approx(least)
        assert solver.fit(packing, layout, plan.boundaries) == plan
        (memory,) = predictor.plans_memory((plan,))
        assert max(stage.expected for stage in memory) <= limits.usable_bytes * (1 + 1e-9)
    return bool(found)


@pytest.mark.parametrize(
    ("first", "count"), [(0, 8), *(pytest.param(first, 30, marks=pytest.mark.long) for first in range(0, 300, 30))]
)
def test_the_best_plan_has_the_least_recomputation_of_all_that_fit(first: int, count: int) -> None:
    fits = [check(number) for number in range(first, first + count)]
    assert count / 2 < sum(fits) < count


@pytest.mark.parametrize("number", [60, *(pytest.param(number, marks=pytest.mark.long) for number in (87, 290))])
def test_a_level_without_packs_is_solved_too(number: int) -> None:
    predictor, _, packing, layout = problem(number)
    assert len(np.unique(predictor.sizes(packing, layout).levels)) < len(packing.degrees)
    check(number)


def test_a_level_of_longer_packs_recomputes_more() -> None:
    predictor, packing = predictor_of(PLAIN), packing_of(1, 1)
    layout = Layout(pipeline=1, data=2, zero=0)
    least = Solver(predictor, limits_of(1)).least_bytes(packing, layout)
    plan = Solver(predictor, limits_of(round(1.3 * least))).solve(packing, layout)
    assert plan is not None
    short, long = plan.stages[0].recomputed
    assert (short.vision, short.language) < (long.vision, long.language)
    fewest = Solver(predictor, limits_of(round(1.3 * least))).fit_fewest(packing, layout, plan.boundaries)
    assert fewest is not None
    assert len(fewest.stages[0].recomputed) == 2


def test_shared_packs_need_less_recomputation() -> None:
    predictor, layout = predictor_of(PLAIN), Layout(pipeline=1, data=2, zero=0)
    least = Solver(predictor, limits_of(1)).least_bytes(PACKED, layout)
    alone, shared = (Solver(predictor, limits_of(round(1.2 * least))).solve(each, layout) for each in (PACKED, SHARED))
    assert alone is not None
    assert shared is not None
    counts = [plan.stages[0].recompute_vision + plan.stages[0].recompute_language for plan in (shared, alone)]
    assert counts[0] < counts[1]


@pytest.mark.parametrize("pipeline", [2, pytest.param(3, marks=pytest.mark.long)])
def test_long_packs_that_are_recomputed_leave_room_for_short_ones_that_are_kept(pipeline: int) -> None:
    """Each level alone fits with counts with which a step that mixes them takes up to 23 % more than there is."""
    light = replace(PLAIN, layers=tuple((kind, replace(cost, parameters=1000)) for kind, cost in PLAIN.layers))
    predictor, packing = predictor_of(light, batch=64), packing_of(1, 1)
    layout = Layout(pipeline=pipeline, data=2, zero=0)
    least = Solver(predictor, limits_of(1)).least_bytes(packing, layout)
    several = [limits_of(round(least * share / 10)) for share in range(12, 42)]
    solved = [(limits, Solver(predictor, limits).solve(packing, layout)) for limits in several]
    found = [(limits, plan) for limits, plan in solved if plan is not None]
    assert len(found) > 25
    for limits, plan in found:
        assert max(stage.expected for stage in predictor.plans_memory((plan,))[0]) <= limits.usable_bytes


def test_packs_of_levels_hold_one_chunk_of_logits_as_those_of_one_do() -> None:
    packing, layout = packing_of(1, 2), Layout(pipeline=1, data=4, zero=0)
    chunked = replace(PLAIN["head"], kept_bytes=(0.0, 4e5, 0.0, 0.0), chunk_targets=10, further_share=0.01)
    predictor = predictor_of(with_head(PLAIN, chunked), index_of(random_rows(16, seed=1)), batch=8)
    assert predictor.sizes(packing, layout).table[:, TARGETS].max() > 20 * 10
    ample = Solver(predictor, limits_of(1 << 40, *LAYERS)).solve(packing, layout)
    assert ample is not None
    need = max(stage.expected for stage in predictor.plans_memory((ample,))[0])
    assert Solver(predictor, limits_of(round(1.01 * need / HEADROOM), *LAYERS)).solve(packing, layout) == ample


def test_levels_that_no_split_fits_have_no_plan() -> None:
    packing, layout = packing_of(1, 2), Layout(pipeline=2, data=4, zero=1)
    predictor = predictor_of(PLAIN, index_of(random_rows(40)), 8)
    least = Solver(predictor, limits_of(1, 20, 20)).fullest(
        Solver(predictor, limits_of(1, 20, 20)).leanest(packing, layout)
    )[0]
    assert Solver(predictor, limits_of(round(0.8 * least), 20, 20)).solve(packing, layout) is None

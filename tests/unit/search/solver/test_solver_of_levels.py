"""The solver's plans with levels of packs and with packs that ranks share, compared with all plans."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.prediction.costs import Array
from autotune.prediction.parts import Parts
from autotune.prediction.predictor import Predictor
from autotune.prediction.sizes import EpochSizes
from autotune.search.solver.limits import Limits
from autotune.search.solver.problem import SHARES
from autotune.search.solver.solver import Solver
from autotune.search.solver.splits import Wanted
from tests.unit.prediction.test_levels_memory import PLAIN, live_bytes
from tests.unit.prediction.test_predictor import PACKED
from tests.unit.prediction.test_shared_packs import levelled
from tests.unit.search.solver.test_solver import HEADROOM, Ends, splits, stage_of
from tests.values.data import index_of
from tests.values.search import epoch_of, limits_of, predictor_of, random_rows
from trials.engine.static_memory import static_bytes
from trials.layer_costs import KINDS
from trials.model.cut import Cut, cut
from trials.plan import Layout, Packed, Packing, Plan, Recomputed, Stage

LAYERS = 2, 2
SHARED: Packing = replace(PACKED, sequence=2)


def packing_of(*degrees: int) -> Packing:
    if len(degrees) == 1:
        return replace(PACKED, sequence=degrees[0])
    return levelled("5+4", degrees=(degrees[0], degrees[1]), data=4, further=((0, 0),)).packing


@st.composite
def problems(draw: st.DrawFn) -> tuple[Predictor, Limits, Packing, Layout]:
    packing = packing_of(*draw(st.sampled_from([(2,), (1, 1), (1, 2), (2, 4)])))
    # Neighbours in a step of one level are known: what is then in flight is tested with packs of one rank.
    stages = draw(st.integers(1, 2)) if len(packing.degrees) > 1 else 1
    layout = Layout(pipeline=stages, data=4, zero=draw(st.sampled_from([0, 1])))
    predictor = predictor_of(PLAIN, index_of(random_rows(40)), batch=draw(st.sampled_from([8, 32])))
    least = Solver(predictor, limits_of(1, *LAYERS)).least_bytes(packing, layout)
    return predictor, limits_of(round(least * draw(st.floats(0.9, 2.5))), *LAYERS), packing, layout


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
        levels = range(len(self._packing.degrees))
        return self._step(
            [
                min(
                    sum(min(self._options(stages, number, level, share), default=np.inf) for level in levels)
                    for share in (SHARES if len(levels) > 1 else (None,))
                )
                for number in range(len(stages))
            ]
        )

    def _step(self, times: list[float]) -> float:
        others = self._sizes.epoch.micro_batches - 1
        return sum(times) + (others * max(times) if others else 0.0)

    def _options(self, stages: tuple[Stage, ...], number: int, level: int, share: float | None) -> Iterator[float]:
        """Seconds of the level's rows with each pair of counts with which it fits.

        With a share, the packs of other levels may keep that share of the memory of each pack in flight.
        """
        whole = stages[number]
        for vision, language in product(range(whole.vision + 1), range(whole.language + 1)):
            again = Recomputed(vision=vision, language=language)
            usable, behind, running, kept = self._needed(stages, number, level, again)
            most = kept if share is None else share * usable / (behind + 1)
            if running + behind * most <= usable and (kept <= most or not behind):
                yield self._level_seconds(stages, number, level, again)

    @cache  # noqa: B019 (it lives as long as one example)
    def _needed(
        self, stages: tuple[Stage, ...], number: int, level: int, again: Recomputed
    ) -> tuple[float, int, float, float]:
        """Return (usable bytes, packs behind the first, most bytes of the first, of each of the others)."""
        part = self._part(stages, number, again)
        degree = self._packing.degrees[level]
        packs = [(size, 0, degree) for size in np.unique(self._sizes.table[self._sizes.levels == level], axis=0)]
        in_flight = min(self._layout.pipeline - number, self._sizes.epoch.micro_batches)
        alone = [live_bytes(PLAIN, part, [pack]) for pack in packs]
        behind = [live_bytes(PLAIN, part, [pack, pack]) - one for pack, one in zip(packs, alone, strict=True)]
        counts = (int(part.embeds), len(part.vision), int(part.projects), len(part.language), int(part.heads))
        parameters = sum(count * PLAIN[kind].parameters for kind, count in zip(KINDS, counts, strict=True))
        usable = self._limits.memory_limit_bytes * HEADROOM - static_bytes(parameters, 4, self._layout)
        return usable, in_flight - 1, max(alone), max(behind)

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
        parts = Parts.of([self._part(stages, number, again)])
        mean = sizes.table[of_level].mean(axis=0, keepdims=True)
        loaded = sizes.whole[of_level].mean(axis=0, keepdims=True)
        degrees = np.array([self._packing.degrees[level]])
        exchanges = self._predictor.exchange_seconds(parts, self._layout, mean, degrees)
        passes = self._predictor.pass_seconds(parts, self._layout, mean), exchanges
        seconds = float(np.sum(passes) + self._predictor.load_seconds(parts, loaded).sum())
        return seconds * float(sizes.degrees[of_level].sum() / sizes.degrees.sum())


@given(problems())
@settings(max_examples=8)
def test_the_best_plan_has_the_least_recomputation_of_all_at_each_level(
    problem: tuple[Predictor, Limits, Packing, Layout],
) -> None:
    predictor, limits, packing, layout = problem
    solver, every = Solver(predictor, limits), BruteForce(*problem)
    found = solver.solutions(packing, layout, Wanted(count=1, within=1.0))
    least = every.least_seconds()
    assert bool(found) == np.isfinite(least)
    for plan in found:
        assert every.step_seconds(plan) == pytest.approx(least)
        assert solver.fit(packing, layout, plan.boundaries) == plan
        # Any mixture of the levels' packs fits.
        (memory,) = predictor.plans_memory((plan,))
        assert max(stage.expected for stage in memory) <= limits.usable_bytes * (1 + 1e-9)


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


@pytest.mark.parametrize("pipeline", [2, 3])
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


class Counting(Predictor):
    """Counts the parts of the chain whose heaviest packs are asked for."""

    parts = 0

    def heaviest_bytes(self, parts: Parts, layout: Layout, sizes: EpochSizes) -> tuple[Array, Array]:
        self.parts += len(parts)
        return super().heaviest_bytes(parts, layout, sizes)


def test_levels_that_no_split_fits_are_not_searched() -> None:
    packing, layout = packing_of(1, 2), Layout(pipeline=2, data=4, zero=1)
    predictor = Counting(PLAIN, epoch_of(index_of(random_rows(40)), 8), 4)
    least = Solver(predictor, limits_of(1, 20, 20)).least_bytes(packing, layout)
    predictor.parts = 0
    assert Solver(predictor, limits_of(round(0.9 * least), 20, 20)).solve(packing, layout) is None
    # Four pairs of recompute counts for each end of the two stages, each level and each alternative.
    assert predictor.parts <= 4 * (40 + 39) * 2 * len(SHARES)

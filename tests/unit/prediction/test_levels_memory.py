"""The peak bytes of plans with levels, compared with a walk through every pack of every step."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.prediction.chosen_steps import ChosenSteps
from autotune.prediction.parts import Parts
from autotune.prediction.predictor import Predictor
from tests.unit.prediction.test_shared_packs import LEVELS, levelled, sharing
from tests.values.memory import stored_bytes
from tests.values.parameters import examples
from tests.values.search import COSTS, predictor_of
from tests.values.solver import selecting
from trials.arrays import Floats
from trials.costs.coefficients import KINDS, NOTHING, LayerKind
from trials.costs.layer import LayerCost
from trials.costs.layer_costs import LayerCosts
from trials.engine.static_memory import static_bytes
from trials.model.cut import Cut, cut
from trials.plan import Plan

PROFILED = sharing()
PLAIN = replace(
    PROFILED,
    exchanges=tuple(
        replace(each, shared_bytes=NOTHING, transient_bytes=NOTHING) if each.kept_bytes else each
        for each in PROFILED.exchanges
    ),
)
"""Without bytes that are not of single layers."""
SELECTIVE = selecting(PLAIN, [(0.5, 0.6, 0.4)] * len(KINDS))


def live_bytes(costs: LayerCosts, part: Cut, packs: list[tuple[Floats, int, int]]) -> float:
    """Return the peak in the backward pass of the first pack while the others wait; packs are (size, level, degree)."""

    def layers(level: int, degree: int) -> list[tuple[LayerKind, Floats, Floats | None]]:
        exchange = costs.exchange("sequence", degree, "language") if degree > 1 else None

        def cost_of(kind: LayerKind) -> LayerCost:
            cost = costs[kind]
            if exchange is None or kind != "language":
                return cost
            held = exchange.held(cost)
            # The ranks divide what layers keep selectively as they divide the rest.
            shares = [
                part / whole if whole else 0.0 for part, whole in zip(held.kept_bytes, cost.kept_bytes, strict=True)
            ]
            return replace(held, selective_bytes=tuple(np.multiply(cost.selective_bytes, shares).tolist()))

        return stored_bytes(cost_of, part, level)

    def kept(pack: tuple[Floats, int, int], upto: int | None = None) -> float:
        size, level, degree = pack
        return sum(float(size @ stored) for _, stored, _ in layers(level, degree)[:upto])

    size, level, degree = packs[0]
    most = kept(packs[0])
    for number, (*_, again) in enumerate(layers(level, degree)):
        if again is not None:
            most = max(most, kept(packs[0], number) + float(size @ again))
    return most + sum(map(kept, packs[1:]))


def brute_force(costs: LayerCosts, predictor: Predictor, plan: Plan, number: int) -> float:
    sizes, part = predictor.sizes(plan.packing, plan.layout), cut(plan)[number]
    most = 0.0
    for step in range(sizes.epoch.steps):
        for packs in sizes.epoch.rows(step).T:
            in_flight = min(plan.layout.pipeline - number, len(packs))
            described = [(sizes.table[pack], int(sizes.levels[pack]), int(sizes.degrees[pack])) for pack in packs]
            for first in range(len(packs)):
                most = max(most, live_bytes(costs, part, described[first : first + in_flight]))
    counts = (int(part.embeds), len(part.vision), int(part.projects), len(part.language), int(part.heads))
    parameters = sum(count * costs[kind].parameters for kind, count in zip(KINDS, counts, strict=True))
    return static_bytes(parameters, 4, plan.layout) + most


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans with two levels, of 5 vision and 4 language layers."""
    ends = [*sorted(draw(st.sets(st.integers(1, 8), max_size=2))), 9]
    stages, further = [], []
    for start, end in zip([0, *ends], ends, strict=False):
        vision, language = min(end, 5) - min(start, 5), max(end, 5) - max(start, 5)
        counts = [(draw(st.integers(0, vision)), draw(st.integers(0, language))) for _ in range(2)]
        selective = draw(st.integers(0, vision - counts[0][0])), draw(st.integers(0, language - counts[0][1]))
        stages.append(f"{vision}+{language}r{counts[0][0]},{counts[0][1]}s{selective[0]},{selective[1]}")
        further.append(counts[1])
    return levelled(
        *stages, degrees=draw(st.sampled_from([(1, 1), (1, 2), (2, 4), (4, 4)])), data=4, further=tuple(further)
    )


@given(plans())
@settings(max_examples=examples(25))
def test_peaks_of_plans_with_levels_are_exact_and_the_same_everywhere(plan: Plan) -> None:
    predictor = predictor_of(SELECTIVE)
    (memory,) = predictor.plans_memory((plan,))
    for number, (stage, parts) in enumerate(zip(memory, predictor.peak_parts(plan), strict=True)):
        assert stage.expected == pytest.approx(brute_force(SELECTIVE, predictor, plan, number))
        assert parts.total == pytest.approx(stage.expected)
    prediction = predictor.predict(plan)
    assert prediction.stage_memory == memory
    assert predictor.plans_bytes((plan,)) == [prediction.stage_bytes]


@given(plans())
@settings(max_examples=examples(25))
def test_the_parts_of_peaks_with_levels_sum_to_them(plan: Plan) -> None:
    predictor = predictor_of(PROFILED)
    for stage, parts in zip(predictor.plans_memory((plan,))[0], predictor.peak_parts(plan), strict=True):
        assert parts.total == pytest.approx(stage.expected)
        assert min(parts.static, parts.kept, parts.recomputed, parts.transient) >= 0


@given(plans())
@settings(max_examples=examples(25))
def test_the_heaviest_step_alone_needs_as_much_as_the_whole_epoch(plan: Plan) -> None:
    predictor = predictor_of(SELECTIVE)
    prediction = predictor.predict(plan)
    fullest = int(np.argmax(prediction.stage_bytes))
    alone = ChosenSteps(predictor.sizes(plan.packing, plan.layout), (prediction.heaviest_step,))
    needed = predictor.stage_memory(plan, alone)[fullest].expected
    assert needed == pytest.approx(prediction.stage_bytes[fullest], rel=1e-12)


def test_a_further_level_decides_where_it_needs_most() -> None:
    predictor = predictor_of(sharing(costs=COSTS))
    free = levelled("5+4r5,4", degrees=(1, 2), data=2, further=((0, 0),))
    needed = [predictor.plans_memory((plan,))[0][0].expected for plan in (LEVELS, free)]
    alone = predictor.plans_memory(
        (replace(free, stages=(replace(free.stages[0], further_levels=LEVELS.stages[0].further_levels),)),)
    )
    assert needed[1] > needed[0]
    assert needed[1] > alone[0][0].expected


def test_what_ranks_keep_of_a_shared_pack_is_what_was_profiled_for_their_degree() -> None:
    plan = levelled("5+4", degrees=(2, 4), data=4, further=((0, 0),))
    usual, more = (predictor_of(costs) for costs in (replace(COSTS), sharing()))
    sizes = more.sizes(plan.packing, plan.layout)
    stages = Parts.of_levels(plan)
    extra = more.memory.kept(stages, plan.layout, sizes) - usual.memory.kept(stages, plan.layout, sizes)
    # 100 bytes for each rank and token in each of four layers, and 8 bytes for each token once.
    assert extra[:, 0] == pytest.approx((400.0 * sizes.degrees + 8) * sizes.table[:, 1])
    assert np.unique(sizes.degrees).tolist() == [2, 4]

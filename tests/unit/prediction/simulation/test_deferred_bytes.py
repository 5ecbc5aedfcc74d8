"""The peak bytes of stages that defer weight gradients, compared with a walk through the layers of every pack."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.prediction.simulation.zero_bubble import waiting_from
from tests.unit.prediction.test_levels_memory import plans
from tests.values.memory import stored_bytes
from tests.values.parameters import examples
from tests.values.search import COSTS, by_size, predictor_of
from tests.values.solver import selecting
from tests.values.training import plan_of
from trials.arrays import Floats
from trials.costs.coefficients import KINDS, times
from trials.costs.layer_costs import LayerCosts
from trials.model.cut import Cut, cut
from trials.plan import Levelled, Packed, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PackBytes:
    """Bytes of a pack on a stage before, in and after its backward pass."""

    kept: float
    most: float
    deferred: float

    @classmethod
    def of(cls, costs: LayerCosts, part: Cut, size: Floats, level: int) -> "PackBytes":
        """Follow the backward pass through the layers; what has had it is free, but for deferred weight gradients."""
        layers = stored_bytes(costs.__getitem__, part, level)
        kept = behind = sum(float(size @ stored) for _, stored, _ in layers)
        most = deferred = 0.0
        for kind, stored, again in reversed(layers):
            behind -= float(size @ stored)
            own = float(size @ (stored if again is None else again))
            transient = float(size @ by_size(kind, costs[kind].transient_bytes))
            most = max(most, behind + own + transient + deferred)
            if part.most_deferred and again is None:
                deferred += float(size @ by_size(kind, costs[kind].weight_bytes))
        return cls(kept=kept, most=max(most, deferred), deferred=deferred)


def most_bytes(costs: LayerCosts, plan: Plan, number: int) -> float:
    sizes, part = predictor_of(costs).sizes(plan.packing, plan.layout), cut(plan)[number]
    most = 0.0
    for step in range(sizes.epoch.steps):
        for packs in sizes.epoch.rows(step).T:
            found = [PackBytes.of(costs, part, sizes.table[pack], int(sizes.levels[pack])) for pack in packs]
            first_deferred = waiting_from(len(packs), plan.layout.pipeline, number, part.most_deferred).tolist()
            for place, (pack, first) in enumerate(zip(found, first_deferred, strict=True)):
                behind = sum(each.kept for each in found[place + 1 : place + plan.layout.pipeline - number])
                before = sum(each.deferred for each in found[first:place])
                most = max(most, before + pack.most + behind)
    return most


@st.composite
def deferring_plans(draw: st.DrawFn) -> Plan:
    """Plans of several stages, which recompute layers or do not; the last one may defer fewer packs than it could."""
    plan = draw(plans().filter(lambda plan: plan.layout.pipeline > 1))
    assert isinstance(plan.packing, Levelled)
    alone = Levelled(levels=tuple(replace(level, sequence=1) for level in plan.packing.levels))
    fewer = draw(st.sampled_from([None, *range(1, plan.layout.pipeline - 1)]))
    return replace(
        plan,
        packing=alone,
        layout=replace(plan.layout, zero_bubble=True),
        stages=(*plan.stages[:-1], replace(plan.stages[-1], most_deferred=fewer)),
    )


shares = st.lists(
    st.tuples(st.floats(1, 3), st.sampled_from([0.0, 0.3, 1.0]), st.floats(0, 2)),
    min_size=len(KINDS),
    max_size=len(KINDS),
)
"""Of each kind: factor of the kept bytes, and transient bytes and those of weight gradients as shares of them."""


def drawn(shares: list[tuple[float, float, float]]) -> LayerCosts:
    layers = (
        (
            kind,
            replace(
                cost,
                kept_bytes=times(cost.kept_bytes, kept),
                transient_bytes=times(cost.kept_bytes, kept * transient),
                weight_bytes=times(cost.kept_bytes, kept * weights),
            ),
        )
        for (kind, cost), (kept, transient, weights) in zip(COSTS.layers, shares, strict=True)
    )
    return selecting(replace(COSTS, layers=tuple(layers)), [(0.5, 0.6, 0.4)] * len(KINDS))


@given(deferring_plans(), shares)
@settings(max_examples=examples(25))
def test_peaks_are_those_of_a_walk_through_all_packs_and_layers(
    plan: Plan, shares: list[tuple[float, float, float]]
) -> None:
    costs = drawn(shares)
    for number, stage in enumerate(predictor_of(costs).predict(plan).stage_memory):
        assert stage.expected - stage.static == pytest.approx(most_bytes(costs, plan, number))


def test_layers_that_are_recomputed_run_while_those_behind_them_have_deferred() -> None:
    plan = plan_of("5+0", "0+4r0,1", packing=Packed(qv=9, qt=480, qv_min=9, qt_min=416))
    plan = replace(plan, layout=replace(plan.layout, zero_bubble=True))
    costs = drawn([(1.0, 0.0, 0.9)] * len(KINDS))
    *_, last = predictor_of(costs).predict(plan).stage_memory
    assert last.expected - last.static == pytest.approx(most_bytes(costs, plan, 1))

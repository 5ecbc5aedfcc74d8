"""Layers that offload what they keep: the time that they wait for copies, and the bytes on the device and the host."""

from dataclasses import replace

import numpy as np
import pytest

from autotune.dimensions.folds import unprofiled
from autotune.prediction.costs_table import TypicalPack, costs_text
from autotune.prediction.features import COSTS as FACTORS
from autotune.prediction.features import scaled, step_features
from autotune.prediction.fit.costs import fit_costs
from autotune.prediction.memory import StageBytes
from autotune.prediction.parts import Parts
from tests.values.exchanges import copies, exchanging, named
from tests.values.reports import reports_of
from tests.values.search import COSTS, by_size, costs_of, layer_cost, predictor_of, workload_of
from tests.values.training import offloading, plan_of
from trials import wire
from trials.costs.layer_costs import LayerCosts
from trials.model.cut import cut
from trials.plan import Layout, Levelled, Offload, Packed, Plan
from trials.stage import Recomputed
from trials.tasks.answer import ExchangeTiming

PACKED = Packed(qv=9, qt=480, qv_min=9, qt_min=416)
OUT, BACK = 2e-9, 1e-9
KEPT = {"vision": 1000, "language": 600}
STATES = 100


def timed(costs: LayerCosts = COSTS, out: float = OUT, back: float = BACK) -> LayerCosts:
    return exchanging(costs, copies(out, back))


def offloaded(offload: Offload, *stages: str) -> Plan:
    return offloading(plan_of(*stages, packing=PACKED), offload)


def seconds_of(plan: Plan, costs: LayerCosts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the (forward, backward) seconds of the packs on the only stage, and the sizes of the packs."""
    predictor = predictor_of(costs)
    sizes = predictor.sizes(plan.packing, plan.layout)
    packs = predictor.times.pack_seconds(Parts.of(cut(plan)), plan.layout, sizes)
    return packs.forward[:, 0], packs.backward[:, 0], sizes.table


# --- time ---


def test_a_layer_waits_for_what_copies_take_longer_than_its_passes() -> None:
    forward, backward, table = seconds_of(offloaded("language", "5+4r0,3"), timed())
    forward_kept, backward_kept, _ = seconds_of(offloaded("language", "5+4"), timed())
    cost = COSTS["language"]
    kept, there, back = (
        table @ by_size("language", each) for each in (cost.kept_bytes, cost.forward_seconds, cost.backward_seconds)
    )
    waits = np.maximum(0, kept * OUT - there) + np.maximum(0, kept * BACK - back)
    assert (waits > 0).any()
    assert (kept * BACK < back).any()
    assert forward == pytest.approx(forward_kept)
    assert backward == pytest.approx(backward_kept + 3 * waits)


def test_a_fast_link_costs_nothing_and_a_kind_that_does_not_offload_is_recomputed() -> None:
    fast = timed(out=0.0, back=0.0)
    _, kept, table = seconds_of(offloaded("none", "5+4"), fast)
    assert seconds_of(offloaded("both", "5+4r5,4"), fast)[1] == pytest.approx(kept)
    again = table @ by_size("language", COSTS["language"].recompute_seconds)
    assert seconds_of(offloaded("vision", "5+4r5,4"), fast)[1] == pytest.approx(kept + 4 * again)


def test_trials_correct_the_time_of_copies_with_that_of_recomputation() -> None:
    slow, plan = timed(out=1e-6, back=1e-6), offloaded("both", "5+4r5,4")
    twice = scaled(slow, [2.0 if name == "recompute" else 1.0 for name in FACTORS])
    assert named(twice, "copy") == [copies(2e-6, 2e-6)]
    features = step_features(predictor_of(slow), plan, [0], [1.0] * len(FACTORS))
    assert dict(zip(FACTORS, features, strict=False))["recompute"] > 0
    assert sum(features[:-1]) == pytest.approx(features[-1])


def test_ranks_that_share_a_pack_repeat_no_exchange() -> None:
    predictor = predictor_of(timed())
    plan = offloaded("language", "5+4r0,4")
    layout, sizes = replace(plan.layout, data=2), np.array([[2.0, 100.0, 5000.0, 1.0]])
    exchanges = [
        predictor.times.exchange_seconds(Parts.of(cut(plan)), each, sizes, np.array([1]))[1]
        for each in (layout, replace(layout, offload="none"))
    ]
    assert np.array(exchanges) == pytest.approx(0)


# --- bytes ---


def flat(transient: int = 0) -> LayerCosts:
    """Costs of layers that keep the same bytes of each pack."""

    def cost(kept: int) -> object:
        return replace(
            layer_cost((0, 0, 0, 1.0), (0, 0, 0, kept), (0, 0, 0, STATES), parameters=0),
            transient_bytes=(0, 0, 0, transient),
        )

    return timed(costs_of(cost(0), cost(KEPT["vision"]), cost(0), cost(KEPT["language"]), cost(0)))  # type: ignore[arg-type]


def most_on_device(vision: int, language: int, offloaded: tuple[int, int]) -> int:
    """Return the peak of a pack's passes by following them.

    A layer's memory is free when the next offloaded layer has run, and as a backward pass comes to a layer, what the
    offloaded layer before it keeps is fetched.
    """
    layers = [("vision", place < offloaded[0]) for place in range(vision)]
    layers += [("language", place < offloaded[1]) for place in range(language)]
    here: dict[int, int] = {}
    peak = 0
    leaving: int | None = None
    for number, (kind, is_offloaded) in enumerate(layers):
        here[number] = KEPT[kind]
        if is_offloaded and number in (0, vision):
            here[-1 - number] = STATES  # the first input
        peak = max(peak, sum(here.values()))
        if is_offloaded:
            if leaving is not None:
                del here[leaving]
            leaving = number
    away = [number for number, (_, is_offloaded) in enumerate(layers) if is_offloaded]
    for number in reversed(range(len(layers))):
        if number in away:
            before = [each for each in away if each < number]
            for each in (number, *before[-1:]):
                here[each] = KEPT[layers[each][0]]
        peak = max(peak, sum(here.values()))
        del here[number]
        here.pop(-1 - number, None)
    return peak


@pytest.mark.parametrize("freed", [(0, 0), (1, 0), (0, 1), (5, 0), (0, 4), (3, 2), (5, 4)])
def test_the_peak_holds_two_layers_at_most_of_those_that_offload(freed: tuple[int, int]) -> None:
    plan = offloaded("both", f"5+4r{freed[0]},{freed[1]}")
    predictor = predictor_of(flat())
    expected = predictor.predict(plan).stage_memory[0].expected
    followed = most_on_device(5, 4, freed)
    assert followed <= expected <= followed + KEPT["vision"] + KEPT["language"]
    if not any(freed):
        assert expected == followed


def test_packs_in_flight_keep_the_first_input_of_layers_that_offload() -> None:
    predictor = predictor_of(flat())
    plan = offloaded("vision", "5+0r5,0", "0+2", "0+2")
    memory = predictor.predict(plan).stage_memory
    assert memory[0].expected == 2 * KEPT["vision"] + 3 * STATES
    assert predictor.memory.kept(Parts.of_levels(plan), plan.layout, predictor.sizes(PACKED, plan.layout))[
        :, 0
    ] == pytest.approx(STATES)
    recomputed = predictor.predict(replace(plan, layout=replace(plan.layout, offload="none"))).stage_memory
    assert recomputed[0].expected == 3 * 5 * STATES - STATES + KEPT["vision"]
    # Three packs are in flight on the first stage, and what each keeps of five layers is on the host; and that of a
    # fourth, as its host runs ahead.
    assert [stage.host for stage in memory] == [4 * 5 * KEPT["vision"], 0, 0]
    behind = predictor.predict(offloaded("vision", "2+0r2,0", "3+1r3,0", "0+3")).stage_memory
    assert [stage.host for stage in behind] == [4 * 2 * KEPT["vision"], 2 * 3 * KEPT["vision"], 0]
    assert [stage.host for stage in recomputed] == [0, 0, 0]


def test_each_level_offloads_its_own_layers_and_one_without_packs_nothing() -> None:
    large = replace(PACKED, qv=500, qt=100_000)
    plan = offloaded("both", "5+4r5,0")
    (stage,) = plan.stages
    for further, most in (((0, 4), 2 * 5 * KEPT["vision"]), ((0, 0), 2 * 5 * KEPT["vision"])):
        stages = (replace(stage, further_levels=(Recomputed(vision=further[0], language=further[1]),)),)
        levels = replace(plan, packing=Levelled(levels=(PACKED, large)), stages=stages)
        predictor = predictor_of(flat())
        assert not (predictor.sizes(levels.packing, levels.layout).levels == 1).any()
        assert predictor.predict(levels).stage_memory[0].host == most


def test_what_is_on_its_way_counts_as_transient() -> None:
    predictor = predictor_of(flat(transient=7))
    (parts,) = predictor.peak_parts(offloaded("both", "5+4r5,4"))
    assert (parts.kept, parts.recomputed, parts.transient) == (0, STATES, 2 * KEPT["vision"] + 7)


def test_an_interval_keeps_what_is_on_the_host() -> None:
    stage = StageBytes(static=1.0, low=2.0, expected=3.0, high=4.0, host=5.0)
    assert stage.keeping(2.0) == StageBytes(static=1.0, low=3.0, expected=5.0, high=7.0, host=5.0)


# --- profiles ---


def test_the_slowest_rank_decides_and_the_table_shows_it() -> None:
    reports = [
        replace(report, exchanges=(ExchangeTiming(name="copy", ranks=1, forward_seconds=out, backward_seconds=back),))
        for report, (out, back) in zip(reports_of(COSTS, 0.0, ranks=2), ((1e-10, 4e-10), (2e-10, 3e-10)), strict=True)
    ]
    costs = fit_costs(reports)
    (copy,) = costs.exchanges
    assert copy.seconds_per_byte == pytest.approx((2e-10, 4e-10))
    assert wire.decode(LayerCosts, wire.encode(costs)) == costs
    text = costs_text(costs, TypicalPack.of(workload_of().data))
    assert "copy       204.8 ns per KiB and back 409.6 ns per KiB, 1 rank" in text
    without = fit_costs(reports_of(COSTS, 0.0, ranks=2))
    assert without.exchange("copy") is None


def test_plans_are_predicted_where_copies_were_timed_and_layers_are_not_compiled() -> None:
    layout = Layout(pipeline=1, data=1, zero=1, offload="vision")
    assert unprofiled(timed(), layout) is None
    assert unprofiled(COSTS, replace(layout, offload="none")) is None
    for costs in (COSTS, replace(timed(), compile_seconds=30.0)):
        assert unprofiled(costs, layout) == "copies of what layers keep to the host's memory and back"

"""Costs of ZeRO 2 and 3 with one stage: what data ranks exchange and hold, and how they wait for each other."""

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.dimensions.folds import unprofiled
from autotune.errors import ProfileError
from autotune.prediction.costs_table import TypicalPack, costs_text
from autotune.prediction.features import COSTS as FACTORS
from autotune.prediction.features import scaled
from autotune.prediction.fit.costs import fit_costs
from autotune.prediction.parts import Parts
from autotune.prediction.predictor import Predictor
from autotune.prediction.timeline import timeline
from tests.values.data import index_of
from tests.values.exchanges import exchanging, named, of_weights, without
from tests.values.reports import reports_of
from tests.values.search import COSTS, costs_of, epoch_of, frozen_vision, layer_cost, predictor_of, workload_of
from tests.values.training import plan_of
from trials import wire
from trials.costs.coefficients import KINDS, NOTHING
from trials.costs.layer_costs import LayerCosts
from trials.model.cut import cut
from trials.plan import Layout, Packed, Padded, Plan, ZeroStage
from trials.tasks.answer import ExchangeTiming, ProfileReport

PACKED = Packed(qv=9, qt=480, qv_min=9, qt_min=416)
SECONDS = (0.001, 0.002, 0.003, 0.004, 0.005)
"""Of gathering a layer of each kind; with 5 + 4 layers 35 ms, 30 ms without the head."""
PARAMETERS = 12 * 50_000
"""Of five vision and four language layers, and one of each other kind."""


def sharded(costs: LayerCosts = COSTS, seconds: tuple[float, ...] = SECONDS, scatter: float = 5e-10) -> LayerCosts:
    return exchanging(costs, *of_weights(2, seconds, scatter))


def of_zero(zero: ZeroStage, recomputed: str = "") -> Plan:
    return plan_of(f"5+4{recomputed}", data=2, zero=zero, packing=PACKED)


def exchanges(plan: Plan, costs: LayerCosts) -> tuple[float, float]:
    """Return the seconds of (forward, backward), which are the same for all packs."""
    predictor = predictor_of(costs)
    seconds = predictor.times.pack_seconds(Parts.of(cut(plan)), plan.layout, predictor.sizes(plan.packing, plan.layout))
    for side in (seconds.exchange, seconds.exchange_back):
        assert side == pytest.approx(side[0, 0])
    return float(seconds.exchange[0, 0]), float(seconds.exchange_back[0, 0])


# --- time ---


def test_exchanges_are_a_part_of_the_passes_and_not_idle() -> None:
    plan = plan_of("5+4", data=2, zero=3, packing=Padded(samples=2))
    predictor = predictor_of(sharded(), index_of([(3, 200)] * 64))
    prediction = predictor.predict(plan)
    assert prediction.breakdown.totals["communication"] > 0.1 * prediction.epoch_seconds
    assert prediction.stage_idle == pytest.approx((0,))
    assert timeline(predictor, plan, prediction).waiting_shares == pytest.approx((0,))


@pytest.mark.parametrize("recomputed", ["", "r5,4"])
def test_zero_3_gathers_each_layer_twice_and_scatters_gradients_in_each_backward_pass(recomputed: str) -> None:
    forward, backward = exchanges(of_zero(3, recomputed), sharded())
    assert forward == pytest.approx(0.001 + 5 * 0.002 + 0.003 + 4 * 0.004 + 0.005)
    # The head and the layer before it stay; what a recomputation gathers serves the backward pass behind it.
    assert backward == pytest.approx(0.001 + 5 * 0.002 + 0.003 + 3 * 0.004 + PARAMETERS * 4 * 5e-10)


@pytest.mark.parametrize(("once", "again"), [(1, 0.026), (2, 0.022), (4, 0.014), (6, 0.010), (9, 0.004)])
def test_layers_whose_weights_stay_are_gathered_once(once: int, again: float) -> None:
    forward, backward = exchanges(of_zero(3, f"g{once}"), sharded())
    assert forward == pytest.approx(0.035)
    assert backward == pytest.approx(again + PARAMETERS * 4 * 5e-10)


@given(
    share=st.floats(-1, 1),
    once=st.integers(0, 9),
    passes=st.tuples(*[st.floats(1e-5, 1e-2)] * 2),
    gathers=st.tuples(*[st.floats(0, 1e-2)] * 5),
)
def test_layers_hide_what_is_gathered_and_scattered_beside_them(
    share: float, once: int, passes: tuple[float, float], gathers: tuple[float, ...]
) -> None:
    """Expected values come from a walk over the layers, each with the exchanges that run during its pass."""
    kinds = [0, *[1] * 5, 2, *[3] * 4, 4]
    layers = [number for number, kind in enumerate(kinds) if kind in (1, 3)]
    staying = {*layers[len(layers) - once :], len(kinds) - 2, len(kinds) - 1}
    again = [0.0 if number in staying else gathers[kind] for number, kind in enumerate(kinds)]
    hidden = 0.0
    for number in range(len(kinds)):
        exchanged = (again[number - 1] if number else 0.0) + (SCATTER if number < len(kinds) - 1 else 0.0)
        hidden += share * min(exchanged, passes[1])
    costs = hiding(sharded(with_passes(*passes), gathers), share)
    forward, backward = exchanges(of_zero(3, f"g{once}"), costs)
    hidden_forward = sum(share * min(gathers[kind], passes[0]) for kind in kinds[1:])
    assert forward == pytest.approx(sum(gathers[kind] for kind in kinds) - hidden_forward)
    assert backward == pytest.approx(sum(again) + len(kinds) * SCATTER - hidden)


def test_zero_2_scatters_all_gradients_in_each_backward_pass() -> None:
    assert exchanges(of_zero(2), sharded()) == pytest.approx((0.0, PARAMETERS * 4 * 5e-10))


def hiding(costs: LayerCosts, share: float) -> LayerCosts:
    """Return costs whose scatters, and gathers beside them, a computation of the same length hides by this share."""
    hidden = (replace(each, added_share=1 - share) if each.name == "scatter" else each for each in costs.exchanges)
    return replace(costs, exchanges=tuple(hidden))


def with_passes(forward: float, backward: float, again: float = 0.0) -> LayerCosts:
    """Return costs of which each layer has passes of these seconds, whatever the pack."""
    sides = {"forward_seconds": forward, "backward_seconds": backward, "recompute_seconds": again}
    constant = {name: (0.0, 0.0, 0.0, seconds) for name, seconds in sides.items()}
    return replace(COSTS, layers=tuple((kind, replace(cost, **constant)) for kind, cost in COSTS.layers))  # type: ignore[arg-type]


SCATTER = 50_000 * 4 * 5e-10
"""Seconds of scattering the gradients of a layer."""


def test_layers_hide_gathers_of_the_next_one_and_scatters_of_the_one_behind() -> None:
    forward, backward = exchanges(of_zero(3), hiding(sharded(with_passes(1.0, 1.0)), 1.0))
    assert forward == pytest.approx(SECONDS[0])  # the first weights come before anything runs
    assert backward == pytest.approx(SCATTER)  # the last gradients go when nothing runs any more


def test_a_pass_hides_no_more_than_its_share_of_the_shorter_of_both() -> None:
    costs = hiding(sharded(with_passes(0.0005, 0.001)), 0.8)
    forward, backward = exchanges(of_zero(3), costs)
    assert forward == pytest.approx(0.035 - 0.8 * 0.0005 * 11)
    # The head has nothing to gather; the vision embedding has no weights before it, and less to scatter.
    assert backward == pytest.approx(0.026 + 12 * SCATTER - 0.8 * (10 * 0.001 + SCATTER))
    _, recomputed = exchanges(of_zero(3, "r5,4"), hiding(sharded(with_passes(0.0005, 0.001, 0.0005)), 0.8))
    # Before the first vision layer there is less to gather, which it hides whole.
    assert recomputed == pytest.approx(backward - 0.8 * (8 * 0.0005 + SECONDS[0] + SCATTER - 0.001))


def test_zero_2_hides_scatters_alone() -> None:
    forward, backward = exchanges(of_zero(2), hiding(sharded(with_passes(1.0, 1.0)), 0.5))
    assert (forward, backward) == pytest.approx((0.0, 12 * SCATTER - 0.5 * 11 * SCATTER))


def test_zero_0_and_1_average_gradients_once_in_a_step() -> None:
    predictor, parts = predictor_of(sharded()), Parts.of(cut(of_zero(1)))
    assert exchanges(of_zero(1), sharded()) == (0.0, 0.0)
    sizes = predictor.sizes(PACKED, of_zero(1).layout)
    reductions = [
        predictor.times.update_parts(of_zero(zero).layout, parts, sizes).reduction[0] for zero in (0, 1, 2, 3)
    ]
    assert reductions == pytest.approx([PARAMETERS * 4 * 1e-9] * 2 + [0.0] * 2)


def test_layers_without_a_backward_pass_are_gathered_once() -> None:
    forward, backward = exchanges(of_zero(3), sharded(frozen_vision()))
    assert forward == pytest.approx(0.035)
    trained = PARAMETERS - 6 * 50_000
    assert backward == pytest.approx(0.003 + 3 * 0.004 + trained * 4 * 5e-10)


def test_all_data_ranks_begin_each_pass_together() -> None:
    free = sharded(seconds=(0.0,) * 5, scatter=0.0)
    predictor = predictor_of(without(free, "average"))
    parts, layout = Parts.of(cut(of_zero(3))), of_zero(3).layout
    sizes = predictor.sizes(PACKED, layout)
    seconds = predictor.times.pack_seconds(parts, layout, sizes)
    update = float(predictor.times.update_parts(layout, parts, sizes).seconds[0])
    step = int(np.argmax([len(sizes.epoch.rows(number)) for number in range(sizes.epoch.steps)]))
    rows = sizes.epoch.rows(step)
    forward, backward = seconds.loaded_forward[rows, 0], seconds.backward[rows, 0]
    assert len(rows) > 1
    by_pass = float(forward.max(axis=1).sum() + backward.max(axis=1).sum()) + update
    by_rank = float((forward + backward).sum(axis=0).max())
    of_zero_1 = float(predictor.times.update_parts(of_zero(1).layout, parts, sizes).seconds[0])
    for zero, expected in ((3, by_pass), (1, by_rank + of_zero_1)):
        plan = of_zero(zero)  # type: ignore[arg-type]
        assert predictor.predict(plan).step_seconds[step] == pytest.approx(expected)
        assert predictor.plans_epoch_seconds([plan])[0] == pytest.approx(predictor.predict(plan).epoch_seconds)
    assert by_pass > by_rank + update
    between = predictor.predict(of_zero(2)).step_seconds[step]
    assert by_rank < between <= by_pass


@pytest.mark.parametrize("zero", [2, 3])
def test_the_parts_of_a_step_and_its_timeline_have_the_exchanges(zero: ZeroStage) -> None:
    predictor, plan = predictor_of(sharded()), of_zero(zero, "r1,1")
    prediction = predictor.predict(plan)
    totals = prediction.breakdown.totals
    assert sum(totals.values()) == pytest.approx(prediction.epoch_seconds)
    passes = prediction.breakdown.seconds.size * predictor.sizes(PACKED, plan.layout).epoch.micro_batches
    assert totals["communication"] == pytest.approx(passes * sum(exchanges(plan, sharded())), rel=0.1)
    shown = timeline(predictor, plan, prediction)
    assert shown.seconds == pytest.approx(prediction.step_seconds[shown.step])


# --- bytes ---


def bytes_of(
    plan: Plan, counts: tuple[int, ...] = (0,) * 5, kept: tuple[int, ...] = (0,) * 5, frozen: int = 0, tied: int = 0
) -> tuple[float, float]:
    """Return the (static, expected) bytes where a layer of each kind has `counts` parameters and keeps `kept` bytes.

    The first `frozen` kinds do not train; `tied` parameters of the head are the word embedding's.
    """
    layers = [
        replace(
            layer_cost(NOTHING, (0, 0, 0, bytes_), NOTHING),
            parameters=count,
            frozen_parameters=count if number < frozen else 0,
            tied_parameters=tied if KINDS[number] == "head" else 0,
            backward_seconds=(0.0 if number < frozen else 1.0,) * 4,
        )
        for number, (count, bytes_) in enumerate(zip(counts, kept, strict=True))
    ]
    (stage,) = Predictor(sharded(costs_of(*layers)), epoch_of(), 4).predict(plan).stage_memory
    return stage.static, stage.expected


def beyond(zero: ZeroStage, counts: tuple[int, ...], kept: tuple[int, ...], frozen: int = 0, tied: int = 0) -> float:
    static, expected = bytes_of(of_zero(zero), counts, kept, frozen, tied)
    return expected - static


def test_zero_2_shards_gradients_and_states_and_zero_3_weights_too() -> None:
    static = [bytes_of(of_zero(zero), (50_000,) * 5)[0] for zero in (0, 1, 2, 3)]
    # float32 weights and gradients; two moments, or with ZeRO two moments and a copy of the weights.
    shares = (4 + 4 + 8, 4 + 4 + 12 / 2, 4 + 4 / 2 + 12 / 2, 4 / 2 + 4 / 2 + 12 / 2)
    assert static == [PARAMETERS * share for share in shares]


# At the end of the forward pass everything is kept: 5 x 1000 + 4 x 2000 + 300 bytes.
KEPT = (0, 1000, 0, 2000, 300)


@pytest.mark.parametrize(
    ("counts", "gradients", "weights"),
    [
        # The head, then the last language layer, to which the gradients of the head are on their way.
        ((10, 20, 10, 20, 500), max(13_300 + 4 * 500, 13_000 + 4 * 520), 4 * 520),
        ((10, 20, 10, 900, 100), 13_000 + 4 * (900 + 900), 4 * 1800),
        # The projector, before it a vision layer and behind it a language layer.
        ((10, 20, 5000, 20, 100), 5_000 + 4 * 5020, 4 * 5020),
        ((10, 5000, 10, 20, 100), 5_000 + 4 * 10_000, 4 * 10_000),
    ],
)
def test_weights_and_gradients_of_two_layers_are_whole_at_once(
    counts: tuple[int, ...], gradients: int, weights: int
) -> None:
    assert beyond(2, counts, KEPT) == pytest.approx(max(13_300, gradients), rel=0.05)
    assert beyond(3, counts, KEPT) == pytest.approx(max(13_300, gradients) + weights, rel=0.05)


def test_layers_without_a_backward_pass_have_no_whole_gradients() -> None:
    counts = (10, 5000, 5000, 20, 100)
    assert beyond(2, counts, KEPT, frozen=3) == 13_300 + 4 * 100
    # Weights of the projector are gathered beside the first language layer in a forward pass alone.
    assert beyond(3, counts, KEPT, frozen=3) == 13_300 + 4 * (100 + 120)


def test_gradients_of_a_tied_weight_stay_whole_from_the_head_on() -> None:
    counts = (0, 0, 700, 20, 710)
    untied, tied = (beyond(2, counts, KEPT, tied=tied) for tied in (0, 700))
    assert untied == 13_300 + 4 * 710
    assert tied == 13_300 + 4 * 710
    assert beyond(2, (0, 0, 700, 900, 710), KEPT, tied=700) == 13_000 + 4 * (900 + 900 + 700)


def test_a_recomputed_layer_and_its_weights_are_held_together() -> None:
    # All is recomputed: the last language layer runs again while the inputs are kept, which have no bytes here.
    static, expected = bytes_of(of_zero(3, "r5,4"), (10, 20, 10, 900, 100), kept=(0, 1000, 0, 2000, 300))
    assert expected - static == 2000 + 4 * (1800 + 1800)


def test_the_parts_of_the_peak_count_whole_weights_and_gradients_as_transient() -> None:
    predictor, plan = predictor_of(sharded()), of_zero(3)
    (parts,), (stage,) = predictor.peak_parts(plan), predictor.predict(plan).stage_memory
    assert parts.transient == 4 * (100_000 + 50_000)
    assert parts.total == pytest.approx(stage.expected)
    assert stage.low <= stage.expected <= stage.high


# --- profile ---


def gather_reports(latencies: tuple[float, ...]) -> list[ProfileReport]:
    """Reports of ranks that wait for so long, and gather for 1 ms times the number of the kind."""
    ranks = len(latencies)
    return [
        replace(
            report,
            exchanges=(
                *(
                    ExchangeTiming(name="gather", ranks=ranks, layer=kind, forward_seconds=latency + 1e-3 * number)
                    for number, kind in enumerate(KINDS)
                ),
                ExchangeTiming(name="scatter", ranks=ranks, backward_seconds=1e-9 * latency),
            ),
        )
        for report, latency in zip(reports_of(COSTS, 0.0, ranks=len(latencies)), latencies, strict=True)
    ]


def gathering(costs: LayerCosts) -> list[float]:
    """Return the seconds of gathering a layer of each kind."""
    return [each.forward_seconds[-1] for each in named(costs, "gather")]


def scattering(costs: LayerCosts) -> float:
    """Return the seconds of averaging a byte of gradients that ranks keep in shards."""
    (scatter,) = named(costs, "scatter")
    return scatter.seconds_per_byte[1]


def test_gathering_takes_what_the_last_rank_needs() -> None:
    costs = fit_costs(gather_reports((0.5, 0.2)))
    assert {each.ranks for each in costs.exchanges} == {2}
    assert gathering(costs) == pytest.approx([0.2, 0.201, 0.202, 0.203, 0.204])
    assert scattering(costs) == pytest.approx(2e-10)
    assert wire.decode(LayerCosts, wire.encode(costs)) == costs


def test_on_nodes_gathering_takes_what_the_rank_behind_the_slow_link_needs() -> None:
    """Four ranks, of which the first of each node receives by the link between nodes; the last to begin are on one."""
    reports = gather_reports((0.9, 0.5, 0.6, 0.2))
    apart, together = (fit_costs(reports, nodes) for nodes in (2, 1))
    assert gathering(apart) == pytest.approx([0.6, 0.601, 0.602, 0.603, 0.604])
    assert scattering(apart) == pytest.approx(6e-10)
    assert gathering(together)[0] == pytest.approx(0.2)
    for nodes, place in ((1, 0), (2, 1)):  # ranks report 5, 6, 7 and 8 ns; of the second places, the less is 6
        update = fit_costs(reports, nodes).updates[-1]
        assert update.seconds_per_parameter == pytest.approx((5 + place) * 1e-9)


def test_times_of_gathering_that_no_measurement_can_give_are_refused() -> None:
    first, second = gather_reports((0.5, 0.2))
    gather, *others, scatter = first.exchanges
    for wrong in (
        (replace(gather, forward_seconds=float("nan")), *others, scatter),
        (gather, *others, replace(scatter, backward_seconds=-1.0)),
    ):
        with pytest.raises(ProfileError, match="cannot be a measured value"):
            fit_costs([replace(first, exchanges=wrong), second])


def test_a_profile_that_timed_no_shares_knows_zero_0_and_1_alone() -> None:
    fitted = fit_costs(gather_reports((0.5, 0.2)))
    others = without(fitted, "gather", "scatter")
    layouts = [Layout(pipeline=1, data=2, zero=zero) for zero in get_args(ZeroStage)]
    assert [unprofiled(fitted, layout) is None for layout in layouts] == [True] * 4
    assert [unprofiled(others, layout) is None for layout in layouts] == [True, True, False, False]


def test_the_table_of_costs_shows_what_gathering_a_language_layer_takes() -> None:
    pack = TypicalPack.of(workload_of().data)
    assert "gather     8.000 ms per language layer, 2 ranks" in costs_text(sharded(), pack).splitlines()
    assert "gather" not in costs_text(COSTS, pack)


def test_a_calibration_scales_gathers_with_the_links() -> None:
    factors = [3.0 if name == "communication" else 1.0 for name in FACTORS]
    assert scaled(sharded(), factors).exchanges == tuple(each.times(3.0) for each in sharded().exchanges)

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.dimensions.averages import average_seconds
from autotune.errors import ProfileError
from autotune.prediction.columns import holding_all
from autotune.prediction.curves import Curves, fit_curve
from autotune.prediction.fit.costs import fit_costs
from autotune.prediction.fit.robust import fit_not_negative
from autotune.prediction.stage_times import link_times
from autotune.prediction.updates import update_seconds_per_parameter
from tests.values.parameters import examples, parameters
from tests.values.reports import SHAPES, UNITS, reports_of, sizes_of
from tests.values.search import COSTS, layer_costs
from trials import wire
from trials.costs.coefficients import KINDS, LayerKind, SlowCall
from trials.costs.layer import NOISE_LIMIT, LayerCost
from trials.costs.layer_costs import LayerCosts, LoadCost
from trials.errors import WireError
from trials.plan import Layout
from trials.tasks.answer import (
    LayerTiming,
    ProfileReport,
)

COEFFICIENTS = tuple(f.name for f in fields(LayerCost) if f.name.endswith(("_seconds", "_bytes")))


def seconds(costs: LayerCosts, kind: LayerKind, size: tuple[int, int, int]) -> float:
    columns = np.array((*size, 1.0))
    factor = float(Curves(costs).at(np.array([(*columns, size[1])]))[0, KINDS.index(kind)])
    return float(columns @ costs[kind].forward_seconds + columns @ costs[kind].backward_seconds) * factor


@given(layer_costs)
@settings(max_examples=examples(25))
def test_exact_timings_give_back_their_coefficients(costs: LayerCosts) -> None:
    fitted = fit_costs(reports_of(costs, noise=0.0))
    for kind in KINDS:
        for name in ("forward_seconds", "backward_seconds", "recompute_seconds"):
            planted, found = np.array(getattr(costs[kind], name)), np.array(getattr(fitted[kind], name))
            assert found == pytest.approx(planted, rel=1e-4, abs=planted.max() * 1e-6), (kind, name)
        for name in ("kept_bytes", "output_bytes"):
            assert getattr(fitted[kind], name) == pytest.approx(getattr(costs[kind], name), rel=1e-3, abs=5), (
                kind,
                name,
            )
    assert fitted.residual < 1e-6


def test_the_parameters_of_tied_ends_are_those_of_the_head() -> None:
    fitted = fit_costs([replace(report, tied_parameters=7) for report in reports_of(COSTS, noise=0.0)])
    assert [fitted[kind].tied_parameters for kind in KINDS] == [0, 0, 0, 0, 7]


@pytest.mark.parametrize("most", [0, 60, 100, 500, 5000])
def test_a_head_that_computes_the_logits_of_more_targets_again_has_bytes_of_both_ways(most: int) -> None:
    """Few are kept between its passes then, and the logits are transient."""

    def stepped(timing: LayerTiming) -> LayerTiming:
        if timing.layer != "head":
            return timing
        again = timing.tokens > most > 0
        kept, transient = (100, 8000) if again else (8100, 0)
        held = min(timing.tokens, most) if again else 0
        return replace(timing, kept_bytes=kept * timing.tokens, transient_bytes=transient * held + 50_000)

    reports = [replace(report, chunk_targets=most) for report in reports_of(COSTS, noise=0.0)]
    head = fit_costs([with_timings(report, stepped) for report in reports])["head"]
    assert head.bytes_error < 1e-6
    assert head.chunk_targets == (most if most in (60, 100, 500) else 0)
    for tokens in (64, 256, 1024):
        held = 100 * tokens + 8000 * (min(tokens, most) if most else tokens) + 50_000
        counted = holding_all(np.array(float(tokens)), head)
        assert head.kept_bytes[1] * counted + head.kept_bytes[3] == pytest.approx(held)
    assert not any(head.transient_bytes)


def test_a_head_whose_sizes_all_have_more_targets_than_a_chunk_holds_less_for_fewer() -> None:
    most = 40

    def stepped(timing: LayerTiming) -> LayerTiming:
        if timing.layer != "head":
            return timing
        return replace(timing, kept_bytes=100 * timing.tokens, transient_bytes=8000 * most)

    reports = [replace(report, chunk_targets=most) for report in reports_of(COSTS, noise=0.0)]
    head = fit_costs([with_timings(report, stepped) for report in reports])["head"]
    for tokens in (10, most, 256):
        counted = holding_all(np.array(float(tokens)), head)
        held = 100 * tokens + 8000 * min(tokens, most)
        assert head.kept_bytes[1] * counted + head.kept_bytes[3] == pytest.approx(held)


def test_noisy_timings_are_predicted_within_their_noise() -> None:
    fitted = fit_costs(reports_of(COSTS, noise=0.03, ranks=4))
    assert 0.005 < fitted.residual < 0.04
    for kind in KINDS:
        for size in sizes_of(kind):
            assert seconds(fitted, kind, size) == pytest.approx(seconds(COSTS, kind, size), rel=0.06), (kind, size)


@given(st.lists(st.floats(1e-6, 10), min_size=60, max_size=60))
@settings(max_examples=examples(40))
def test_no_coefficient_is_negative_whatever_was_measured(measured: list[float]) -> None:
    (report,) = reports_of(COSTS, noise=0.0, ranks=1)
    pairs = zip(measured[::2], measured[1::2], strict=True)
    timings = tuple(
        replace(timing, forward_seconds=forward, backward_seconds=backward)
        for timing, (forward, backward) in zip(report.timings, pairs, strict=True)
    )
    fitted = fit_costs([replace(report, timings=timings)])
    assert all(value >= 0 for kind in KINDS for name in COEFFICIENTS for value in getattr(fitted[kind], name))


def in_waves(kind: LayerKind, size: tuple[int, int, int]) -> float:
    """A factor for the time of a layer that computes in two whole waves."""
    units, tokens, _ = size
    share = units / UNITS[-1] if kind.startswith("vision") else tokens / 1024
    return float((np.ceil(2 * share) / (2 * share)) ** 0.2)


def test_times_that_are_not_linear_in_the_size_are_kept_as_a_curve() -> None:
    report, other = reports_of(COSTS, noise=0.0)

    def slow(timing: LayerTiming) -> LayerTiming:
        factor = in_waves(timing.layer, (timing.units, timing.tokens, timing.squares))
        return replace(
            timing, forward_seconds=timing.forward_seconds * factor, backward_seconds=timing.backward_seconds * factor
        )

    fitted = fit_costs([with_timings(report, slow), with_timings(other, slow)])
    for kind in ("vision", "language", "head"):
        for size in sizes_of(kind)[1:]:
            expected = seconds(COSTS, kind, size) * in_waves(kind, size)
            # Packs of as many tokens but other lengths share a factor.
            assert seconds(fitted, kind, size) == pytest.approx(expected, rel=0.06), (kind, size)


@pytest.mark.parametrize(("spread", "kept"), [(0.0, 1.0), (0.5, 0.0)])
def test_a_curve_is_drawn_towards_the_fit_by_the_noise_of_the_timings(spread: float, kept: float) -> None:
    sizes = np.array([(0, tokens, 0, 1) for tokens in (100, 200, 300, 400)], dtype=np.float64)
    ratios = np.exp(np.array((0.1, -0.1, 0.1, -0.1)))
    at, curve = fit_curve("language", sizes, ratios, [spread] * 4)
    assert at == (100, 200, 300, 400)
    assert np.log(curve) == pytest.approx(kept * np.log(ratios))


def test_a_size_that_one_of_the_ranks_or_all_of_them_timed_wrongly_leaves_no_trace_in_the_curve() -> None:
    sizes = np.array([(0, tokens, 0, 1) for tokens in (100, 100, 200, 200, 300, 300)], dtype=np.float64)
    at, curve = fit_curve("language", sizes, np.array((1.02, 20.0, 30.0, 30.0, 0.98, 0.98)), [0.0] * 6)
    assert at == (100, 300)
    assert curve == pytest.approx((1.02, 0.98))


def test_a_layer_that_keeps_nothing_costs_nothing() -> None:
    (report,) = reports_of(COSTS, noise=0.0, ranks=1)
    timings = tuple(replace(timing, kept_bytes=0) for timing in report.timings)
    fitted = fit_costs([replace(report, timings=timings)])
    assert {fitted[kind].kept_bytes for kind in KINDS} == {(0.0, 0.0, 0.0, 0.0)}


def test_the_slowest_rank_of_each_layout_counts() -> None:
    fitted = fit_costs(reports_of(COSTS, noise=0.0, ranks=4))
    layout = Layout(pipeline=2, data=2, zero=1)
    # Of the second rank: the others are on the last stage.
    assert link_times(fitted, layout, np.arange(2))[:, 0] == pytest.approx([2e-4, 2e-9])
    # The first rank to end waited for no other.
    assert average_seconds(fitted, layout) == pytest.approx(1e-10)
    assert fitted["language"].parameters == COSTS["language"].parameters


def test_a_layout_that_was_not_timed_has_the_links_of_the_longest_pipeline_and_the_reduction_of_all_ranks() -> None:
    fitted = fit_costs(reports_of(COSTS, noise=0.0, ranks=4))
    layout = Layout(pipeline=2, data=8, zero=1)
    longest = (fitted.link.latency_seconds, fitted.link.seconds_per_byte)
    assert fitted.communications[-1].link == fitted.link
    assert link_times(fitted, layout, np.arange(2))[:, 0].tolist() == [*longest]
    # Of 8 ranks each sends 7 eighths twice, of the 4 that were timed 3 quarters.
    assert average_seconds(fitted, layout) == pytest.approx(3e-10 * 7 / 6)
    # All ranks in data parallel have no links, but here is a second stage.
    assert link_times(fitted, replace(layout, data=4), np.arange(2))[:, 0].tolist() == [*longest]


@given(layer_costs)
@settings(max_examples=examples(25))
def test_costs_survive_their_json(costs: LayerCosts) -> None:
    assert wire.decode(LayerCosts, wire.encode(costs)) == costs


def test_loading_is_fitted_with_and_without_pixels() -> None:
    loading = fit_costs(reports_of(COSTS, noise=0.0, ranks=2)).loading
    assert loading.pixels_seconds == pytest.approx((2e-3, 3e-6, 0, 4e-4), rel=1e-3)
    assert loading.labels_seconds == pytest.approx((0, 3e-6, 0, 4e-4), rel=1e-3)


def test_an_update_takes_what_the_rank_needs_that_waits_least() -> None:
    fitted = fit_costs(reports_of(COSTS, noise=0.0, ranks=2))
    assert update_seconds_per_parameter(fitted, Layout(pipeline=2, data=1, zero=0)) == 2e-9
    assert update_seconds_per_parameter(fitted, Layout(pipeline=1, data=2, zero=1)) == 5e-9


def test_what_an_update_takes_beyond_the_optimizer_grows_with_the_reduction() -> None:
    fitted = fit_costs(reports_of(COSTS, noise=0.0, ranks=4))
    # 0.5 of 5 ns are the optimizer's; averaging over 2 ranks takes a third of the time over 4.
    assert update_seconds_per_parameter(fitted, Layout(pipeline=1, data=4, zero=1)) == 5e-9
    assert update_seconds_per_parameter(fitted, Layout(pipeline=2, data=2, zero=1)) == pytest.approx(1e-9 + 4.5e-9 / 3)


def test_an_update_that_was_not_measured_is_that_of_one_rank_shared_out() -> None:
    (report,) = reports_of(COSTS, noise=0.0, ranks=1)
    fitted = fit_costs([replace(report, updates=report.updates[:1])])
    assert update_seconds_per_parameter(fitted, Layout(pipeline=1, data=4, zero=0)) == 2e-9
    assert update_seconds_per_parameter(fitted, Layout(pipeline=1, data=4, zero=1)) == 0.5e-9


@pytest.mark.parametrize("part", ["loads", "updates"])
def test_loading_and_updates_that_were_timed_wrongly_are_refused(part: str) -> None:
    (report,) = reports_of(COSTS, noise=0.0, ranks=1)
    field = "seconds" if part == "loads" else "seconds_per_parameter"
    first, *others = getattr(report, part)
    changes: dict[str, Any] = {part: (replace(first, **{field: float("nan")}), *others)}
    with pytest.raises(ProfileError, match=f"{field} is nan"):
        fit_costs([replace(report, **changes)])


def test_what_workers_load_ahead_costs_nothing() -> None:
    assert COSTS.with_workers(0) == COSTS
    assert COSTS.with_workers(2) == replace(COSTS, loading=LoadCost())


def with_timings(report: ProfileReport, change: Callable[[LayerTiming], LayerTiming]) -> ProfileReport:
    return replace(report, timings=tuple(map(change, report.timings)))


@pytest.mark.parametrize(
    ("kind", "factor"),
    parameters(
        {f"{kind}, {factor}": (kind, factor) for kind in KINDS for factor in (0.1, 30.0)},
        short=("vision, 0.1", "language, 30.0"),
    ),
)
def test_one_size_that_was_timed_wrongly_moves_nothing(kind: LayerKind, factor: float) -> None:
    first, second = reports_of(COSTS, noise=0.01)
    wrong = max((t for t in first.timings if t.layer == kind), key=lambda t: t.forward_seconds)

    def disturb(timing: LayerTiming) -> LayerTiming:
        return replace(timing, forward_seconds=timing.forward_seconds * factor) if timing is wrong else timing

    fitted = fit_costs([with_timings(first, disturb), second])
    for size in sizes_of(kind):
        assert seconds(fitted, kind, size) == pytest.approx(seconds(COSTS, kind, size), rel=0.03)


def test_sizes_that_alone_tell_two_costs_apart_count_even_where_they_disagree_with_the_others() -> None:
    """All but the longest samples have one length, so that their squares grow as their tokens do."""
    tokens = np.array([200.0, 800, 1600, 3200, 800, 2000])
    sizes = np.column_stack((np.zeros(6), tokens, [*200 * tokens[:4], *tokens[4:] ** 2], np.ones(6)))
    times = np.array([25e-9, 25e-9, 25e-9, 25e-9, 25.5e-9, 26e-9]) * tokens
    fitted = fit_not_negative(sizes, times, (1, 2, 3))
    np.testing.assert_allclose(sizes @ np.array(fitted), times, rtol=0.02)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e-6])
@pytest.mark.parametrize("field", ["forward_seconds", "backward_seconds", "kept_bytes"])
def test_what_no_measurement_gives_is_refused_with_its_value(field: str, value: float) -> None:
    (report,) = reports_of(COSTS, noise=0.0, ranks=1)
    first = report.timings[0]
    changes: dict[str, Any] = {field: value}
    bad = with_timings(report, lambda timing: replace(timing, **changes) if timing is first else timing)
    with pytest.raises(ProfileError, match=f"{field} is {value}"):
        fit_costs([bad])


def test_a_link_that_was_timed_wrongly_is_refused() -> None:
    (report,) = reports_of(COSTS, noise=0.0, ranks=1)
    (alone,) = report.communications
    with pytest.raises(ProfileError, match="seconds_per_byte is -1"):
        fit_costs([replace(report, communications=(replace(alone, seconds_per_byte=-1.0),))])


@pytest.mark.parametrize(
    "change", [('"residual":', '"residual":-'), ('"seconds_per_byte":', '"x":'), ('"link":', '"y":')]
)
def test_stored_costs_of_another_form_or_with_negative_times_cannot_be_read(change: tuple[str, str]) -> None:
    with pytest.raises(WireError, match="cannot read a LayerCosts"):
        wire.decode(LayerCosts, wire.encode(COSTS).replace(*change))


def test_a_kind_that_the_model_does_not_have_costs_nothing() -> None:
    def of_text(report: ProfileReport) -> ProfileReport:
        timings = tuple(timing for timing in report.timings if timing.layer not in ("vision_embedding", "vision"))
        parameters = tuple((kind, 0 if "vision" in kind else count) for kind, count in report.parameters)
        return replace(report, timings=timings, parameters=parameters)

    whole, text = (fit_costs(reports) for reports in (reports_of(COSTS, 0), [*map(of_text, reports_of(COSTS, 0))]))
    for kind in ("vision_embedding", "vision"):
        numbers = wire.to_document(text[kind]).values()
        assert not any(any(number) if isinstance(number, list) else number for number in numbers)
    assert text["language"] == whole["language"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_profile_without_times_of_a_kind_that_the_model_has_is_refused(kind: LayerKind) -> None:
    (report,) = reports_of(COSTS, noise=0.0, ranks=1)
    timings = tuple(timing for timing in report.timings if timing.layer != kind)
    with pytest.raises(ProfileError, match=f"no times of the model's {kind} layers"):
        fit_costs([replace(report, timings=timings)])


def test_errors_are_kept_for_each_kind() -> None:
    (report,) = reports_of(COSTS, noise=0.0, ranks=1)
    random = np.random.default_rng(1)

    def disturb(timing: LayerTiming) -> LayerTiming:
        if timing.layer != "vision":
            return timing
        return replace(timing, backward_seconds=timing.backward_seconds * random.normal(1, 0.2))

    fitted = fit_costs([with_timings(report, disturb)])
    assert fitted["vision"].seconds_error > 0.02
    assert fitted["language"].seconds_error < 1e-6


def test_a_kind_whose_times_stay_apart_is_marked() -> None:
    (report,) = reports_of(COSTS, noise=0.0, ranks=1)
    loud = with_timings(report, lambda t: replace(t, spread=2 * NOISE_LIMIT) if t.layer == "head" else t)
    assert fit_costs([report]).noisy_kinds == ()
    assert fit_costs([loud]).noisy_kinds == ("head",)


def test_a_layer_takes_at_least_as_long_as_the_host_to_enqueue_it() -> None:
    (report,) = reports_of(COSTS, noise=0.0, ranks=1)
    sizes = np.array([(0, samples * length, samples * length**2, 1) for samples, length in SHAPES], dtype=np.float64)
    seconds = sizes @ (np.array(COSTS["language"].forward_seconds) + COSTS["language"].backward_seconds)
    host = float(np.median(seconds))  # longer than the device for half of the sizes
    slow = with_timings(report, lambda t: replace(t, host_seconds=host) if t.layer == "language" else t)
    fitted = fit_costs([slow])["language"]
    np.testing.assert_allclose(fitted.forward_seconds, COSTS["language"].forward_seconds, rtol=1e-6)
    factors = np.interp(sizes[:, 1], fitted.curve_sizes, fitted.curve)
    alone = np.array([(sizes[:, 1] == size).sum() == 1 for size in sizes[:, 1]])
    np.testing.assert_allclose((factors * seconds)[alone], np.maximum(seconds, host)[alone], rtol=1e-6)


def test_slow_calls_are_those_of_the_rank_that_loses_most() -> None:
    first, second = reports_of(COSTS, noise=0.0, ranks=2)
    call: SlowCall = ("projector", "convolution", (3e-3, 0, 0, 0), (1e-3, 0, 0, 0))
    slower: SlowCall = ("projector", "convolution", (5e-3, 0, 0, 0), (1e-3, 0, 0, 0))
    assert fit_costs([replace(first, slow_calls=(slower,)), replace(second, slow_calls=(call,))]).slow_calls == (
        slower,
    )
    assert fit_costs([replace(first, slow_calls=(call,)), second]).slow_calls == (call,)

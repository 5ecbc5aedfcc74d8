"""Averages and updates of a model whose output projection is its word embedding."""

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.prediction.parts import Parts
from autotune.prediction.predictor import Predictor
from autotune.prediction.timeline import timeline
from autotune.search.roles import Role
from benchmarks.machines.analytic import A100, LanguageShape, VisionShape, analytic_costs
from storage.explanation import BEST
from tests.machines.simulated import SimulatedLauncher
from tests.unit.search.test_explanation import QUIET, explained, times
from tests.values.exchanges import exchanging, of_weights
from tests.values.search import COSTS, finished, predictor_of, runner_of
from tests.values.training import plan_of
from trials.costs.layer import LayerCost
from trials.costs.layer_costs import LayerCosts, LinkCost
from trials.model.cut import cut
from trials.outcome import Completed
from trials.plan import Plan, ZeroStage

TIED = 30_000
APART, LAST = plan_of("5+2", "0+2"), plan_of("4+0", "1+4")


def with_head(costs: LayerCosts, head: LayerCost) -> LayerCosts:
    return replace(costs, layers=tuple((kind, head if kind == "head" else cost) for kind, cost in costs.layers))


GATHERED = exchanging(COSTS, *of_weights(2, (0.0,) * 5, 1e-9))
HEAD = GATHERED["head"]
PROFILED = with_head(GATHERED, replace(HEAD, tied_parameters=TIED))
ONCE = with_head(GATHERED, replace(HEAD, parameters=HEAD.parameters - TIED))
"""The costs of a model whose head has only the other parameters."""


def after_passes(predictor: Predictor, plan: Plan) -> list[list[float]]:
    """Return the seconds of each stage's averages, update and exchanges in a step of the plan, and its static bytes."""
    sizes, parts = predictor.sizes(plan.packing, plan.layout), Parts.of(cut(plan))
    update = predictor.times.update_parts(plan.layout, parts, sizes)
    exchanges = predictor.times.exchange_seconds(parts, plan.layout, sizes.mean, sizes.degrees[:1])
    static = predictor.memory.static(parts, plan.layout)
    return [each.ravel().tolist() for each in (update.reduction, update.optimizer, *exchanges, static)]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_stage_with_both_ends_averages_and_updates_a_tied_weight_once(zero: ZeroStage) -> None:
    plan = plan_of("5+4", data=2, zero=zero)
    tied, once, twice = (after_passes(predictor_of(costs), plan) for costs in (PROFILED, ONCE, GATHERED))
    assert tied == once
    assert sum(of_stages[0] for of_stages in tied) < sum(of_stages[0] for of_stages in twice)


def test_of_two_stages_with_an_end_each_both_have_the_tied_weight() -> None:
    apart, last = plan_of("5+2", "0+2", data=2, zero=1), plan_of("4+0", "1+4", data=2, zero=1)
    tied, once, twice = (predictor_of(costs) for costs in (PROFILED, ONCE, GATHERED))
    assert after_passes(tied, apart) == after_passes(twice, apart)
    assert after_passes(tied, last) == after_passes(once, last)


def test_two_stages_with_an_end_each_add_up_the_gradients_of_a_tied_weight_over_their_link() -> None:
    link = LinkCost(latency_seconds=0.25, seconds_per_byte=1e-6)
    linked, alone = (replace(costs, link=link) for costs in (PROFILED, GATHERED))
    (tied, *_), (once, *_) = (after_passes(predictor_of(costs), APART) for costs in (linked, alone))
    assert tied == pytest.approx([each + 4e-6 * TIED for each in once])
    for plan, tied_seconds in ((APART, 4e-6 * TIED), (LAST, 0.0), (plan_of("5+4"), 0.0)):
        predictor, usual = predictor_of(linked), predictor_of(alone)
        prediction = predictor.predict(plan)
        # What the head's stage updates less of the weight that it has once takes less than a thousandth of that.
        more = prediction.step_seconds - usual.predict(plan).step_seconds
        assert more == pytest.approx(tied_seconds, abs=1e-4)
        assert prediction.breakdown.communication - usual.predict(plan).breakdown.communication == pytest.approx(
            tied_seconds, abs=1e-4
        )
        assert predictor.epoch_seconds(plan) == pytest.approx(prediction.epoch_seconds)
        shown = timeline(predictor, plan, prediction)
        assert shown.seconds == pytest.approx(prediction.step_seconds[shown.step])
    frozen = with_head(linked, replace(linked["head"], frozen_parameters=linked["head"].parameters))
    assert after_passes(predictor_of(frozen), APART)[0] == [0.0, 0.0]


def test_a_frozen_tied_weight_is_neither_averaged_nor_updated() -> None:
    layers = tuple(
        (kind, replace(cost, frozen_parameters=cost.parameters if kind in ("language", "head") else 0))
        for kind, cost in GATHERED.layers
    )
    frozen = replace(GATHERED, layers=layers)
    tied = with_head(frozen, replace(frozen["head"], tied_parameters=TIED))
    plan = plan_of("5+4", data=2, zero=1)
    *seconds, static = after_passes(predictor_of(tied), plan)
    *usual, twice = after_passes(predictor_of(frozen), plan)
    assert seconds == usual
    assert static == [twice[0] - 4 * TIED]


def test_analytic_costs_of_a_tied_model_have_its_words_once() -> None:
    vision = VisionShape(layers=2, hidden=64, mlp=128, tokens=17, image_tokens=4)
    language = LanguageShape(layers=2, hidden=96, mlp=128, heads=4, key_heads=4, vocabulary=1000)
    untied, tied = (analytic_costs(vision, replace(language, tied=each), A100) for each in (False, True))
    plan = plan_of("2+2")
    twice, once = (after_passes(predictor_of(costs), plan)[-1][0] for costs in (untied, tied))
    assert twice - once == 16 * 96 * 1000  # weights, gradients and moments in float32


@pytest.mark.parametrize(("plan", "basis"), [(APART, "predicted"), (LAST, "measured")])
def test_an_update_that_waits_for_the_tied_weight_of_another_stage_is_no_measured_one(
    plan: Plan, basis: str, tmp_path: Path
) -> None:
    predictor = predictor_of(replace(PROFILED, link=LinkCost(latency_seconds=1e-4, seconds_per_byte=1e-8)))
    result = runner_of(tmp_path, SimulatedLauncher(predictor, QUIET), predictor=predictor).run(plan)
    assert isinstance(result.outcome, Completed)
    trial = finished(plan, result.outcome, epoch_seconds=result.epoch_seconds or 0.0, epoch_seconds_error=0.01)
    assert times(explained((Role.SAMPLED, trial), predictor=predictor))[BEST].part("optimizer").basis == basis

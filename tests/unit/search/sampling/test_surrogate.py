"""The posterior after trials on a machine that is noisy, slows down and is disturbed."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import combinations

import numpy as np
import pytest

from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.learning.surrogate import Surrogate
from autotune.search.space.space import Space
from storage.records import FinishedTrial
from tests.values.search import axes_of, finished, predictor_of, solver_of
from tests.values.storage import OUTCOMES
from tests.values.storage import completed as measured
from trials.plan import Plan

PREDICTOR = predictor_of()
STARTS = Space(axes_of(), solver_of(1 << 50, PREDICTOR)).starts
PLANS = STARTS[0], STARTS[3], STARTS[-1]
EVERY_SECONDS = 20.0


def trials_of(
    plans: Iterable[Plan], factor: Callable[[Plan, int], float], noise: float = 0.005, seed: int = 0
) -> list[FinishedTrial]:
    """Return consecutive trials; `factor` gives how much slower than predicted each one is."""
    random = np.random.default_rng(seed)
    found = []
    for number, plan in enumerate(plans):
        seconds = PREDICTOR.epoch_seconds(plan) * factor(plan, number) * random.lognormal(0, noise)
        started = number * EVERY_SECONDS
        found.append(finished(plan, measured(), number, seconds=started, epoch_seconds=seconds, epoch_seconds_error=0))
    return found


def surrogate_after(trials: Iterable[FinishedTrial]) -> Surrogate:
    surrogate = Surrogate(CalibratedPredictor(PREDICTOR))
    for trial in trials:
        surrogate.learn(trial)
    return surrogate


def seconds_of(surrogate: Surrogate, plan: Plan) -> float:
    return float(np.exp(surrogate.posterior([plan]).mean[0]))


def test_without_trials_it_says_what_is_predicted() -> None:
    surrogate = surrogate_after([])
    posterior = surrogate.posterior(PLANS)
    assert np.exp(posterior.mean) == pytest.approx([PREDICTOR.epoch_seconds(plan) for plan in PLANS])
    assert min(posterior.error) > 0.01
    assert surrogate.noise == 0.02


@pytest.mark.parametrize("kind", ["rejected", "crash", "timeout", "out of memory"])
def test_what_measured_nothing_teaches_nothing(kind: str) -> None:
    before, after = surrogate_after([]), surrogate_after([finished(PLANS[0], OUTCOMES[kind])])
    assert (after.posterior(PLANS).mean == before.posterior(PLANS).mean).all()


def test_a_machine_that_slows_down_half_way_does_not_change_the_ranking_of_interleaved_plans() -> None:
    order = PLANS * 4
    trials = trials_of(order, lambda _, number: 1.3 if number >= len(order) // 2 else 1.0)
    posterior = surrogate_after(trials).posterior(PLANS)
    truth = np.log([PREDICTOR.epoch_seconds(plan) for plan in PLANS])
    assert posterior.mean.argsort().tolist() == truth.argsort().tolist()
    assert posterior.mean - posterior.mean[0] == pytest.approx(truth - truth[0], abs=0.03)


def test_a_plan_that_was_only_tried_on_the_slow_machine_is_not_blamed_for_it() -> None:
    order = (PLANS[0],) * 4 + (PLANS[0], PLANS[1]) * 3
    trials = trials_of(order, lambda _, number: 1.3 if number >= 4 else 1.0)
    less, _ = surrogate_after(trials).posterior(PLANS[:2]).difference(1, 0)
    predicted = np.log(PREDICTOR.epoch_seconds(PLANS[1]) / PREDICTOR.epoch_seconds(PLANS[0]))
    assert less == pytest.approx(predicted, abs=0.03)


def _factor(factors: Mapping[Plan, float], plan: Plan, _: int) -> float:
    return factors[plan]


@pytest.mark.parametrize(
    "own",
    [pytest.param(0.003, id="predictable plans", marks=pytest.mark.long), pytest.param(0.03, id="plans that differ")],
)
def test_a_difference_of_plans_is_within_two_errors_19_times_of_20(own: float) -> None:
    within = []
    for seed in range(12):
        factors = dict(zip(STARTS, np.random.default_rng(seed).lognormal(0, own, len(STARTS)).tolist(), strict=True))
        tried = STARTS[seed % 3 :: max(1, len(STARTS) // 6)]
        surrogate = surrogate_after(trials_of(tried, partial(_factor, factors), 0.01, seed))
        posterior = surrogate.posterior(tried)
        truth = np.log([factors[plan] * PREDICTOR.epoch_seconds(plan) for plan in tried])
        for one, other in combinations(range(len(tried)), 2):
            more, error = posterior.difference(one, other)
            within.append(abs(more - (truth[one] - truth[other])) <= 2 * error)
    assert np.mean(within) >= 0.88  # of pairs that share plans


def test_a_machine_that_is_slow_now_is_recognised() -> None:
    order = PLANS * 4
    slow = surrogate_after(trials_of(order, lambda _, number: 1.2 if number >= 6 else 1.0))
    assert slow.slowness == pytest.approx(1.2, abs=0.12)
    assert surrogate_after(trials_of(order, lambda *_: 1.0)).slowness == pytest.approx(1.0, abs=0.02)
    assert surrogate_after([]).slowness == 1.0


def test_the_error_of_a_plan_holds_the_drift_that_all_plans_share_and_that_of_a_difference_does_not() -> None:
    order = PLANS * 16
    steady = surrogate_after(trials_of(order, lambda *_: 1.0)).measured(PLANS)
    changing = surrogate_after(trials_of(order, lambda _, number: 1.15 if number // 6 % 2 else 1.0)).measured(PLANS)
    assert max(steady.error) < 0.02
    assert min(changing.error) > 0.07  # as far as the machine is from its mean at any time
    assert changing.difference(0, 1)[1] < 0.02


def test_machines_of_different_speed_are_not_taken_for_noise() -> None:
    trials = trials_of(PLANS * 6, lambda _, number: 1.1 if number % 2 else 1.0)
    named = [replace(trial, agent_id="ab"[number % 2]) for number, trial in enumerate(trials)]
    apart, together = surrogate_after(named), surrogate_after(trials)
    assert apart.noise < together.noise / 2


def test_an_outlier_counts_little() -> None:
    order = (PLANS[0],) * 8
    clean = seconds_of(surrogate_after(trials_of(order, lambda *_: 1.0)), PLANS[0])
    spoilt = seconds_of(surrogate_after(trials_of(order, lambda _, number: 1.5 if number == 4 else 1.0)), PLANS[0])
    assert spoilt == pytest.approx(clean, rel=0.5 / 8 / 3)


def disturbed(trial: FinishedTrial) -> FinishedTrial:
    return replace(trial, result=replace(trial.result, disturbance="others"))


def test_a_disturbed_trial_counts_less_than_another() -> None:
    slow = trials_of((PLANS[0],) * 3, lambda _, number: 1.03 if number == 1 else 1.0)
    marked = [slow[0], disturbed(slow[1]), slow[2]]
    assert seconds_of(surrogate_after(marked), PLANS[0]) < seconds_of(surrogate_after(slow), PLANS[0])


def test_disturbed_trials_do_not_make_the_others_look_noisy() -> None:
    trials = trials_of(PLANS * 4, lambda _, number: 1.5 if number % 2 else 1.0, noise=0.01)
    surrogate = surrogate_after([disturbed(trial) if number % 2 else trial for number, trial in enumerate(trials)])
    assert 0.005 < surrogate.noise < 0.02


def test_a_trial_with_more_steps_counts_more_than_another() -> None:
    def mean(last: int) -> float:
        trials = trials_of([PLANS[0]] * 5, lambda _, number: 1.1 if number == 4 else 1.0, noise=0.01)
        outcome = measured()
        measurement = replace(outcome.measurement, steps=(1, 2) * last, step_seconds=(0.5, 0.6) * last)
        longer = replace(trials[-1].result, outcome=replace(outcome, measurement=measurement))
        surrogate = surrogate_after([*trials[:-1], replace(trials[-1], result=longer)])
        return float(np.exp(surrogate.measured([PLANS[0]]).mean[0]))

    assert mean(20) > 1.01 * mean(1)


def test_the_error_of_the_mean_of_many_steps_is_not_divided_by_their_root_again() -> None:
    trials, outcome = trials_of([PLANS[1]] * 4 + [PLANS[0]], lambda *_: 1.0), measured()
    measurement = replace(outcome.measurement, steps=(1, 2) * 20, step_seconds=(0.5, 0.6) * 20)
    error = 0.1 * PREDICTOR.epoch_seconds(PLANS[0])
    longer = replace(trials[-1].result, outcome=replace(outcome, measurement=measurement), epoch_seconds_error=error)
    surrogate = surrogate_after([*trials[:-1], replace(trials[-1], result=longer)])
    assert np.sqrt(surrogate.measured([PLANS[0]]).covariance[0, 0]) > 0.09


def test_a_plan_that_comes_out_as_expected_tells_of_others_and_is_no_chance_itself() -> None:
    posterior = surrogate_after(trials_of(PLANS[:1], lambda *_: 1.0)).posterior(STARTS)
    given = posterior.given([1, 2])
    assert (given.mean == posterior.mean).all()
    assert np.diag(given.covariance)[1:3] == pytest.approx(0, abs=1e-9)
    assert (np.diag(given.covariance) <= np.diag(posterior.covariance) + 1e-12).all()
    assert given.covariance[3, 3] < 0.999 * posterior.covariance[3, 3]
    assert (posterior.given([]).covariance == posterior.covariance).all()


def test_repeats_shrink_the_error_of_a_difference() -> None:
    errors = []
    for repeats in (1, 4, 12):
        surrogate = surrogate_after(trials_of(PLANS[:2] * repeats, lambda *_: 1.0, noise=0.02))
        errors.append(surrogate.posterior(PLANS[:2]).difference(0, 1)[1])
    assert errors == sorted(errors, reverse=True)
    assert errors[2] < 0.7 * errors[0]


def test_even_the_most_similar_plan_does_not_tell_all_of_another() -> None:
    one, other = next(
        (one, other)
        for one in STARTS
        for other in STARTS
        if one != other and one.layout == other.layout and one.stages == other.stages
    )
    trials = trials_of((one, other) * 4, lambda plan, _: 1.1 if plan == other else 1.0)
    more, error = surrogate_after(trials).posterior([other, one]).difference(0, 1)
    truth = np.log(1.1 * PREDICTOR.epoch_seconds(other) / PREDICTOR.epoch_seconds(one))
    assert more == pytest.approx(truth, abs=max(0.02, 2 * error))
    assert more > 0.05


def test_that_some_packs_are_predicted_well_says_little_about_others() -> None:
    surrogate = surrogate_after(trials_of(PLANS * 6, lambda *_: 1.0))
    tried = {plan.packing for plan in PLANS}
    others = [start for start in STARTS if start.packing not in tried]
    assert min(surrogate.posterior(others).error) > 0.02


@pytest.mark.parametrize("noise", [0.03, *(pytest.param(noise, marks=pytest.mark.long) for noise in (0.01, 0.06))])
def test_the_noise_of_one_trial_is_found_within_a_factor_of_two(noise: float) -> None:
    surrogate = surrogate_after(trials_of(PLANS * 8, lambda *_: 1.0, noise))
    assert noise / 2 <= surrogate.noise <= 2 * noise


def test_the_posterior_is_the_same_for_the_same_trials_in_order() -> None:
    trials = trials_of(PLANS * 2, lambda *_: 1.0)
    first, second = (surrogate_after(trials).posterior(PLANS) for _ in range(2))
    assert (first.mean == second.mean).all()
    assert (first.covariance == second.covariance).all()

import math
from dataclasses import replace
from datetime import timedelta
from itertools import product

import numpy as np
import pytest

from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.learning.surrogate import Posterior, Surrogate
from autotune.search.roles import Role
from autotune.search.space.space import Space
from autotune.search.winner import SMALL_LOSS, Standing, Standings, ranked, standings_of
from storage.records import FinishedTrial
from tests.values.search import axes_of, completed, finished, padded_plan, predictor_of, solver_of
from tests.values.storage import OUTCOMES
from tests.values.storage import completed as measured
from trials.outcome import Completed
from trials.plan import Plan

PREDICTOR = predictor_of()
PLANS = Space(axes_of(), solver_of(1 << 50, PREDICTOR)).starts[:5]
SHORTENED = replace(measured(), shortened=True)


def standings_with(
    *seconds: float, error: float = 0.01, roles: tuple[str, ...] = (), trials: tuple[int, ...] = ()
) -> Standings:
    """Return standings of plans with these seconds, fastest first, with independent errors."""
    standings = [
        Standing(
            plan=padded_plan(number + 1),
            roles=frozenset({roles[number] if roles else "sampled"}),
            epoch_seconds=each,
            epoch_seconds_error=each * error,
            peak_bytes=1 << 30,
            trials=trials[number] if trials else 1,
        )
        for number, each in enumerate(seconds)
    ]
    posterior = Posterior(mean=np.log(seconds), covariance=error**2 * np.eye(len(seconds)))
    return Standings(entries=tuple(standings), posterior=posterior, measured=posterior)


def numbers(plans: tuple[Plan, ...]) -> list[int]:
    return [[padded_plan(number) for number in range(1, 10)].index(plan) for plan in plans]


def standings_after(*trials: FinishedTrial) -> Standings:
    surrogate = Surrogate(CalibratedPredictor(PREDICTOR))
    for trial in trials:
        surrogate.learn(trial)
    roles = {trial.plan: frozenset(other.role for other in trials if other.plan == trial.plan) for trial in trials}
    return standings_of(trials, surrogate, roles)


def trial(plan: Plan, factor: float, number: int = 0, role: str = "sampled") -> FinishedTrial:
    """Return a completed trial that took `factor` times the predicted time."""
    seconds = factor * PREDICTOR.epoch_seconds(plan)
    made = completed(plan, seconds, 0.005 * seconds, role)
    return replace(made, number=number)


def disturbed(trial: FinishedTrial) -> FinishedTrial:
    return replace(trial, result=replace(trial.result, disturbance="others"))


# --- which trials rank ---


@pytest.mark.parametrize("kind", ["rejected", "crash", "timeout", "out of memory"])
def test_only_completed_trials_rank(kind: str) -> None:
    whole = trial(PLANS[0], 1.0)
    assert ranked([whole, finished(PLANS[1], OUTCOMES[kind])]) == [whole]


def test_a_trial_that_was_ended_early_does_not_rank() -> None:
    whole = trial(PLANS[0], 1.0)
    assert ranked([whole, finished(PLANS[1], SHORTENED, epoch_seconds=1.0)]) == [whole]


def test_a_plan_that_once_ran_out_of_memory_does_not_rank() -> None:
    good, too_large = trial(PLANS[0], 1.0), trial(PLANS[1], 1.0)
    again = finished(PLANS[1], OUTCOMES["out of memory"], role=Role.CONFIRM)
    assert ranked([good, too_large, again]) == [good]
    crashed = finished(PLANS[1], OUTCOMES["crash"], role=Role.CONFIRM)
    assert ranked([good, too_large, crashed]) == [good, too_large]


def test_disturbed_trials_rank_only_where_their_plan_has_no_others() -> None:
    good, other = trial(PLANS[0], 1.0), trial(PLANS[1], 1.0)
    marked = disturbed(other)
    assert ranked([good, marked]) == [good, marked]
    assert ranked([good, marked, other]) == [good, other]


def test_memory_that_others_took_bars_no_plan() -> None:
    good = trial(PLANS[0], 1.0)
    assert ranked([good, disturbed(finished(PLANS[0], OUTCOMES["out of memory"]))]) == [good]


# --- the standings ---


def test_without_a_completed_trial_the_standings_are_empty() -> None:
    found = standings_after(finished(PLANS[0], OUTCOMES["crash"]))
    assert (found.entries, len(found.posterior.mean)) == ((), 0)
    assert found.finalists(3) == ()


def test_plans_stand_in_the_order_of_what_was_measured() -> None:
    factors = {PLANS[0]: 1.1, PLANS[1]: 1.0, PLANS[2]: 1.05}
    true = {plan: factor * PREDICTOR.epoch_seconds(plan) for plan, factor in factors.items()}
    found = standings_after(*(trial(plan, factor) for plan, factor in factors.items() for _ in range(2)))
    assert [standing.plan for standing in found.entries] == sorted(true, key=true.__getitem__)
    for standing in found.entries:
        assert standing.epoch_seconds == pytest.approx(true[standing.plan], rel=0.1)
        assert (standing.trials, standing.peak_bytes) == (2, 61 << 30)
    assert list(found.posterior.mean) == sorted(found.posterior.mean)


def test_a_plan_has_the_roles_of_all_its_trials() -> None:
    (standing,) = standings_after(
        trial(PLANS[0], 1.0, role=Role.DEFAULT), trial(PLANS[0], 1.0, role=Role.CONFIRM)
    ).entries
    assert standing.roles == {Role.DEFAULT, Role.CONFIRM}


# --- the winner ---


def test_a_clear_winner_is_sure_and_has_no_ties() -> None:
    found = standings_with(90, 100, 101).winner()
    assert (found.number, found.ties) == (0, ())
    assert found.confidence is not None
    assert found.confidence > 0.999
    assert found.loss < SMALL_LOSS


def test_two_equal_plans_tie() -> None:
    found = standings_with(100, 100, 120).winner()
    assert {found.number, *found.ties} == {0, 1}
    assert found.confidence == pytest.approx(0.5, abs=0.05)


def test_the_loss_is_what_the_fastest_plan_is_expected_to_be_faster() -> None:
    """Of two equal independent normal variables: their difference has the error e, and E max(0, d) = e / sqrt(2 pi)."""
    error = 0.01 * math.sqrt(2)
    assert standings_with(100, 100).winner().loss == pytest.approx(error / math.sqrt(2 * math.pi), rel=0.1)


def test_a_plan_whose_repeat_failed_does_not_win_but_lowers_the_confidence() -> None:
    found = standings_with(99, 100, 130, trials=(1, 2, 2)).winner()
    assert (found.number, found.ties) == (1, (0,))
    assert found.confidence is not None
    assert found.confidence < 0.5
    assert found.loss > SMALL_LOSS


def test_a_plan_that_was_not_asked_for_is_compared_with_and_does_not_win() -> None:
    found = standings_with(90, 100, 101, roles=(Role.DEFAULT, "sampled", "sampled"), trials=(2, 2, 2))
    first, *others = found.entries
    barred = replace(found, entries=(replace(first, may_win=False), *others))
    assert numbers(barred.contenders(3)) == [1, 2]
    winner = barred.winner()
    assert {winner.number, *winner.ties} == {1, 2}
    assert [each.gain for each in barred.compare(winner.number, samples=1)] == [pytest.approx(0.9, rel=0.02)]


def test_an_error_that_all_plans_share_leaves_the_winner_certain() -> None:
    alike = standings_with(99, 100)
    common = replace(alike, posterior=replace(alike.posterior, covariance=np.full((2, 2), 0.01) + 1e-8 * np.eye(2)))
    found = common.winner()
    assert found.confidence is not None
    assert found.confidence > 0.999


def test_one_plan_alone_wins_without_a_confidence() -> None:
    found = standings_with(90).winner()
    assert (found.number, found.confidence, found.ties, found.loss) == (0, None, (), 0.0)


def test_the_same_trials_give_the_same_winner() -> None:
    first, second = (standings_with(99, 100).winner() for _ in range(2))
    assert (first.confidence, first.loss) == (second.confidence, second.loss)


def test_interleaved_trials_of_equal_plans_tie_and_of_unequal_ones_do_not() -> None:
    fast, slow = PLANS[:2]
    ratio = PREDICTOR.epoch_seconds(fast) / PREDICTOR.epoch_seconds(slow)
    wobbles = (1.004, 0.997, 1.001, 0.999)
    equal = standings_after(
        *(trial(plan, by * wobble) for wobble in wobbles for plan, by in ((fast, 1.0), (slow, ratio)))
    )
    found = equal.winner()
    assert found.ties == (1 - found.number,)
    unequal = standings_after(
        *(trial(plan, by * wobble) for wobble in wobbles for plan, by in ((fast, 1.0), (slow, 1.1 * ratio)))
    )
    assert unequal.entries[0].plan == fast
    assert unequal.winner().ties == ()


def scattered(*, is_disturbed: bool, baseline: float) -> list[FinishedTrial]:
    """Two plans as predicted, and a baseline that is not, all run in turns with an error of some percent."""
    wobbles = (1.0, 1.2, 0.8, 1.05, 0.85, 1.15)
    factors = {PLANS[0]: 1.0, PLANS[1]: 1.0, PLANS[4]: baseline}
    found = []
    for number, (wobble, (plan, factor)) in enumerate(product(wobbles, factors.items())):
        if plan == PLANS[4] and number > 6:
            continue
        error = wobble ** (0.1 if plan == PLANS[4] else 1.0)
        made = trial(plan, factor * error, number, Role.DEFAULT if plan == PLANS[4] else "sampled")
        later = made.result.finished + timedelta(seconds=25 * number)
        made = replace(made, result=replace(made.result, finished=later))
        found.append(disturbed(made) if is_disturbed else made)
    return found


@pytest.mark.parametrize("is_disturbed", [False, True])
def test_the_estimate_of_a_plan_that_ran_twice_is_between_its_measurements_whatever_was_predicted(
    is_disturbed: bool,
) -> None:
    trials = scattered(is_disturbed=is_disturbed, baseline=0.7)
    found = standings_after(*trials)
    (standing,) = (standing for standing in found.entries if Role.DEFAULT in standing.roles)
    runs = [each.result.epoch_seconds or math.nan for each in trials if each.plan == standing.plan]
    assert 0.97 * min(runs) < standing.epoch_seconds < 1.03 * max(runs)
    (gain,) = found.compare(0, samples=1000)
    assert gain.estimated_samples_per_second == pytest.approx(1000 / standing.epoch_seconds)


@pytest.mark.parametrize(("may_win", "trials", "wins"), [(True, 2, 1), (False, 2, 0), (True, 1, 0)])
def test_no_search_ends_below_a_baseline_whose_own_runs_are_faster(may_win: bool, trials: int, wins: int) -> None:
    """Predictions speak for the other plan, as where the machine was disturbed."""
    found = standings_with(100, 110, error=0.1, roles=("sampled", Role.PACKED), trials=(2, trials))
    entries = found.entries[0], replace(found.entries[1], may_win=may_win)
    measured = Posterior(mean=np.log((100, 98)), covariance=found.measured.covariance)
    winner = replace(found, entries=entries, measured=measured).winner()
    assert winner.number == wins
    # The gain over this baseline is stated by its own runs as well.
    assert (winner.confidence is None) == (not may_win)  # no other plan may win
    assert winner.confidence is None or winner.confidence < 0.5
    assert (winner.ties == (0,)) == (wins == 1)


@pytest.mark.parametrize(("trials", "ties"), [(2, ()), (1, (0,))])
def test_a_plan_whose_runs_are_slower_is_no_tie_whatever_is_predicted(trials: int, ties: tuple[int, ...]) -> None:
    """A baseline wins by its own runs, which are twice as fast as those of the plan that predictions speak for."""
    found = standings_with(100, 110, error=0.01, roles=("sampled", Role.OMNIBAL), trials=(trials, 2))
    measured = Posterior(mean=np.log((110, 55)), covariance=0.1**2 * np.eye(2))
    winner = replace(found, measured=measured).winner()
    assert (winner.number, winner.ties) == (1, ties)
    assert winner.certainty is not None
    assert winner.certainty.by_runs > 0.99
    assert winner.certainty.with_predictions < 0.01
    assert winner.confidence == winner.certainty.with_predictions


@pytest.mark.parametrize(
    ("seconds", "is_disturbed", "least", "most"),
    [
        (98, False, 0.3, 0.5),
        (108, False, 0.8, 0.92),
        (80, False, 0.0, 0.1),
        (98, True, 0.0, 0.6),
        (150, True, 0.9, 1.0),
    ],
)
def test_predictions_make_no_winner_sure_that_its_own_runs_doubt(
    seconds: float, is_disturbed: bool, least: float, most: float
) -> None:
    """A baseline that cannot win ran in these seconds, the winner in 100, both with an error of 5 %."""
    found = standings_with(100, 150, 160, error=0.01, roles=("sampled", "sampled", Role.PACKED), trials=(2, 2, 1))
    winner, other, baseline = found.entries
    entries = replace(winner, is_disturbed=is_disturbed), other, replace(baseline, may_win=False)
    measured = Posterior(mean=np.log((100, 150, seconds)), covariance=0.05**2 * np.eye(3))
    stated = replace(found, entries=entries, measured=measured).winner()
    assert stated.number == 0
    assert stated.confidence is not None
    assert least <= stated.confidence <= most
    within = replace(found, entries=entries, measured=measured).winner(lambda plan: plan != baseline.plan)
    assert within.confidence is not None
    assert within.confidence > 0.99  # the trainer of the search cannot hold the baseline


def test_a_baseline_names_its_plan_and_whether_the_space_has_it() -> None:
    found = standings_with(100, 110, 120, error=0.01, roles=("sampled", Role.PACKED, Role.OMNIBAL), trials=(2, 2, 2))
    entries = *found.entries[:2], replace(found.entries[2], may_win=False)
    compared = replace(found, entries=entries).compare(0, samples=1)
    named = {each.role: (each.plan_id, each.may_win) for each in compared}
    assert named == {Role.PACKED: (entries[1].plan.id, True), Role.OMNIBAL: (entries[2].plan.id, False)}


def test_a_plan_all_of_whose_runs_were_disturbed_is_marked() -> None:
    runs = [disturbed(trial(PLANS[0], 1.0)), disturbed(trial(PLANS[1], 1.1)), trial(PLANS[1], 1.0)]
    found = {standing.plan: standing.is_disturbed for standing in standings_after(*runs).entries}
    assert found == {PLANS[0]: True, PLANS[1]: False}


def test_disturbed_trials_leave_a_winner_less_sure() -> None:
    fast, slow = PLANS[:2]
    ratio = PREDICTOR.epoch_seconds(fast) / PREDICTOR.epoch_seconds(slow)
    wobbles = (1.001, 0.999, 1.0, 1.001)
    trials = [trial(plan, by * wobble) for wobble in wobbles for plan, by in ((fast, 1.0), (slow, 1.05 * ratio))]
    alone, others = standings_after(*trials).winner(), standings_after(*map(disturbed, trials)).winner()
    assert alone.confidence is not None
    assert others.confidence is not None
    assert alone.confidence > 0.97
    assert others.confidence < 0.9
    assert others.ties


# --- the finalists and the comparison ---

ROLES = ("sampled", "sampled", Role.OMNIBAL, Role.DEFAULT_NO_RECOMPUTE, Role.OMNIBAL, Role.DEFAULT)


def test_finalists_are_the_plans_that_may_win_and_the_best_of_each_baseline_once() -> None:
    seconds = (100, 101, 102, 140, 150, 200)
    assert numbers(standings_with(*seconds, error=0.02, roles=ROLES).finalists(3)) == [0, 1, 2, 3, 5]
    assert numbers(standings_with(*seconds, error=0.02, roles=ROLES).finalists(2)) == [0, 1, 2, 3, 5]


def test_baselines_that_cannot_win_are_repeated_last() -> None:
    found = standings_with(100, 101, 130, 140, error=0.01, roles=("sampled", "sampled", Role.HBP, Role.DEFAULT))
    entries = *found.entries[:2], replace(found.entries[2], may_win=False, is_neutral=False), found.entries[3]
    assert numbers(replace(found, entries=entries).finalists(3)) == [0, 1, 3, 2]


def test_a_plan_that_may_be_far_faster_is_a_finalist_before_the_likes_of_another_one() -> None:
    alike, apart = (100, 100.3, 100.4, 100.5), 102
    found = standings_with(*alike, apart)
    covariance = 0.03**2 * np.eye(5)
    covariance[:4, :4] = 0.03**2 + 0.0005**2 * np.eye(4)
    posterior = replace(found.posterior, covariance=covariance)
    assert numbers(replace(found, posterior=posterior).finalists(3)) == [0, 4]


def test_the_plan_of_the_fastest_runs_is_a_finalist_whatever_was_predicted() -> None:
    found = standings_with(100, 101, 102, 160, error=0.02, roles=("sampled", "sampled", "sampled", Role.PACKED))
    measured = replace(found.measured, mean=np.log((200, 210, 220, 120)))
    entries = *found.entries[:3], replace(found.entries[3], may_win=False)
    assert numbers(replace(found, measured=measured).contenders(3)) == [0, 3, 1]
    assert numbers(replace(found, measured=measured, entries=entries).contenders(3)) == [0, 1, 2]
    assert numbers(found.contenders(3)) == [0, 1, 2]


def test_plans_that_surely_cannot_win_are_no_finalists() -> None:
    assert numbers(standings_with(100, 101, 110, error=0.01).finalists(3)) == [0, 1]


def test_only_repeated_plans_count_where_there_are_any() -> None:
    assert list(standings_with(90, 100, 110, trials=(1, 3, 2)).repeated) == [1, 2]
    assert list(standings_with(90, 100).repeated) == [0, 1]


def test_gains_are_ratios_with_the_error_of_the_difference_and_the_fastest_baseline_comes_first() -> None:
    found = standings_with(100, 110, 140, 160, 150, 200, error=0.02, roles=ROLES).compare(0, samples=1000)
    assert [each.role for each in found] == [Role.OMNIBAL, Role.DEFAULT_NO_RECOMPUTE, Role.DEFAULT]
    omnibal, kept, default = found
    assert (default.gain, kept.gain, omnibal.gain) == pytest.approx((2.0, 1.6, 1.4))
    assert default.gain_error == pytest.approx(2.0 * 0.02 * math.sqrt(2))
    assert default.estimated_samples_per_second == pytest.approx(5.0)
    assert default.estimated_samples_per_second_error == pytest.approx(0.1)


def test_a_winner_is_compared_with_repeated_baselines_where_there_are_some() -> None:
    roles = ("sampled", Role.DEFAULT, Role.DEFAULT, Role.DEFAULT_NO_RECOMPUTE)
    found = standings_with(100, 130, 140, 150, roles=roles, trials=(2, 1, 2, 1))
    assert [found.baseline(role) for role in (Role.DEFAULT, Role.DEFAULT_NO_RECOMPUTE, Role.OMNIBAL)] == [2, 3, None]
    gains = {each.role: each.gain for each in found.compare(0, samples=1)}
    assert gains == {Role.DEFAULT: pytest.approx(1.4), Role.DEFAULT_NO_RECOMPUTE: pytest.approx(1.5)}


def test_a_shortened_trial_counts_as_no_measurement_of_its_plan() -> None:
    ended = finished(PLANS[1], SHORTENED, epoch_seconds=0.5 * PREDICTOR.epoch_seconds(PLANS[1]))
    assert isinstance(ended.result.outcome, Completed)
    assert [standing.plan for standing in standings_after(trial(PLANS[0], 1.0), ended).entries] == [PLANS[0]]


def test_a_baseline_that_changes_what_is_learned_does_not_win_while_another_plan_can() -> None:
    quick, slow = trial(PLANS[0], 0.5, 0, Role.PACKED), trial(PLANS[1], 1.5, 1)
    both = [quick, slow, trial(PLANS[0], 0.5, 2, Role.CONFIRM), trial(PLANS[1], 1.5, 3, Role.CONFIRM)]
    surrogate = Surrogate(CalibratedPredictor(PREDICTOR))
    for each in both:
        surrogate.learn(each)
    roles = {PLANS[0]: frozenset({Role.PACKED}), PLANS[1]: frozenset({"sampled"})}

    def winner(of: list[FinishedTrial]) -> tuple[Plan, str | None]:
        found = standings_of(of, surrogate, roles, is_neutral=lambda plan: plan != PLANS[0])
        number = found.winner().number
        return found.entries[number].plan, found.compare(number, 10, lambda _: None)[0].only_compared

    assert winner(both) == (PLANS[1], "it changes what is learned")
    assert winner([quick])[0] == PLANS[0], "nothing else completed"

from collections.abc import Sequence

import optuna
import pytest
from optuna.trial import TrialState, create_trial

from autotune.search.pruner import ClearlyWorse


def ends(steps: Sequence[float], *done: tuple[float, float], state: TrialState = TrialState.COMPLETE) -> bool:
    """Whether a trial ends after these steps, where others have (value, violation)."""
    study = optuna.create_study(pruner=ClearlyWorse())
    for value, violation in done:
        study.add_trial(create_trial(state=state, value=value, constraints={"feasible": violation}))
    trial = study.ask()
    for number, seconds in enumerate(steps):
        trial.report(seconds, number)
    return trial.should_prune()


BEST = (100.0, 0.0)


@pytest.fixture(autouse=True)
def quiet() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def test_a_trial_that_is_clearly_worse_than_the_best_one_ends() -> None:
    assert ends([150.0, 151.0], (200.0, 0.0), BEST)


def test_one_step_alone_ends_nothing() -> None:
    assert not ends([500.0], BEST)


@pytest.mark.parametrize("seconds", [50.0, 100.0, 108.0])
def test_a_trial_that_may_be_as_good_goes_on(seconds: float) -> None:
    assert not ends([seconds, seconds], BEST)


def test_steps_that_scatter_are_no_proof() -> None:
    assert not ends([100.0, 200.0], BEST)
    assert ends([148.0, 152.0], BEST)


def test_without_a_finished_trial_nothing_ends() -> None:
    assert not ends([500.0, 500.0])


def test_plans_that_did_not_fit_or_were_ended_early_are_not_compared_with() -> None:
    assert not ends([500.0, 500.0], (100.0, 0.25))
    assert not ends([500.0, 500.0], BEST, state=TrialState.PRUNED)
    assert ends([500.0, 500.0], (100.0, 0.25), (200.0, 0.0))

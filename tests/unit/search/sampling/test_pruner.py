from collections.abc import Sequence

import optuna
import pytest

from autotune.search.sampling.proposals import TO_BEAT, ClearlyWorse


def ends(steps: Sequence[float], to_beat: float | None = 100.0) -> bool:
    """Return whether a trial is pruned after these steps."""
    trial = optuna.create_study(pruner=ClearlyWorse()).ask()
    trial.set_user_attr(TO_BEAT, to_beat)
    for number, seconds in enumerate(steps):
        trial.report(seconds, number)
    return trial.should_prune()


@pytest.fixture(autouse=True)
def quiet() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def test_a_trial_that_is_clearly_worse_than_the_best_one_ends() -> None:
    assert ends([150.0, 151.0])


def test_one_step_alone_ends_nothing() -> None:
    assert not ends([500.0])


@pytest.mark.parametrize("seconds", [50.0, 100.0, 108.0])
def test_a_trial_that_may_be_as_good_goes_on(seconds: float) -> None:
    assert not ends([seconds, seconds])


def test_steps_that_scatter_are_no_proof() -> None:
    assert not ends([100.0, 200.0])
    assert ends([148.0, 152.0])


def test_where_nothing_is_known_nothing_ends() -> None:
    assert not ends([500.0, 500.0], None)


def test_on_a_machine_that_has_become_slow_a_trial_is_compared_with_what_the_best_plan_would_take_now() -> None:
    assert not ends([150.0, 151.0], 150.0)

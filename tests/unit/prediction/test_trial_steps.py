"""The steps that trials time."""

from dataclasses import replace

import numpy as np
import pytest

from autotune.prediction.predictor import Prediction
from autotune.prediction.trial_steps import spread_steps, trial_steps, warmup_of
from tests.values.search import padded_plan, predictor_of


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    """An epoch of 200 steps, most of them cheap."""
    usual = predictor_of().predict(padded_plan(2))
    seconds = np.random.default_rng(0).lognormal(sigma=0.5, size=200)
    return replace(usual, step_seconds=seconds, step_samples=np.full(200, 16), heaviest_step=17)


def test_typical_steps_are_near_the_mean_and_the_heaviest_and_costliest_ones_warm_up(prediction: Prediction) -> None:
    task, seconds = trial_steps(prediction, 2, 5), prediction.step_seconds
    assert task.warmup_steps == (17, int(seconds.argmax()))
    assert np.abs(seconds[list(task.timed_steps)] / seconds.mean() - 1).max() < 0.05
    assert list(task.timed_steps) == sorted(task.timed_steps)


def test_spread_steps_represent_an_epoch_whose_cost_has_another_form(prediction: Prediction) -> None:
    true = prediction.step_seconds**2  # costly steps cost more than predicted, cheap ones less

    def error(steps: tuple[int, ...]) -> float:
        chosen = list(steps)
        scaled = true[chosen].sum() * prediction.step_seconds.sum() / prediction.step_seconds[chosen].sum()
        return abs(float(scaled / true.sum()) - 1)

    spread, typical = spread_steps(prediction, 1, 40), trial_steps(prediction, 1, 40)
    assert spread.warmup_steps == typical.warmup_steps
    assert error(spread.timed_steps) < 0.05
    assert error(typical.timed_steps) > 0.15


@pytest.mark.parametrize("count", [0, 1, 3, 200, 500])
def test_no_step_warms_up_twice(prediction: Prediction, count: int) -> None:
    costliest = int(prediction.step_seconds.argmax())
    warmup = warmup_of(replace(prediction, heaviest_step=costliest), count)
    assert len(set(warmup)) == len(warmup) == min(count, 200)
    assert warmup[:1] == (costliest,)[:count]


@pytest.mark.parametrize(("asked", "timed"), [(1, 1), (40, 40), (200, 200), (500, 200)])
def test_spread_steps_are_different_steps(prediction: Prediction, asked: int, timed: int) -> None:
    steps = spread_steps(prediction, 1, asked).timed_steps
    assert len(set(steps)) == len(steps) == timed
    assert list(steps) == sorted(steps)

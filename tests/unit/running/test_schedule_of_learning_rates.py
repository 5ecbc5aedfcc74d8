"""The learning rate of each step is that of transformers' schedules."""

import math
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from trials.errors import TrialsError
from trials.job import TrainingSection
from trials.tasks.training.schedule import schedule_of


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize(
    ("name", "theirs"), [("constant", "constant_with_warmup"), ("linear", "linear"), ("cosine", "cosine")]
)
def test_factors_are_those_of_transformers(name: Any, theirs: str, warmup: int) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    expected = get_scheduler(theirs, optimizer, num_warmup_steps=warmup, num_training_steps=20)
    schedule = schedule_of(TrainingSection(schedule=name, warmup=warmup), [12, 8])
    for step in range(1, 21):
        assert schedule.factor(step) == pytest.approx(expected.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        expected.step()


@pytest.mark.parametrize(("share", "steps"), [(0.0, 0), (0.07, 7), (0.035, 4), (0.99, 99)])
def test_a_share_of_all_steps_is_rounded_up(share: float, steps: int) -> None:
    assert schedule_of(TrainingSection(warmup=share), [100]).warmup == steps


def test_max_steps_ends_the_schedule() -> None:
    schedule = schedule_of(TrainingSection(schedule="linear", warmup=0.5, max_steps=4), [10, 10])
    assert [schedule.factor(step) for step in range(1, 5)] == [0, 0.5, 1, 0.5]
    assert schedule_of(TrainingSection(max_steps=40), [10, 10]).total == 20


def test_a_schedule_of_one_step_has_the_whole_rate() -> None:
    assert schedule_of(TrainingSection(schedule="cosine"), [1]).factor(1) == 1
    assert math.isclose(schedule_of(TrainingSection(schedule="cosine"), [2]).factor(2), 0.5)


def test_a_warmup_longer_than_the_training_is_refused() -> None:
    with pytest.raises(
        TrialsError, match=r"training.warmup: 11 steps are more than the 10 steps of the training; lower"
    ):
        schedule_of(TrainingSection(warmup=11), [5, 5])
    assert schedule_of(TrainingSection(warmup=10), [5, 5]).warmup == 10

"""Time that a search keeps for the repeats at its end."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from autotune.search.budget import Budget
from autotune.search.roles import BASELINES, Role
from storage.records import FinishedTrial
from tests.machines.simulated import SimulatedLauncher, SimulatedLedger
from tests.values.search import completed, padded_plan, predictor_of
from trials.job import SearchSection
from trials.plan import Plan
from trials.units import time_setting

SECONDS = 10.0
"""Of each trial."""


def trial_of(role: Role, number: int, epoch_seconds: float = 100.0) -> FinishedTrial:
    trial = completed(padded_plan(number), epoch_seconds, role=role)
    started = trial.started + timedelta(seconds=number * SECONDS)
    ended = replace(trial.result, finished=started + timedelta(seconds=SECONDS))
    return replace(trial, started=started, result=ended)


@pytest.mark.parametrize(
    ("baselines", "kept"), [((), 4 + len(BASELINES)), ((Role.DEFAULT,), 4 + 1), ((Role.DEFAULT, Role.HBP), 4 + 1)]
)
def test_time_is_kept_for_a_trial_its_repeats_and_that_of_one_baseline_that_ran(
    baselines: tuple[Role, ...], kept: int
) -> None:
    roles = (Role.PREDICTED, *baselines)
    check([trial_of(role, number) for number, role in enumerate(roles, start=1)], kept)


def test_the_baseline_for_whose_repeat_time_is_kept_is_the_fastest() -> None:
    fast = trial_of(Role.HBP, 1, epoch_seconds=110.0)
    slow = trial_of(Role.DEFAULT, 2, epoch_seconds=120.0)
    longer = replace(slow.result, finished=slow.started + timedelta(seconds=3 * SECONDS))
    trials = [fast, replace(slow, result=longer), *(trial_of(Role.PREDICTED, number) for number in (5, 6, 7))]
    check(trials, 4 + 1, spent=7 * SECONDS)


def test_no_time_is_kept_for_a_repeat_of_a_baseline_that_cannot_win() -> None:
    fast, slow = trial_of(Role.HBP, 1, epoch_seconds=110.0), trial_of(Role.DEFAULT, 4, epoch_seconds=120.0)
    longer = replace(fast.result, finished=fast.started + timedelta(seconds=3 * SECONDS))
    others, barred = [trial_of(Role.PREDICTED, number) for number in (5, 6, 7)], padded_plan(9)
    trials = [replace(fast, result=longer, plan=barred), slow, *others]
    check(trials, 4 + 3, spent=7 * SECONDS)
    check(trials, 4 + 1, spent=7 * SECONDS, may_win=lambda plan: plan != barred)


@pytest.mark.parametrize(
    ("settings", "hours"),
    [
        # Six trials more, the baselines twice, three finalists three times, and 41 steps instead of 6.
        ({}, (6 * 4 + 2 * 9 + 9 * 4 + 41 / 6 * 4) * 8 / 3600),
        ({"final_steps": 0}, (6 * 4 + 2 * 9 + 9 * 4) * 8 / 3600),
        ({"trial_timeout": "40s"}, (6 * 4 + 2 * 9 + 9 * 4 + 20) * 8 / 3600),
        ({"time_limit": "1min"}, 60 * 8 / 3600),
        ({"device_hours": 0.1}, 0.1),
        ({"time_limit": "10s"}, 18 * 8 / 3600),  # those that always run
    ],
)
def test_a_search_is_told_to_cost_what_its_trials_take_and_no_more_than_its_limits(
    settings: dict[str, Any], hours: float
) -> None:
    section = SearchSection.model_validate({"trials": 8, "time_limit": "10h", **settings})
    ledger = SimulatedLedger(SimulatedLauncher(predictor_of()))
    budget = Budget(settings=section, ledger=ledger, clock=lambda: 0.0)
    text = budget.costs_text(4.0, [4.0, 5.0], 18.0, groups=1, devices=8)
    assert text.endswith(f"; about {hours:.2g} device-hours in all")


def check(
    trials: Sequence[FinishedTrial],
    kept: int,
    spent: float | None = None,
    may_win: Callable[[Plan], bool] = lambda _: True,
) -> None:
    """Check that a further trial is allowed with time for `kept` of them, and not with less."""
    spent = len(trials) * SECONDS if spent is None else spent
    ledger = SimulatedLedger(SimulatedLauncher(predictor_of()))
    ledger.trials = list(trials)

    def allows(seconds_left: float) -> bool:
        limit = spent + seconds_left
        settings = SearchSection.model_validate({"time_limit": time_setting(limit), "final_steps": 0})
        return Budget(settings=settings, ledger=ledger, clock=lambda: 0.0, may_win=may_win).allows_trial()

    assert allows(kept * SECONDS + 1)
    assert not allows(kept * SECONDS - 1)

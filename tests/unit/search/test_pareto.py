from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autotune.search.execution.ledger import is_shortened
from autotune.search.learning.surrogate import Posterior
from autotune.search.pareto import pareto
from autotune.search.winner import Standing, Standings
from storage.records import FinishedTrial, ParetoPlan
from tests.machines.search_bench import PREDICTOR, Bench
from tests.machines.simulated import Behaviour, SimulatedLauncher
from tests.values.search import completed, padded_plan
from trials.outcome import Completed

SAMPLES = 100


def standings_with(*entries: tuple[float, int]) -> Standings:
    """Return standings of plans with these (epoch seconds, peak bytes), numbered from 1."""
    standings = tuple(
        Standing(
            plan=padded_plan(number),
            roles=frozenset({"sampled"}),
            epoch_seconds=seconds,
            epoch_seconds_error=0.1,
            peak_bytes=peak,
            trials=2,
        )
        for number, (seconds, peak) in enumerate(entries, 1)
    )
    count = len(entries)
    posterior = Posterior(mean=np.zeros(count), covariance=np.eye(count))
    return Standings(entries=standings, posterior=posterior, measured=posterior)


def spent(number: int, joules: float, *step_seconds: float, seconds: float = 60.0) -> FinishedTrial:
    """Return a trial of `seconds` in all, with the energy of its timed steps."""
    made = completed(padded_plan(number), 1.0)
    assert isinstance(made.result.outcome, Completed)
    measurement = replace(
        made.result.outcome.measurement,
        steps=tuple(range(len(step_seconds))),
        step_seconds=step_seconds,
        losses=(1.0,) * len(step_seconds),
    )
    outcome = replace(made.result.outcome, measurement=measurement)
    return replace(made, result=replace(made.result, outcome=outcome, energy_joules=joules, seconds=seconds))


def numbers(found: tuple[ParetoPlan, ...]) -> list[int]:
    return [[padded_plan(number) for number in range(1, 10)].index(entry.plan) + 1 for entry in found]


def test_time_alone_leaves_no_choice() -> None:
    assert pareto(standings_with((10, 5), (20, 1)), [], SAMPLES, ("time",)) == ()


def test_plans_that_another_beats_in_time_and_memory_are_left_out() -> None:
    found = pareto(standings_with((10, 50), (11, 60), (12, 40), (13, 40), (14, 10)), [], SAMPLES, ("time", "memory"))
    assert numbers(found) == [1, 3, 5]
    assert [(entry.estimated_samples_per_second, entry.peak_bytes) for entry in found] == [
        (10.0, 50),
        (pytest.approx(100 / 12), 40),
        (pytest.approx(100 / 14), 10),
    ]


def test_plans_that_may_not_win_are_left_out_and_beat_no_other() -> None:
    standings = standings_with((9, 5), (10, 50), (12, 40))
    compared = replace(standings.entries[0], may_win=False, roles=frozenset({"packed"}))
    among = replace(standings, entries=(compared, *standings.entries[1:]))
    assert numbers(pareto(among, [], SAMPLES, ("time", "memory"))) == [2, 3]
    alone = standings_with((9, 5))
    alone = replace(alone, entries=(replace(alone.entries[0], may_win=False, roles=frozenset({"packed"})),))
    assert numbers(pareto(alone, [], SAMPLES, ("time", "memory"))) == [1]


def test_plans_that_need_less_memory_are_measured_whole_however_slow_they_are(bench: Bench) -> None:
    machine = SimulatedLauncher(PREDICTOR, Behaviour(noise=0.005))
    settings: dict[str, Any] = {"timed_steps": 5, "time_limit": "1h", "objectives": ["time", "memory"]}
    trials = bench.search(bench.study(), machine, trials=10, **settings).trials
    assert not any(map(is_shortened, trials))
    first, *_, last = pareto(bench.standings, trials, SAMPLES, settings["objectives"])
    assert last.peak_bytes < 0.8 * first.peak_bytes
    assert last.estimated_samples_per_second < 0.85 * first.estimated_samples_per_second


def test_energy_is_mean_power_of_the_steps_for_an_epoch_over_its_samples() -> None:
    trials = [spent(1, 300, 0.5, 0.5), spent(1, 100, 1.0, seconds=600.0), spent(2, 100, 1.0, 1.0, seconds=5.0)]
    found = pareto(standings_with((10, 1), (20, 1)), trials, SAMPLES, ("time", "energy"))
    assert numbers(found) == [1, 2]
    assert [entry.joules_per_sample for entry in found] == [20.0, 10.0]


def test_a_plan_whose_energy_is_not_known_beats_no_other_by_it() -> None:
    found = pareto(
        standings_with((10, 1), (20, 1), (30, 1)), [spent(2, 100, 2), spent(3, 100, 2)], SAMPLES, ("time", "energy")
    )
    assert numbers(found) == [1, 2]


def test_energy_that_no_device_counts_compares_nothing() -> None:
    found = pareto(standings_with((10, 2), (20, 1)), [], SAMPLES, ("time", "energy"))
    assert numbers(found) == [1]
    assert found[0].joules_per_sample is None

"""Searches whose profile is far from the machine: the best plan that was measured wins."""

import pytest

from autotune.prediction.features import COSTS, scaled
from autotune.search.execution.ledger import ran
from autotune.search.roles import Role
from tests.machines.search_bench import ONE_PLAN, PREDICTOR, Bench
from tests.machines.simulated import Behaviour, SimulatedLauncher
from tests.values.parameters import parameters
from trials.plan import Plan

WITHIN = 1.02
"""Ratio of true times that a few noisy steps do not tell apart."""


class ChangingMachine(SimulatedLauncher):
    """A machine that takes half as long again from its eighth trial on."""

    def _measure(self, plan: Plan, seconds: float) -> float:
        return super()._measure(plan, seconds * (1.5 if len(self.asked) >= 8 else 1.0))


def wrong(**factors: float) -> SimulatedLauncher:
    """Return a machine whose costs are those of the profile times these factors."""
    times = [factors.get(name, 1.0) for name in COSTS]
    return SimulatedLauncher(PREDICTOR.with_costs(scaled(PREDICTOR.costs, times)))


def is_best_of_the_measured(bench: Bench, machine: SimulatedLauncher) -> bool:
    """Return whether no plan that ran is truly faster than the winner."""
    measured = [each.plan for each in bench.standings.entries]
    winner = bench.standings.entries[bench.standings.winner().number].plan
    return machine.epoch_seconds(winner) <= WITHIN * min(map(machine.epoch_seconds, measured))


@pytest.mark.parametrize(
    "machine",
    parameters(
        {
            "vision slow": wrong(vision=10.0),
            "vision fast": wrong(vision=0.1),
            "language slow": wrong(language=10.0),
            "language fast": wrong(language=0.1, head=0.1),
            "links slow": wrong(communication=10.0, update=10.0),
            "exact times": SimulatedLauncher(PREDICTOR, Behaviour(noise=0.0)),
            "changes": ChangingMachine(PREDICTOR),
        },
        short=("changes",),
    ),
)
def test_the_best_plan_that_was_measured_wins(bench: Bench, machine: SimulatedLauncher) -> None:
    ledger = bench.search(bench.study(), machine, trials=8)
    assert sum(map(ran, ledger.trials)) > 3
    assert is_best_of_the_measured(bench, machine)


def test_the_best_plan_wins_where_the_space_is_a_single_plan(bench: Bench) -> None:
    machine = wrong(language=10.0)
    ledger = bench.search(bench.study(), machine, axes=ONE_PLAN)
    plans = {trial.plan for trial in ledger.trials if ran(trial) and trial.role in (Role.SAMPLED, Role.PREDICTED)}
    assert len(plans) == 1
    assert is_best_of_the_measured(bench, machine)

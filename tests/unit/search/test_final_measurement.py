"""The longer measurement of the winner after the repeats."""

from autotune.prediction.trial_steps import spread_steps
from autotune.search.execution.ledger import ran
from autotune.search.roles import Role
from tests.machines.search_bench import ONE_PLAN, PREDICTOR, Bench
from tests.machines.simulated import Behaviour, SimulatedLauncher
from tests.unit.search.test_search import TOO_LARGE, fastest, roles
from tests.values.storage import completed as measured
from trials.outcome import Cause, Completed
from trials.plan import Plan


def test_the_winner_is_measured_over_more_steps(bench: Bench) -> None:
    study, noisy = bench.study(), SimulatedLauncher(PREDICTOR, Behaviour(noise=0.05))
    ledger = bench.search(study, noisy, axes=ONE_PLAN, trials=4, final_steps=9, step_error=0.5)
    last = ledger.trials[-1]
    assert roles(ledger.trials).count(Role.FINAL) == 1
    assert (last.role, last.plan) == (Role.FINAL, fastest(bench).plan)
    assert isinstance(last.result.outcome, Completed)
    timed = last.result.outcome.measurement.steps
    assert len(timed) == 9
    assert timed == spread_steps(PREDICTOR.predict(last.plan), 1, 9).timed_steps
    assert bench.search(study, noisy, axes=ONE_PLAN, trials=4, final_steps=9, step_error=0.5).trials == ledger.trials


def test_the_longer_measurement_keeps_within_the_hours_of_devices(bench: Bench) -> None:
    study = bench.study()
    bench.record(study, measured(), seconds=100)  # on two devices
    ledger = bench.search(study, SimulatedLauncher(PREDICTOR), trials=3, final_steps=9, device_hours=201 / 3600)
    assert Role.FINAL not in roles(ledger.trials)


def test_a_winner_that_the_longer_measurement_shows_to_be_slower_is_replaced(bench: Bench) -> None:
    def cause(plan: Plan) -> Cause | None:
        return TOO_LARGE if plan == winner and len(pool.asked) > before else None

    winner, before, pool = None, 0, SimulatedLauncher(PREDICTOR, cause_of=cause)
    study = bench.study()
    before = len([trial for trial in bench.search(study, pool, trials=6).trials if ran(trial)])
    winner = fastest(bench).plan
    ledger = bench.search(study, pool, trials=6, final_steps=9)
    finals = [trial for trial in ledger.trials if trial.role == Role.FINAL]
    assert [trial.plan == winner for trial in finals] == [True, False]
    assert finals[1].plan == fastest(bench).plan
    assert f"After that, plan {finals[1].plan.id} is the fastest" in bench.said

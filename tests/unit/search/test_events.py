"""What a search tells its listener."""

from itertools import takewhile

import numpy as np
import pytest

from autotune.events import Note, Phase, PhaseBegan, SearchStatus, TrialBegan, TrialEnded
from autotune.search import search
from autotune.search.baselines import baselines
from autotune.search.best_so_far import best_so_far
from autotune.search.execution.ledger import is_shortened
from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.learning.surrogate import Surrogate
from autotune.search.roles import Role
from autotune.search.solver.solver import Solver
from autotune.search.winner import ranked
from tests.machines.search_bench import ALWAYS, MEMORY, PREDICTOR, Bench
from tests.machines.simulated import Behaviour, SimulatedLauncher
from tests.values.search import LANGUAGE_LAYERS, VISION_LAYERS, limits_of, workload_of
from trials.outcome import Completed, Rejected
from trials.plan import Layout, Packed, Plan
from trials.stage import Stage


@pytest.mark.usefixtures("unsatisfied")
def test_every_trial_that_runs_begins_and_ends_once_with_what_is_left_after_it(bench: Bench) -> None:
    ledger = bench.search(bench.study(), SimulatedLauncher(PREDICTOR, Behaviour(crash_share=0.2), seed=1), trials=6)
    began = [event.trial.id for event in bench.events if isinstance(event, TrialBegan)]
    ended = [event.trial for event in bench.events if isinstance(event, TrialEnded)]
    assert [trial.id for trial in ended] == [trial.id for trial in ledger.trials]
    assert began == [trial.id for trial in ended if not isinstance(trial.result.outcome, Rejected)]
    followers = [
        after for event, after in zip(bench.events, bench.events[1:], strict=False) if isinstance(event, TrialEnded)
    ]
    statuses = [status for status in followers if isinstance(status, SearchStatus)]
    assert len(statuses) == len(ended)
    assert [status.trials for status in statuses] == [6] * len(ended)
    assert statuses[-1].spent == max(status.spent for status in statuses) <= 6
    left = [status.seconds_left for status in statuses]
    assert left == sorted(left, reverse=True)
    assert 0 < left[0] <= 60


def test_the_best_plan_so_far_is_the_winner_in_the_end_with_its_gain_and_repeats_come_last(bench: Bench) -> None:
    bench.search(bench.study(), SimulatedLauncher(PREDICTOR), trials=6)
    *_, last = (event for event in bench.events if isinstance(event, SearchStatus))
    assert last.best is not None
    standings = bench.standings
    winner = standings.winner().number
    assert last.best.plan == standings.entries[winner].plan
    assert last.best.epoch_seconds == pytest.approx(standings.entries[winner].epoch_seconds, rel=0.01)
    compared = {baseline.role: baseline.gain for baseline in standings.compare(winner, 100)}
    gains = {gain.role: gain.gain for gain in last.best.gains}
    assert gains.keys() == compared.keys() >= {Role.DEFAULT}
    assert [gains[role] for role in gains] == pytest.approx([compared[role] for role in gains], rel=0.01)
    assert all(gain.error > 0 for gain in last.best.gains if gain.gain != 1)
    # Until a trial has completed there is none.
    before = takewhile(lambda event: not isinstance(event, TrialEnded), bench.events)
    assert [status.best for status in before if isinstance(status, SearchStatus)] == [None]
    # The repeats begin after what a search costs was said, and why it samples no more.
    said = [event for event in bench.events if isinstance(event, Note | PhaseBegan)]
    assert [type(event) for event in said] == [Note, Note, PhaseBegan]
    assert isinstance(said[2], PhaseBegan)
    assert said[2].phase == Phase.REPEATS
    after = bench.events[bench.events.index(said[2]) :]
    assert {event.trial.role for event in after if isinstance(event, TrialBegan)} == {Role.CONFIRM}


def test_the_best_plan_so_far_is_not_compared_with_a_baseline_that_cannot_win(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faults(_: CalibratedPredictor, plan: Plan) -> tuple[str, ...]:
        return ("unlike random steps",) if plan.layout.pipeline == 1 else ()

    monkeypatch.setattr(CalibratedPredictor, "_learning_faults", faults)
    bench.search(bench.study(), SimulatedLauncher(PREDICTOR), trials=6)
    *_, last = (event for event in bench.events if isinstance(event, SearchStatus))
    assert last.best is not None
    ran = {role for standing in bench.standings.entries for role in standing.roles}
    assert Role.PACKED in ran
    assert Role.DEFAULT in {gain.role for gain in last.best.gains}
    assert Role.PACKED not in {gain.role for gain in last.best.gains}


def test_the_best_plan_is_compared_with_the_fastest_plan_of_a_kind_of_baseline(bench: Bench) -> None:
    trials = bench.search(bench.study(), SimulatedLauncher(PREDICTOR), trials=6).trials
    surrogate = Surrogate(CalibratedPredictor(PREDICTOR))
    for trial in trials:
        surrogate.learn(trial)
    plans = list(dict.fromkeys(trial.plan for trial in ranked(trials)))
    seconds = dict(zip(plans, np.exp(surrogate.measured(plans).mean), strict=True))
    best, second, *others = sorted(plans, key=seconds.__getitem__)
    roles = {plan: frozenset({str(Role.OMNIBAL)}) for plan in (second, *others)}
    found = best_so_far(best, ranked(trials), roles, surrogate)
    assert others
    assert found is not None
    assert found.epoch_seconds == pytest.approx(seconds[best])
    assert [gain.gain for gain in found.gains] == [pytest.approx(seconds[second] / seconds[best])]


@pytest.mark.parametrize(
    ("limit", "said", "warned"),
    [("10h", "; about 2 more trials; ", 0), ("0.001s", "; the baselines that always run take about ", 1)],
)
def test_a_search_says_what_it_will_cost_before_its_first_trial(
    limit: str, said: str, warned: int, bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.explore(bench.study(), SimulatedLauncher(PREDICTOR), trials=5, time_limit=limit)
    first = next(number for number, event in enumerate(bench.events) if isinstance(event, TrialBegan))
    (text,) = (e.text for e in bench.events[:first] if isinstance(e, Note) and e.text.startswith("A trial of the plan"))
    assert said in text
    assert (
        sum(
            "no time for more than the baselines; raise search.time_limit, or" in message for message in caplog.messages
        )
        == warned
    )
    assert not any("search.trial_timeout" in message for message in caplog.messages)


def test_what_a_search_will_cost_leaves_out_baselines_that_ran_before(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_IDLE_SUGGESTIONS", 1)
    pool = SimulatedLauncher(PREDICTOR)
    bench.explore(bench.study(), pool, trials=4, time_limit="10h")
    bench.explore(bench.study(), pool, trials=8, time_limit="10h", sampler="tpe")
    first, second = (e.text for e in bench.events if isinstance(e, Note) and e.text.startswith("A trial of the plan"))
    assert ", 3 baselines " in first
    assert "baseline" not in second


def test_a_trial_that_its_timeout_would_end_is_warned_of(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.explore(bench.study(), SimulatedLauncher(PREDICTOR), trials=3, trial_timeout="0.001s")
    (warning,) = (message for message in caplog.messages if "search.trial_timeout" in message)
    assert warning.startswith("a trial is predicted to take ")


@pytest.mark.parametrize(
    ("limit", "is_left_out"), [pytest.param("10h", False, marks=pytest.mark.long), ("0.001s", True)]
)
def test_a_baseline_that_the_limit_leaves_out_is_named(limit: str, is_left_out: bool, bench: Bench) -> None:
    ledger = bench.search(bench.study(), SimulatedLauncher(PREDICTOR), trials=10, time_limit=limit)
    (text,) = [each for each in bench.said if each.startswith("Too little is left of") and "; not run: " in each] or [
        ""
    ]
    ran = {trial.role for trial in ledger.trials}
    left_out = {str(role) for role in ALWAYS} - ran
    assert bool(text) == bool(left_out) == is_left_out
    assert all(role in text for role in left_out)


def test_a_rejected_current_plan_does_not_leave_a_search_without_a_plan(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.search.baselines.AS_FAST", 1.0)  # so that no other baseline is needed
    packing = Packed(qv=30, qt=2200, qv_min=30, qt_min=2200, packer="best-fit")
    stage = Stage(vision=VISION_LAYERS, language=LANGUAGE_LAYERS)
    bench.current_plan = Plan(packing=packing, layout=Layout(pipeline=1, data=2, zero=1), stages=(stage,))
    ledger = bench.search(bench.study(), SimulatedLauncher(PREDICTOR), trials=10, time_limit="0.001s")
    outcomes = {trial.role: trial.result.outcome for trial in ledger.trials}
    assert isinstance(outcomes[Role.CURRENT_PLAN], Rejected)
    assert any(isinstance(outcome, Completed) for outcome in outcomes.values())


def test_a_fast_baseline_that_changes_what_is_learned_neither_wins_nor_ends_the_search(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = limits_of(MEMORY)
    found = baselines(workload_of(MEMORY), PREDICTOR, Solver(PREDICTOR, limits), limits, hold_all=False)
    packed = next(each.plan for each in found if each.role == Role.PACKED)

    def machine(factor: float = 0.5) -> SimulatedLauncher:
        def factor_of(plan: Plan) -> float:
            # Other plans differ from their predictions, so that there is something to find.
            return factor if plan == packed else 1 + int(plan.id, 16) % 1000 / 20_000

        return SimulatedLauncher(PREDICTOR, factor_of=factor_of)

    bench.search(bench.study(), machine(), trials=5)
    assert bench.standings.entries[bench.standings.winner().number].plan == packed
    monkeypatch.setattr(
        CalibratedPredictor, "_learning_faults", lambda _, plan: ("it is another batch",) if plan == packed else ()
    )
    bench.remembers = False
    sampled = {}
    for factor in (1.0, 0.5):
        bench.events.clear()
        trials = bench.search(bench.study(), machine(factor), trials=20).trials
        assert not any(map(is_shortened, trials))
        sampled[factor] = sum(trial.role == Role.SAMPLED for trial in trials)
        *_, last = (event.best for event in bench.events if isinstance(event, SearchStatus) and event.best)
        assert last.plan != packed
    assert sampled[0.5] >= sampled[1.0] > 0
    winner = bench.standings.entries[bench.standings.winner().number]
    assert winner.plan != packed
    assert packed in {entry.plan for entry in bench.standings.entries}

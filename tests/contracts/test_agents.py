"""Agents of one database: who lives, who leads, who may run what."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from time import monotonic, sleep

import pytest
from sqlalchemy import Engine, text

from autotune.machine import agent as agents
from autotune.machine.agent import Agent
from storage.store import Store
from tests.contracts.conftest import on_both_databases
from tests.values.storage import PADDED_PLAN, WORKLOAD, beats_of_both, best_of, concluded, packed_plan, result_of

BEAT = 0.02
ELSEWHERE = "another host"


def new_study(store: Store) -> str:
    return store.create_study(store.add_workload(WORKLOAD), {}, seed=0).id


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    until = monotonic() + seconds
    while monotonic() < until:
        if holds():
            return True
        sleep(BEAT)
    return holds()


@on_both_databases
def test_an_agent_is_there_until_it_ends(store: Store) -> None:
    with Agent(store, BEAT) as one:
        with Agent(store, BEAT) as other:
            assert not one.is_gone(other.id)
            assert not one.is_alone
        assert within(5, lambda: one.is_gone(other.id))
        assert one.is_alone
    assert not store.beat(one.id)


def test_nobody_and_an_unknown_agent_are_gone(store: Store) -> None:
    with Agent(store, BEAT) as one:
        assert one.is_gone(None)
        assert one.is_gone("0" * 32)


def test_an_agent_elsewhere_is_gone_when_it_is_silent_and_back_when_it_beats(store: Store) -> None:
    other = store.add_agent(ELSEWHERE, "1 2")
    with Agent(store, BEAT) as one:
        assert not one.is_gone(other.id)
        assert within(30, lambda: one.is_gone(other.id))
        store.beat(other.id)
        assert within(30, lambda: not one.is_gone(other.id))


def test_an_agent_that_beats_is_never_gone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    other = store.add_agent(ELSEWHERE, "1 2")
    monkeypatch.setattr(store, "beat", beats_of_both(store, other.id))
    with Agent(store, beat_seconds=3600) as one:
        for _ in range(3 * agents._SILENT_BEATS):
            one._look(1)
            assert not one.is_gone(other.id)


def test_questions_do_not_count_as_silence(store: Store) -> None:
    other = store.add_agent(ELSEWHERE, "1 2")
    with Agent(store, beat_seconds=3600) as one:
        for _ in range(5 * agents._SILENT_BEATS):
            assert not one.is_alone
        assert not one.is_gone(other.id)


@on_both_databases
def test_while_nobody_can_write_nobody_is_gone(store: Store, engine: Engine) -> None:
    """A lock keeps both from giving signs of life: the one that gets through first must not bury the other."""
    other = store.add_agent(ELSEWHERE, "1 2")
    postgresql = engine.dialect.name == "postgresql"
    with Agent(store, BEAT) as one, engine.begin() as connection:
        connection.execute(text("LOCK TABLE autotune_agent" if postgresql else "DELETE FROM autotune_launch"))
        sleep(4 * agents._SILENT_BEATS * BEAT)
        assert one._seen[other.id].silent < agents._SILENT_BEATS


def test_the_process_that_was_killed_here_is_gone_at_once(store: Store, database_url: str) -> None:
    code = (
        "import sys, time; from storage.store import open_store; from autotune.machine.agent import Agent\n"
        "with open_store(sys.argv[1]) as store, Agent(store) as agent:\n"
        "    print(agent.id, flush=True); time.sleep(60)"
    )
    start = subprocess.Popen([sys.executable, "-c", code, database_url], stdout=subprocess.PIPE, text=True)
    with start as process, Agent(store, beat_seconds=3600) as one:
        assert process.stdout is not None
        other = process.stdout.readline().strip()
        assert not one.is_gone(other)
        process.send_signal(signal.SIGKILL)
        assert within(10, lambda: one.is_gone(other))  # a zombie, which nobody has waited for yet
        process.wait()
        assert one.is_gone(other)


def test_a_later_process_of_the_same_number_is_another_one(store: Store) -> None:
    ours = agents.process(os.getpid())
    assert ours is not None
    before = store.add_agent(agents.machine(), f"{os.getpid()} 1")
    with Agent(store, BEAT) as one:
        assert one.is_gone(before.id)
        same = store.add_agent(agents.machine(), ours)
        assert not one.is_gone(same.id)


@on_both_databases
def test_of_agents_that_claim_a_plan_one_gets_it(store: Store) -> None:
    study, gate = new_study(store), Barrier(4)
    ids = [store.add_agent(ELSEWHERE, f"{number} 1").id for number in range(4)]

    def claim(agent_id: str) -> list[str]:
        gate.wait(timeout=30)
        found = (store.claim_trial(study, packed_plan(qv), "predicted", {}, agent_id=agent_id) for qv in range(6))
        return [trial.id for trial in found if trial is not None]

    with ThreadPoolExecutor(4) as threads:
        claimed = [trial for trials in threads.map(claim, ids) for trial in trials]
    running = store.running_trials()
    assert sorted(claimed) == sorted(trial.id for trial in running)
    assert {trial.plan for trial in running} == {packed_plan(qv) for qv in range(6)}
    assert len(running) == 6
    assert {trial.agent_id for trial in running} <= set(ids)


@pytest.mark.parametrize("ends", ["finished", "running"])
def test_a_plan_that_was_tried_cannot_be_claimed_until_its_trial_is_given_up(store: Store, ends: str) -> None:
    study, agent = new_study(store), store.add_agent(ELSEWHERE, "1 1").id
    trial = store.claim_trial(study, PADDED_PLAN, "sampled", {}, agent_id=agent)
    assert trial is not None
    if ends == "finished":
        store.finish_trial(result_of(trial.id))
    assert store.claim_trial(study, PADDED_PLAN, "sampled", {}, agent_id=agent) is None
    store.abandon_trial(trial.id)
    again = store.claim_trial(study, PADDED_PLAN, "sampled", {}, agent_id=agent)
    assert (again is None) == (ends == "finished")


def test_a_plan_is_claimed_again_by_an_agent_that_knows_how_often_it_was_tried(store: Store) -> None:
    study, agent = new_study(store), store.add_agent(ELSEWHERE, "1 1").id
    first = store.claim_trial(study, PADDED_PLAN, "sampled", {}, agent_id=agent)
    assert first is not None
    assert store.claim_trial(study, PADDED_PLAN, "sampled", {}, agent_id=agent, finished=1) is None
    store.finish_trial(result_of(first.id))
    second = store.claim_trial(study, PADDED_PLAN, "sampled", {}, agent_id=agent, finished=1)
    assert second is not None
    store.finish_trial(result_of(second.id))
    assert store.claim_trial(study, PADDED_PLAN, "sampled", {}, agent_id=agent, finished=1) is None


@on_both_databases
def test_agents_that_begin_the_same_search_at_once_join_one_study(store: Store) -> None:
    fingerprint, gate = store.add_workload(WORKLOAD), Barrier(4)

    def join(seed: int) -> str:
        gate.wait(timeout=30)
        return store.join_study(fingerprint, {"trials": 3}, seed, lambda study: study.settings == {"trials": 3}).id

    with ThreadPoolExecutor(4) as threads:
        joined = set(threads.map(join, range(4)))
    assert len(joined) == 1
    other = store.join_study(fingerprint, {"trials": 4}, 0, lambda study: study.settings == {"trials": 4})
    assert {other.id} != joined


def test_a_search_goes_on_though_another_one_was_begun_since(store: Store) -> None:
    fingerprint = store.add_workload(WORKLOAD)

    def join(trials: int) -> str:
        return store.join_study(fingerprint, {"trials": trials}, 0, lambda study: study.settings["trials"] == trials).id

    first, second = join(3), join(4)
    assert join(3) == first
    assert join(4) == second
    concluded(store, best_of(first))
    assert join(3) not in (first, second)


def test_a_search_for_a_trainer_does_not_begin_a_finished_one_anew(store: Store) -> None:
    fingerprint = store.add_workload(WORKLOAD)

    def join(trainer: str | None) -> str:
        settings = {} if trainer is None else {"trainer": trainer}
        return store.join_study(fingerprint, settings, 0, lambda study: study.settings == settings).id

    usual = join(None)
    concluded(store, best_of(usual))
    concluded(store, best_of(join("ms-swift")))
    assert join(None) == usual


def test_one_agent_leads_a_study_until_another_takes_its_place(store: Store) -> None:
    study = new_study(store)
    first, second, third = (store.add_agent(ELSEWHERE, f"{number} 1").id for number in range(3))

    def leader_after(agent: str, instead_of: str | None = None) -> str | None:
        store.lead_study(study, agent, instead_of)
        return store.study(study).leader_id

    assert leader_after(first) == first
    assert leader_after(second) == first
    assert leader_after(second, instead_of=first) == second
    assert leader_after(third, instead_of=first) == second


def test_only_the_leader_concludes_a_study_and_only_once(store: Store) -> None:
    study = new_study(store)
    best = best_of(study)
    first, second = (store.add_agent(ELSEWHERE, f"{number} 1").id for number in range(2))
    assert not store.conclude_study(best, "{}", first)
    store.lead_study(study, first)
    store.lead_study(study, second, instead_of=first)
    assert not store.conclude_study(best, "{}", first)
    assert store.best_plans() == ()
    assert store.study(study).finished is None
    assert store.conclude_study(best, "{}", second)
    finished = store.study(study)
    assert (finished.calibration_state, store.best_plans()) == ("{}", (best,))
    assert not store.conclude_study(best, "[]", second)
    assert store.study(study) == finished

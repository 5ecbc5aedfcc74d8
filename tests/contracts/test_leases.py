"""What an agent has for itself: devices, while it lives."""

import os

import pytest
from sqlalchemy import Engine, text

from autotune.errors import DeviceBusy
from autotune.machine import agent as agents
from autotune.machine.agent import Agent
from storage.errors import ResourceHeld, Superseded
from storage.store import Store
from tests.contracts.conftest import on_both_databases
from tests.values.storage import PADDED_PLAN, WORKLOAD, beats_of_both, packed_plan

BEAT = 0.02
ELSEWHERE = "host-7 boot pid:[1]"


def elsewhere(store: Store) -> str:
    return store.add_agent(ELSEWHERE, "1234 5").id


def test_a_process_that_the_host_hides_is_not_taken_for_dead(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    other = store.add_agent(agents.machine(), f"{os.getpid()} 5")
    assert agents.has_died(other)

    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(agents, "process", lambda _: None)
    monkeypatch.setattr(os, "kill", refused)
    assert not agents.has_died(other)
    assert not agents.lives(other)


@on_both_databases
def test_how_long_an_agent_is_silent_is_counted_by_the_database(store: Store, engine: Engine) -> None:
    one = store.add_agent(ELSEWHERE, "1 2")
    with engine.begin() as connection:
        connection.execute(text("UPDATE autotune_agent SET heard = '2026-01-01 00:00:00+00:00'"))
    silent = store.agents()[one.id].silent_seconds
    assert silent is not None
    assert silent > 24 * 3600
    silent = store.beat(one.id)[one.id].silent_seconds
    assert silent is not None
    assert 0 <= silent < 60


@on_both_databases
def test_devices_are_given_all_together_or_not_at_all(store: Store) -> None:
    one, other = elsewhere(store), elsewhere(store)
    store.take_resources(one, ["GPU-b", "GPU-a"])
    store.take_resources(one, ["GPU-a"])
    with pytest.raises(ResourceHeld, match="GPU-b") as held:
        store.take_resources(other, ["GPU-c", "GPU-b"])
    assert held.value.holder_id == one
    store.take_resources(one, ["GPU-c"])


def test_devices_are_free_when_their_agent_ends(store: Store) -> None:
    one, other = elsewhere(store), elsewhere(store)
    store.take_resources(one, ["GPU-a"])
    store.end_agent(one)
    store.take_resources(other, ["GPU-a"])


@pytest.mark.timeout(20)  # who does not end the agent tries for ever
def test_a_lease_that_an_ended_agent_left_behind_holds_nothing(store: Store, engine: Engine) -> None:
    one, other = elsewhere(store), elsewhere(store)
    store.take_resources(one, ["GPU-a"])
    with engine.begin() as connection:
        connection.execute(text("UPDATE autotune_agent SET ended = started WHERE id = :one"), {"one": one})
    store.take_resources(other, ["GPU-a"])
    with pytest.raises(ResourceHeld):
        store.take_resources(elsewhere(store), ["GPU-a"])


@on_both_databases
def test_who_takes_the_place_of_a_silent_agent_ends_it(store: Store) -> None:
    one, other = elsewhere(store), elsewhere(store)
    study = store.create_study(store.add_workload(WORKLOAD), {}, seed=0).id
    store.take_resources(one, ["GPU-a", "GPU-b"])
    running = store.start_trial(study, PADDED_PLAN, "sampled", agent_id=one)
    store.take_resources(other, ["GPU-b"], gone=[one])
    store.take_resources(other, ["GPU-a"])
    with pytest.raises(Superseded, match="Run the command again"):
        store.start_trial(study, PADDED_PLAN, "confirm", agent_id=one)
    with pytest.raises(Superseded):
        store.claim_trial(study, packed_plan(), "sampled", {}, agent_id=one)
    with pytest.raises(Superseded):
        store.take_resources(one, ["GPU-c"])
    assert store.running_trials() == (running,)


def test_devices_of_an_agent_that_lives_are_refused_with_its_place(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = elsewhere(store)
    store.take_resources(other, ["GPU-a"])
    with Agent(store, BEAT) as one:
        monkeypatch.setattr(store, "beat", beats_of_both(store, other))
        with pytest.raises(DeviceBusy, match=r"GPU-a is used by process 1234 on host-7; wait for it"):
            one.take(["GPU-a"])


def test_devices_of_an_agent_that_falls_silent_are_taken_after_a_while(store: Store) -> None:
    other = elsewhere(store)
    store.take_resources(other, ["GPU-a"])
    with Agent(store, BEAT) as one:
        one.take(["GPU-a"])
        assert other not in store.agents()
        with pytest.raises(ResourceHeld):
            store.take_resources(elsewhere(store), ["GPU-a"])


def test_devices_of_a_process_that_died_here_are_taken_at_once(store: Store) -> None:
    dead = store.add_agent(agents.machine(), "1 1")
    store.take_resources(dead.id, ["GPU-a"])
    with Agent(store, beat_seconds=3600) as one:
        one.take(["GPU-a"])

"""Decisions whether to compile layers: one for each workload and length of training."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
from sqlalchemy import create_engine, text

from storage.database.url import parse
from storage.errors import UnknownRecord
from storage.store import Store, open_store
from tests.values.storage import NOON, WORKLOAD, changed, decision_of


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    with open_store(database_url) as store:
        yield store


def test_a_decision_comes_back_and_is_of_one_workload(store: Store) -> None:
    store.add_workload(WORKLOAD)
    plain, compiled = decision_of(310), replace(decision_of(9000, "inductor"), decided=NOON + timedelta(minutes=1))
    assert [store.keep_compile_decision(each) for each in (plain, compiled)] == [plain, compiled]
    assert store.compile_decisions(WORKLOAD.fingerprint) == (compiled, plain)
    assert store.compile_decisions(changed("hardware.devices", 4).fingerprint) == ()


def test_the_first_decision_stays_until_one_is_made_anew(store: Store) -> None:
    store.add_workload(WORKLOAD)
    first, second = decision_of(310), replace(decision_of(310, "inductor"), reason="faster", decided=NOON)
    assert store.keep_compile_decision(first) == store.keep_compile_decision(second) == first
    assert store.keep_compile_decision(second, anew=True) == second
    assert store.compile_decisions(WORKLOAD.fingerprint) == (second,)


def test_agents_that_decide_at_once_have_one_decision(store: Store, database_url: str) -> None:
    store.add_workload(WORKLOAD)

    def decide(number: int) -> str | None:
        with open_store(database_url) as own:
            return own.keep_compile_decision(decision_of(310, "inductor" if number % 2 else None)).compiler

    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(decide, range(8)))
    assert found == {decision.compiler for decision in store.compile_decisions(WORKLOAD.fingerprint)}


def test_a_decision_needs_its_workload_and_a_step(store: Store) -> None:
    with pytest.raises(ValueError, match="a training has at least one step, not 0"):
        decision_of(0)
    with pytest.raises(UnknownRecord, match="no workload"):
        store.keep_compile_decision(decision_of(310))


def test_a_decision_that_cannot_be_read_is_left_out(
    store: Store, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    store.add_workload(WORKLOAD)
    store.keep_compile_decision(decision_of(310))
    engine = create_engine(parse(database_url))
    with engine.begin() as connection:
        connection.execute(text("UPDATE autotune_compile_decision SET steps = -1"))
    engine.dispose()
    assert store.compile_decisions(WORKLOAD.fingerprint) == ()
    assert "left out autotune_compile_decision" in caplog.text

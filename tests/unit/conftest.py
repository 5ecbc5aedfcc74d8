"""Searches on a real database, for the unit tests."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.search import search
from autotune.search.sampling.proposals import database
from storage.store import open_store
from tests.machines.search_bench import Bench


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database file with all tables, Optuna's included."""
    path = tmp_path_factory.mktemp("empty") / "store.db"
    with open_store(f"sqlite:///{path}") as store, database(store.optuna_url):
        pass
    return path


@pytest.fixture
def bench(empty_database: Path, tmp_path: Path) -> Iterator[Bench]:
    path = shutil.copy(empty_database, tmp_path / "tuning.db")
    with open_store(f"sqlite:///{path}") as store:
        yield Bench(tmp_path, store)


@pytest.fixture
def unsatisfied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search goes on though no gain is expected."""
    monkeypatch.setattr(search, "_LEAST_GAIN", -1.0)
    monkeypatch.setattr(search, "_GAIN_IN_NOISE", -1.0)

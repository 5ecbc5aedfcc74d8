"""Searches on a real database, for the unit tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.search import search
from storage.store import open_store
from tests.search_bench import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with open_store(f"sqlite:///{tmp_path}/tuning.db") as store:
        yield Bench(tmp_path, store)


@pytest.fixture
def unsatisfied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search goes on though no gain is expected."""
    monkeypatch.setattr(search, "_LEAST_GAIN", -1.0)
    monkeypatch.setattr(search, "_GAIN_IN_NOISE", -1.0)

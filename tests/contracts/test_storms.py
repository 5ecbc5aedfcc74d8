"""Kills and races, in small; `make storm` runs them in full."""

from pathlib import Path

import pytest

from tests.contracts.conftest import on_both_databases
from tests.programs.storms import race, storm


@pytest.mark.parametrize(("processes", "kills"), [(2, 3), pytest.param(6, 12, marks=pytest.mark.long)])
def test_no_kill_loses_or_doubles_a_result(processes: int, kills: int, database_url: str, tmp_path: Path) -> None:
    report = storm(database_url, tmp_path, processes=processes, trials=8, kills=kills)
    assert report.is_harmless(), report
    assert report.trials >= 8 * processes
    assert report.kills >= processes
    assert report.kills_in_commits >= 1


@pytest.mark.parametrize("processes", [4, pytest.param(8, marks=pytest.mark.long)])
@on_both_databases
def test_processes_that_open_one_new_database_at_once_all_succeed(
    processes: int, database_url: str, tmp_path: Path
) -> None:
    assert race(database_url, tmp_path, processes=processes) == []

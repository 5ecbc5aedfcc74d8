"""Kills and races, in small; `make storm` runs them in full."""

from pathlib import Path

from tests.storms import race, storm


def test_no_kill_loses_or_doubles_a_result(database_url: str, tmp_path: Path) -> None:
    report = storm(database_url, tmp_path, processes=6, trials=8, kills=12)
    assert report.is_harmless(), report
    assert report.trials == 48
    assert report.kills >= 6
    assert report.kills_in_commits >= 1


def test_processes_that_open_one_new_database_at_once_all_succeed(database_url: str, tmp_path: Path) -> None:
    assert race(database_url, tmp_path, processes=8) == []

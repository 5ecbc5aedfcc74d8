"""Hostile files of every kind, in small; `make test-long` tries more, and `make fuzz` many more."""

import pytest

from tests.fuzz.fuzz import LIMITS, fuzz


@pytest.mark.timeout(1200)  # some seconds on two cores that do nothing else
@pytest.mark.parametrize("cases", [20, pytest.param(200, marks=pytest.mark.long)])
def test_any_file_is_taken_or_refused_with_a_message_in_bounded_time_and_memory(cases: int) -> None:
    tallies = fuzz(cases, seed=0)
    assert [fault for tally in tallies for fault in tally.faults] == []
    assert any(tally.refused for tally in tallies)
    for tally in tallies:
        assert tally.taken, tally
        assert tally.refused or cases < 200, tally  # of few files of one kind, all may be harmless
        assert tally.most_seconds <= LIMITS.cpu_seconds
        assert tally.most_mebibytes <= LIMITS.mebibytes

"""Hostile files of every kind, in small; `make fuzz` tries many more."""

import pytest

from tests.fuzz.fuzz import LIMITS, fuzz


@pytest.mark.timeout(1200)  # some seconds on two cores that do nothing else
@pytest.mark.long
def test_any_file_is_taken_or_refused_with_a_message_in_bounded_time_and_memory() -> None:
    tallies = fuzz(200, seed=0)
    assert [fault for tally in tallies for fault in tally.faults] == []
    for tally in tallies:
        assert tally.taken, tally
        assert tally.refused, tally
        assert tally.most_seconds <= LIMITS.cpu_seconds
        assert tally.most_mebibytes <= LIMITS.mebibytes

"""Values that cannot contradict themselves, and that survive JSON."""

from dataclasses import replace
from datetime import UTC, datetime
from math import inf, nan
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.records import TrialResult
from tests.values.storage import OUTCOMES, best_of, result_of
from trials import wire

TRIAL = "0123456789abcdef" * 2
results = st.builds(
    lambda outcome, seconds, error, finished: replace(
        result_of(TRIAL, outcome),
        epoch_seconds=seconds if outcome.kind == "completed" else None,
        epoch_seconds_error=error,
        finished=finished,
    ),
    st.sampled_from(list(OUTCOMES.values())),
    st.floats(allow_nan=False, allow_infinity=False),
    st.none() | st.floats(min_value=0, allow_infinity=False),
    st.datetimes(min_value=datetime(1970, 1, 2), max_value=datetime(2100, 1, 1), timezones=st.timezones()),
)


@given(results)
def test_a_result_comes_back_from_json_equal(result: TrialResult) -> None:
    assert wire.decode(TrialResult, wire.encode(result)) == result


def test_a_local_time_that_happens_twice_a_year_comes_back_equal() -> None:
    for fold in (0, 1):
        repeated = datetime(2026, 10, 25, 2, 30, fold=fold, tzinfo=ZoneInfo("Europe/Berlin"))
        result = replace(result_of(TRIAL), finished=repeated)
        assert wire.decode(TrialResult, wire.encode(result)) == result
        assert result.finished == datetime(2026, 10, 25, fold, 30, tzinfo=UTC)


@pytest.mark.parametrize("trial_id", ["", "../" * 11, TRIAL.upper(), TRIAL + "\n", TRIAL[1:]])
def test_a_trial_id_that_could_be_another_file_is_refused(trial_id: str) -> None:
    with pytest.raises(ValueError, match="32 hexadecimal digits"):
        result_of(trial_id)


@pytest.mark.parametrize("name", ["rejected", "crash"])
def test_only_a_completed_trial_has_epoch_seconds(name: str) -> None:
    with pytest.raises(ValueError, match="has an estimate of epoch_seconds"):
        replace(result_of(TRIAL, OUTCOMES[name]), epoch_seconds=1.0)


@pytest.mark.parametrize("value", [nan, inf])
def test_epoch_seconds_are_finite(value: float) -> None:
    with pytest.raises(ValueError, match="must be finite"):
        replace(result_of(TRIAL), epoch_seconds=value)
    with pytest.raises(ValueError, match="must be finite"):
        replace(result_of(TRIAL), epoch_seconds_error=value)


def test_a_time_without_zone_is_refused() -> None:
    naive = datetime.now(UTC).replace(tzinfo=None)
    with pytest.raises(ValueError, match="no time zone"):
        replace(result_of(TRIAL), finished=naive)
    with pytest.raises(ValueError, match="no time zone"):
        best_of(TRIAL, created=naive)

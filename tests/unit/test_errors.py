import pytest

from autotune import errors
from storage.errors import BadUrl, DatabaseTooNew, DatabaseUnavailable, UnknownPlan
from trials.errors import DataError


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.AutotuneError(), 1),
        (DataError(), 1),
        (errors.JobError(), 2),
        (errors.HardwareError(), 2),
        (BadUrl(), 2),
        (UnknownPlan(), 2),
        (errors.PredictError(), 2),
        (errors.ProfileError(), 2),
        (errors.NoFeasiblePlan(), 3),
        (errors.NoProfile(), 3),
        (DatabaseUnavailable(), 4),
        (DatabaseTooNew(), 5),
        (errors.DeviceBusy(), 6),
    ],
    ids=repr,
)
def test_each_error_has_the_exit_code_of_its_kind(error: Exception, code: int) -> None:
    assert errors.exit_code(error) == code

import pytest

import autotune
import storage.errors
import trials.errors
from autotune import errors
from storage.errors import BadUrl, DatabaseUnavailable, OtherVersion, UnknownPlan
from trials.errors import AutotuneError, DataError


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (AutotuneError(), 1),
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
        (OtherVersion(), 5),
        (errors.DeviceBusy(), 6),
    ],
    ids=repr,
)
def test_each_error_has_the_exit_code_of_its_kind(error: Exception, code: int) -> None:
    assert errors.exit_code(error) == code


def test_one_public_name_catches_the_errors_of_all_packages() -> None:
    modules = (errors, storage.errors, trials.errors)
    found = [each for module in modules for each in vars(module).values() if isinstance(each, type)]
    raised = [each for each in found if issubclass(each, Exception)]
    assert len(raised) > 40
    assert [each for each in raised if not issubclass(each, autotune.AutotuneError)] == []

import math

import pytest

from autotune.cli.context import Options
from trials.errors import AutotuneError

OPTIONS = Options(as_json=True, database=None, verbose=0, quiet=False)


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_a_result_with_a_number_that_json_does_not_have_is_an_error(
    number: float, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AutotuneError, match=r"the result cannot be written as JSON .*; run the command without --json"):
        OPTIONS.give(lambda: {"seconds": [number]}, lambda: "")
    assert capsys.readouterr().out == ""

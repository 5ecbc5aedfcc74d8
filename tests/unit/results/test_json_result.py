import math
import os
import subprocess
import sys

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


def test_an_import_of_deepspeed_writes_nothing_into_a_result() -> None:
    """It logs to stdout which accelerator it has found."""
    command = "guarded(lambda options: __import__('deepspeed'), starts_ranks=False)"
    code = f"from autotune.cli.context import guarded\n{command}(as_json=True, db=None, verbose=0, quiet=False)"
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    answer = subprocess.run((sys.executable, "-c", code), env=environment, capture_output=True, text=True, check=True)
    assert (answer.stdout, answer.stderr) == ("", "")

"""Scripts that run in a process which is there already, such as a rank of `tests.machines.own_ranks`."""

import contextlib
import io
import os
import runpy
import sys
from collections.abc import Mapping, Sequence


def output_of(script: str, arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run a script as the main program, with these variables; return what it prints."""
    os.environ.update(environment)
    if os.environ["WORLD_SIZE"] == "1":  # as without torchrun
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            del os.environ[name]
    sys.argv = [script, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path(script, run_name="__main__")
    return output.getvalue()

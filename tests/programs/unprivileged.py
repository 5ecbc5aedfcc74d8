"""Commands of a real user to whom the permissions of files apply, also where the tests run as root."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_NOBODY = 65534
_SETPRIV = shutil.which("setpriv")
# To read anything is allowed, since the interpreter and the tests' files may lie in folders of root alone.
_RIGHTS = "+dac_read_search"


def autotune(*arguments: str, **variables: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command with these environment variables: as the user `nobody` if the tests run as root."""
    command = [sys.executable, "-P", "-m", "autotune", *arguments]
    if os.geteuid() == 0:
        if _SETPRIV is None:
            pytest.skip("no command runs without the rights of root: setpriv of util-linux is not installed")
        user = [f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups"]
        command = [_SETPRIV, *user, f"--inh-caps={_RIGHTS}", f"--ambient-caps={_RIGHTS}", *command]
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

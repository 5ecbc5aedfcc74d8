"""Who holds a device."""

import os
import subprocess
import sys
from pathlib import Path

from filelock import FileLock

from autotune.machine.devices import holder

HOLD = """
import sys; from filelock import FileLock
lock = FileLock(sys.argv[1])
lock.acquire(); print(flush=True); input()
"""


def test_the_holder_of_a_lock_is_named_without_its_password(tmp_path: Path) -> None:
    file = tmp_path / "devices.lock"
    command = [sys.executable, "-c", HOLD, str(file), "--db", "postgresql://me:c4nary@host/results"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = holder(file)
        process.communicate("\n", timeout=60)
    assert found.startswith(f"process {process.pid}, `{sys.executable} -c ")
    assert "--db postgresql://me:***@host/results`, begun 20" in found
    assert "c4nary" not in found


def test_a_holder_that_is_not_seen_is_not_invented(tmp_path: Path) -> None:
    assert holder(tmp_path / "none") == "a process that is not seen from here"
    with FileLock(tmp_path / "mine"):
        assert f"process {os.getpid()}, " in holder(tmp_path / "mine")

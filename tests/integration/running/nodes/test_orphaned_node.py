"""A node whose torchrun has ended before it: the process that is its parent then is none of its own."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.ranks

REAPER = """
import ctypes, os, subprocess, sys

ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER, as `systemd --user` is
torchrun = subprocess.Popen(["sh", "-c", '"$@"; true', "torchrun", sys.executable, "-P", "-c", sys.argv[1]], stdout=-1)
node = int(torchrun.stdout.readline())
torchrun.kill()
torchrun.wait()
print(os.waitstatus_to_exitcode(os.waitpid(node, 0)[1]))
"""
NODE = """
import os, time
from trials.run.node import AgentAccess, _HeartBeat

torchrun = os.getppid()
heart = _HeartBeat(AgentAccess(address="127.0.0.1:9", token="t", number=1), "node/1/1", lambda _: None)
print(os.getpid(), flush=True)
while os.getppid() == torchrun:
    time.sleep(0.01)
heart._give_up("is not heard any more")
"""


def test_a_node_whose_torchrun_was_killed_ends_no_other_process() -> None:
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "none"}
    ran = subprocess.run(
        [sys.executable, "-c", REAPER, NODE], env=environment, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (0, f"{os.EX_UNAVAILABLE}\n"), ran.stderr

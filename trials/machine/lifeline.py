"""Ending a process together with its parent, even while it is stopped and cannot act itself."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
"""prctl(2), of Linux."""


def end_with(parent: int) -> None:
    """Let the system kill this process when the thread of process `parent` that started it ends.

    Children do not inherit this. End at once when `parent` has ended already.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    # The parent may have ended before the call, for which no signal comes.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)

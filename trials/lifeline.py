"""A process that ends with the one that started it, also where it is stopped and can do nothing itself."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
"""prctl(2), of Linux."""


def end_with(parent: int) -> None:
    """Has the system kill this process when the thread of process `parent` that started it ends.

    Children do not inherit this. Ends at once when `parent` is gone already.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)

"""What the installed torch was built for; torch is not imported here."""

import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from autotune.machine.hardware import software

_SECONDS = 120.0
_ASK = "import torch; print(*torch.cuda.get_arch_list())"


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    version: str
    cuda: tuple[int, int] | None = None
    """The version of CUDA; None for a build without it."""
    architectures: tuple[str, ...] = ()
    """`sm_90` for kernels of compute capability 9.0, `compute_90` for code that newer devices compile; empty where they
    are not known."""


def torch_build(*, architectures: bool = False) -> TorchBuild:
    """Describe the build. Its architectures take a process that imports torch, for seconds, so only on request."""
    spec = find_spec("torch")
    # The version file is read as text: to import a part of torch imports all of it, for seconds.
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    found = re.search(r"^cuda\b.*= '(\d+)\.(\d+)", file.read_text() if file else "", re.MULTILINE)
    return TorchBuild(
        version=software().torch,
        cuda=(int(found[1]), int(found[2])) if found else None,
        architectures=_architectures() if architectures else (),
    )


def runs_on(capability: str, architectures: tuple[str, ...]) -> bool:
    """Return whether a device of this compute capability, such as `8.6`, runs kernels of one of the architectures.

    Kernels run on devices of the same major and no lower minor number, and are compiled on all newer devices from
    `compute_*` (CUDA C++ Programming Guide, compatibility). A letter behind the number, as in `sm_90a`, names this
    device alone.
    """
    device = tuple(map(int, capability.split(".")))
    for architecture in architectures:
        kind, _, number = architecture.partition("_")
        if number.isdigit():
            built = int(number[:-1]), int(number[-1])
            if built <= device and (kind == "compute" or built[0] == device[0]):
                return True
        elif number[:-1].isdigit() and (int(number[:-2]), int(number[-2])) == device:
            return True
    return False


def _architectures() -> tuple[str, ...]:
    asked = subprocess.run(
        # -P: a module called torch in the current folder is not the installed one.
        [sys.executable, "-P", "-c", _ASK],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    return tuple(asked.stdout.split()) if asked.returncode == 0 else ()

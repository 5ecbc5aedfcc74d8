"""What keeps layers from being compiled: layouts whose ranks exchange something inside of them, and missing tools."""

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

from trials.errors import InvalidPlan, NoCompiler
from trials.plan import Layout

INSTALL = "install it, or remove training.compile from the job file"


def check_compilable(layout: Layout) -> None:
    """Raise InvalidPlan for a layout whose layers are compiled otherwise than in a profile."""
    if layout.zero == 3:
        why, other = "ZeRO 3, whose hooks gather weights inside of a layer", "ZeRO 2"
    elif layout.tensor > 1:
        why = f"tensor degree {layout.tensor}, whose ranks exchange states inside of a layer"
        other = "tensor 1"
    elif layout.offload != "none":
        why, other = "offload, whose hooks see what each operation keeps", "offload none"
    elif layout.zero_bubble:
        why, other = "zero_bubble, whose backward passes defer weight gradients", "zero_bubble false"
    else:
        return
    raise InvalidPlan(f"training.compile does not work with {why}; use {other}, or remove training.compile")


def check_compiler(accelerator: str) -> None:
    """Raise NoCompiler for a tool without which layers cannot be compiled for this kind of device."""
    if (missing := missing_tool(accelerator)) is not None:
        raise NoCompiler(f"training.compile needs {missing}; {INSTALL}")


def missing_tool(accelerator: str) -> str | None:
    """Return what torch.compile needs for `cpu` or `cuda` and does not find here; None where nothing is missing."""
    if accelerator == "cuda" and importlib.util.find_spec("triton") is None:
        return "the package triton, which is not installed"
    # As torch and Triton look for them.
    variable, usual = ("CC", ("gcc", "clang")) if accelerator == "cuda" else ("CXX", ("g++",))
    given = os.environ.get(variable)
    if not any(map(shutil.which, [given] if given else usual)):
        return f"a compiler, and {variable}={given} is none" if given else f"a compiler ({' or '.join(usual)})"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return None if header.is_file() else f"Python's headers, and there is no {header}"

"""What nodes that work together compare: the versions, the source files and the devices of each."""

import hashlib
import platform
from functools import cache
from importlib.metadata import version
from pathlib import Path

import autotune
import trials
from autotune.machine.hardware import software, whole_machine
from trials.launchers.node_messages import NodeFacts


def node_facts() -> NodeFacts:
    """Describe this machine, with all devices that ranks may use."""
    return NodeFacts(
        host=platform.node(),
        package=version("vlm-autotune"),
        code=_code_digest(),
        software=software(),
        hardware=whole_machine(),
    )


@cache
def _code_digest() -> str:
    """Return a digest of the modules: between two releases, files differ under the same version."""
    found = hashlib.sha256()
    for package in (autotune, trials):
        folder = Path(package.__path__[0])
        for file in sorted(folder.rglob("*.py")):
            found.update(f"{package.__name__}/{file.relative_to(folder)}\n".encode())
            found.update(file.read_bytes())
    return found.hexdigest()[:16]

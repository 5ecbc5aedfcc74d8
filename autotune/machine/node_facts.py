"""What nodes that work together compare: the versions, the source files and the devices of each."""

import platform
from functools import cache
from importlib.metadata import version

import autotune
import trials
from autotune.machine.hardware import software, whole_machine
from trials.data.source_code import code_digest
from trials.launchers.node_messages import NodeFacts


def node_facts() -> NodeFacts:
    """Describe this machine, with all devices that ranks may use."""
    return NodeFacts(
        host=platform.node(),
        package=version("vlm-autotune"),
        code=_code(),
        software=software(),
        hardware=whole_machine(),
    )


@cache
def _code() -> str:
    return code_digest(autotune, trials)[:16]

"""Why nodes cannot work together: other devices, versions or files."""

from dataclasses import replace
from typing import Any

import pytest

from autotune.machine.node import node_facts
from trials.launchers.node_messages import NodeFacts, difference_of

OWN = replace(node_facts(), host="node-a")


def with_hardware(**fields: Any) -> NodeFacts:
    return replace(OWN, host="node-b", hardware=replace(OWN.hardware, **fields))


def test_nodes_that_are_alike_work_together() -> None:
    assert difference_of(with_hardware(), OWN, OWN.hardware.devices) is None


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (with_hardware(device_name="NVIDIA L4"), "has device name NVIDIA L4, and node-a has "),
        (with_hardware(device_memory_bytes=1 << 30), "has device memory bytes 1073741824, and node-a has "),
        (with_hardware(devices=0), "has 0 devices, but the job uses 1 of each node; lower hardware.devices"),
        (replace(OWN, package="0.0.1"), "has vlm-autotune 0.0.1, and node-a has "),
        (replace(OWN, software=replace(OWN.software, torch="2.0.0")), "has torch 2.0.0, and node-a has "),
        (replace(OWN, code="other"), "has other files of vlm-autotune "),
        (replace(OWN, problem="its devices are used by others"), "its devices are used by others"),
    ],
)
def test_a_difference_is_named(facts: NodeFacts, reason: str) -> None:
    found = difference_of(facts, OWN, 1)
    assert found is not None
    assert found.startswith(reason)

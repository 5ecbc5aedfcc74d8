"""Why nodes cannot work together: other devices, versions or files."""

from dataclasses import replace
from typing import Any

import pytest

from autotune.machine.node import node_facts
from trials.launchers.node_messages import NodeFacts, difference_of, shortage_of

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
        (with_hardware(driver="535.5"), "has driver 535.5, and node-a has None; install the same on both"),
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


def test_devices_that_are_connected_otherwise_are_refused_where_ranks_use_them() -> None:
    bridged = replace(OWN, hardware=replace(OWN.hardware, devices=4, topology="0-1 NV4, 0-2 SYS, 1-2 SYS"))
    without = replace(bridged, host="node-b", hardware=replace(bridged.hardware, topology="0-1 PHB, 0-2 SYS, 1-2 SYS"))
    assert difference_of(without, bridged, 1) is None
    found = difference_of(without, bridged, 2)
    assert found is not None
    assert found.startswith("has the connections 0-1 PHB between its devices, and node-a has 0-1 NV4; choose nodes")
    third = replace(bridged, hardware=replace(bridged.hardware, topology="0-1 NV4, 0-2 PHB, 1-2 SYS"))
    assert difference_of(third, bridged, 2) is None


def test_a_node_with_less_than_is_planned_for_is_told() -> None:
    own = replace(OWN, hardware=replace(OWN.hardware, cpu_cores=64, ram_bytes=1 << 40))
    small = replace(own, hardware=replace(own.hardware, cpu_cores=4, ram_bytes=64 << 30))
    assert shortage_of(small, own) == ("4 CPU cores where node-a has 64 and 64 GiB of memory where node-a has 1024 GiB")
    assert shortage_of(own, small) is shortage_of(own, own) is None

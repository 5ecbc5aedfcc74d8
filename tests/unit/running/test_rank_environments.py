import os
import socket
from types import SimpleNamespace

import psutil
import pytest

from trials.launchers.commands import rank_environments

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def test_groups_have_devices_and_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = [each for group in range(2) for each in rank_environments(2, "cuda", group=group, groups=2)]
    assert [each["LOCAL_RANK"] for each in found] == ["0", "1", "2", "3"]
    assert [each["RANK"] for each in found] == ["0", "1", "0", "1"]
    assert {each["OMP_NUM_THREADS"] for each in found} == {"2"}


def test_cuda_counts_devices_as_the_agent_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert {each["CUDA_DEVICE_ORDER"] for each in rank_environments(2, "cuda")} == {"PCI_BUS_ID"}


@pytest.mark.parametrize(
    ("address", "named", "expected"),
    [
        ("192.0.2.7", None, ("eth0", "=eth0")),
        ("192.0.2.7", "ib0", ("ib0", "ib0")),
        ("127.0.0.1", "ib0", ("lo", "=lo")),
    ],
)
def test_ranks_of_several_machines_use_the_interface_that_the_user_names_and_of_one_the_loopback(
    address: str, named: str | None, expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    eth0 = [SimpleNamespace(family=socket.AF_INET, address="192.0.2.7")]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": eth0})
    for name in INTERFACES:
        monkeypatch.delenv(name, raising=False)
        if named:
            monkeypatch.setenv(name, named)
    (found,) = rank_environments(1, "cpu", address=address)
    assert tuple(found[name] for name in INTERFACES) == expected

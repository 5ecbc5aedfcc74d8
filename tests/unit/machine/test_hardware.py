import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import HardwareError
from autotune.machine.hardware import (
    Machine,
    choose,
    cpu_name,
    default_memory_limit,
    default_workers,
    probe_hardware,
    software,
    steady,
    this_machine,
    usable,
    visible,
)
from autotune.machine.nvml import Accelerator

GIB = 1 << 30
MACHINE = Machine(cpu_name="Example 9000", cpu_cores=4, ram_bytes=64 * GIB)
GPUS = tuple(
    Accelerator(
        uuid=f"GPU-{letter}0",
        name="NVIDIA H200",
        memory_bytes=140 * GIB,
        compute_capability="9.0",
        driver="580.1",
    )
    for letter in "abc"
)


def test_every_visible_accelerator_is_the_default() -> None:
    hardware = choose(None, machine=MACHINE, found=GPUS)
    assert (hardware.accelerator, hardware.devices, hardware.device_name) == ("cuda", 3, "NVIDIA H200")
    assert (hardware.compute_capability, hardware.driver) == ("9.0", "580.1")


def test_a_job_may_use_fewer_accelerators() -> None:
    assert choose(2, machine=MACHINE, found=GPUS).devices == 2


def test_unequal_accelerators_count_as_the_weakest() -> None:
    small = dataclasses.replace(GPUS[0], name="NVIDIA L4", memory_bytes=24 * GIB, compute_capability="8.9")
    hardware = choose(
        None, machine=MACHINE, found=(GPUS[0], small, dataclasses.replace(small, compute_capability="10.0"))
    )
    assert hardware.device_name == "NVIDIA H200 + NVIDIA L4"
    assert (hardware.device_memory_bytes, hardware.compute_capability) == (24 * GIB, "8.9")


def test_devices_below_their_default_power_are_other_hardware() -> None:
    free = choose(3, machine=MACHINE, found=GPUS)
    capped = [
        dataclasses.replace(gpu, power_limit_watts=watts) for gpu, watts in zip(GPUS, (None, 300, 400), strict=True)
    ]
    hardware = choose(3, machine=MACHINE, found=capped)
    assert (hardware.power_limit_watts, f"{hardware}") == (300, "3 x NVIDIA H200 limited to 300 W")
    assert hardware.fingerprint != free.fingerprint
    # As an earlier version computed it: stored measurements keep their key.
    assert (free.power_limit_watts, free.fingerprint) == (None, "6843119e829682bc")


def test_more_ranks_than_accelerators_are_refused_with_the_arithmetic() -> None:
    with pytest.raises(HardwareError, match="asks for 5 ranks but 3 accelerators are visible, 2 too few; set it to 3"):
        choose(5, machine=MACHINE, found=GPUS)


def test_without_accelerators_two_ranks_share_the_processor() -> None:
    hardware = choose(None, machine=MACHINE, found=())
    assert (hardware.accelerator, hardware.devices, hardware.device_name) == ("cpu", 2, "Example 9000")
    assert hardware.device_memory_bytes == hardware.ram_bytes == 64 * GIB
    assert hardware.compute_capability is hardware.driver is None


def test_more_than_four_cpu_ranks_per_core_are_refused() -> None:
    assert choose(16, machine=MACHINE, found=()).devices == 16
    with pytest.raises(HardwareError, match="4 CPU cores can run at most 4 x 4 = 16; set it to 16 or less"):
        choose(17, machine=MACHINE, found=())


@pytest.mark.parametrize(
    ("choice", "uuids"),
    [
        (None, ["GPU-a0", "GPU-b0", "GPU-c0"]),
        ("", []),
        ("-1", []),
        ("2,0", ["GPU-c0", "GPU-a0"]),
        ("1, 7, 0", ["GPU-b0"]),
        ("GPU-c", ["GPU-c0"]),
        ("GPU-", []),
        ("GPU-a0,GPU-b0", ["GPU-a0", "GPU-b0"]),
        ("0,1,0", []),
        ("none", []),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(choice: str | None, uuids: list[str]) -> None:
    assert [one.uuid for one in visible(GPUS, choice)] == uuids


def test_a_cpu_build_of_torch_leaves_accelerators_unused_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert usable(GPUS, torch_version="2.13.0") == GPUS
    assert not caplog.records
    assert usable(GPUS, torch_version="2.13.0+cpu") == ()
    assert "torch 2.13.0+cpu cannot use the NVIDIA H200 here" in caplog.text


@pytest.mark.parametrize(("memory", "expected"), [(140 * GIB, 133 * GIB), (10 * GIB, 9 * GIB)])
def test_an_accelerator_keeps_a_reserve(memory: int, expected: int) -> None:
    gpu = dataclasses.replace(GPUS[0], memory_bytes=memory)
    assert default_memory_limit(choose(1, machine=MACHINE, found=(gpu,))) == expected


@pytest.mark.parametrize(
    ("cores", "groups", "expected"), [(1, 1, 0), (3, 1, 0), (9, 1, 2), (9, 2, 0), (18, 2, 2), (192, 1, 4)]
)
def test_ranks_on_accelerators_get_workers_on_the_cores_that_they_leave(cores: int, groups: int, expected: int) -> None:
    machine = dataclasses.replace(MACHINE, cpu_cores=cores)
    hardware = choose(3, machine=machine, found=GPUS)
    assert default_workers(hardware, groups) == expected
    assert default_workers(hardware, groups, shared_bytes=64 << 20) == 0


def test_cpu_ranks_leave_no_core_to_workers() -> None:
    assert default_workers(choose(2, machine=dataclasses.replace(MACHINE, cpu_cores=64), found=())) == 0


# --- groups of devices ---


def test_the_accelerators_are_shared_out_to_the_groups_with_a_warning_that_a_training_leaves_some(
    caplog: pytest.LogCaptureFixture,
) -> None:
    half = len(GPUS) // 2
    assert choose(None, machine=MACHINE, found=GPUS, groups=2).devices == half
    (warning,) = caplog.messages
    assert warning.startswith(f"each trial, and the training, uses {half} of the {len(GPUS)} accelerators, because of")
    caplog.clear()
    choose(half, machine=MACHINE, found=GPUS, groups=2)
    choose(None, machine=MACHINE, found=GPUS)
    assert not caplog.messages


def test_more_groups_than_accelerators_are_refused_with_a_number_that_fits() -> None:
    with pytest.raises(HardwareError, match=rf"asks for 2 times 3 ranks.*set hardware.devices to {len(GPUS) // 2} or"):
        choose(3, machine=MACHINE, found=GPUS, groups=2)


def test_groups_on_a_cpu_share_its_cores_and_memory(caplog: pytest.LogCaptureFixture) -> None:
    hardware = choose(1, machine=MACHINE, found=(), groups=4)
    assert (hardware.devices, hardware.cpu_cores) == (1, 1)
    assert choose(1, machine=MACHINE, found=(), groups=8).cpu_cores == 1
    assert caplog.messages[0].startswith("each trial, and the training, uses 1 of the 4 CPU cores, because of")
    assert default_memory_limit(hardware, groups=4) == default_memory_limit(choose(4, machine=MACHINE, found=()))
    with pytest.raises(HardwareError, match=r"lower search\.parallel"):
        choose(5, machine=MACHINE, found=(), groups=4)


@given(st.integers(1, 16))
def test_cpu_ranks_leave_a_fifth_of_the_memory(ranks: int) -> None:
    hardware = choose(ranks, machine=MACHINE, found=())
    total = default_memory_limit(hardware) * ranks
    assert 0 <= MACHINE.ram_bytes * 8 // 10 - total < ranks


@given(st.integers(0, 1 << 50))
def test_a_steady_size_is_at_most_three_percent_less(size: int) -> None:
    assert size * 31 / 32 <= steady(size) <= size


def test_a_reboot_does_not_make_another_machine() -> None:
    assert steady(25_283_440_640) == steady(25_283_440_640 - (3 << 20))


def test_the_processor_is_called_by_its_model() -> None:
    assert cpu_name("processor\t: 0\nmodel name\t: AMD EPYC: 7\nmodel name\t: other\n") == "AMD EPYC: 7"
    assert cpu_name("CPU implementer\t: 0x41\n")


def test_this_machine_can_be_probed() -> None:
    hardware = probe_hardware(1)
    assert hardware == probe_hardware(1)
    assert hardware.devices == 1
    assert 0 < default_memory_limit(hardware) < hardware.device_memory_bytes
    assert this_machine().cpu_cores == hardware.cpu_cores > 0


def test_versions_are_those_that_are_installed() -> None:
    import torch  # noqa: PLC0415 - to compare

    assert software().torch == torch.__version__


def linked(*rows: str) -> tuple[Accelerator, ...]:
    """GPUS with the connections of each to all, `-` to itself."""
    return tuple(
        dataclasses.replace(
            gpu, links=tuple((GPUS[other].uuid, link) for other, link in enumerate(row.split()) if link != "-")
        )
        for gpu, row in zip(GPUS, rows, strict=True)
    )


@pytest.mark.parametrize(
    ("rows", "link", "topology"),
    [
        (("- NV18 NV18", "NV18 - NV18", "NV18 NV18 -"), "NV18", "0-1 NV18, 0-2 NV18, 1-2 NV18"),
        (("- NV4 NV12", "NV4 - NV12", "NV12 NV12 -"), "NV4", "0-1 NV4, 0-2 NV12, 1-2 NV12"),
        (("- NV4 SYS", "NV4 - PIX", "SYS PIX -"), "SYS", "0-1 NV4, 0-2 SYS, 1-2 PIX"),
        (("- PSB NODE", "PSB - PXB", "NODE PXB -"), "NODE", "0-1 PSB, 0-2 NODE, 1-2 PXB"),
        (("- NV4 -", "NV4 - -", "- - -"), None, None),
    ],
)
def test_the_slowest_connection_and_that_of_every_pair_are_returned(
    rows: tuple[str, ...], link: str | None, topology: str | None
) -> None:
    hardware = choose(None, machine=MACHINE, found=linked(*rows))
    assert (hardware.link, hardware.topology, hardware.nodes) == (link, topology, 1)


def test_one_device_has_no_connection_and_two_of_three_have_theirs() -> None:
    found = linked("- NV4 SYS", "NV4 - PIX", "SYS PIX -")
    assert choose(1, machine=MACHINE, found=found).link is None
    assert choose(2, machine=MACHINE, found=found).topology == "0-1 NV4"

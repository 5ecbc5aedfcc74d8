"""The accelerators that NVIDIA's management library sees; no CUDA context is made, and torch is not imported."""

import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pynvml

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One GPU, or one MIG instance of it."""

    uuid: str
    """As `CUDA_VISIBLE_DEVICES` spells it: `GPU-...` or `MIG-...`."""
    name: str
    memory_bytes: int
    compute_capability: str
    """`9.0`"""
    driver: str


def accelerators() -> tuple[Accelerator, ...]:
    """Every accelerator of the machine, in the order of the PCI bus; none without NVIDIA's driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        _log.debug("no accelerators: %s", error)
        return ()
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return tuple(_describe(part, handle, driver) for handle in handles for part in _parts(handle))
    except pynvml.NVMLError as error:
        _log.warning("the accelerators cannot be read and are not used: %s", error)
        return ()
    finally:
        pynvml.nvmlShutdown()


def _parts(handle: Any) -> Iterator[Any]:
    """The device itself, or its instances where it is divided."""
    divided = False
    with suppress(pynvml.NVMLError):  # most devices cannot be divided
        divided = pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    if not divided:
        yield handle
        return
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with suppress(pynvml.NVMLError_NotFound):  # places for instances that do not exist
            yield pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)


def _describe(part: Any, device: Any, driver: str) -> Accelerator:
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(device)
    return Accelerator(
        uuid=pynvml.nvmlDeviceGetUUID(part),
        name=pynvml.nvmlDeviceGetName(part),
        memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(part).total),
        compute_capability=f"{major}.{minor}",
        driver=driver,
    )

"""The devices that are measured, or the CPU that pretends to be one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from autotune.machine.hardware import probe_hardware
from benchmarks.devices.models import Model
from benchmarks.devices.public_models import internvl3_2b, qwen2_5_vl_3b, small_pages
from trials.plan import Offload
from trials.tasks.request import ProbeSizes
from trials.workload import Hardware

_FAMILIES = ("internvl", "qwen2-5-vl", "llava-onevision")
_PEAK_FLOPS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "L40S": 362e12,
    "L4": 121e12,
}
"""Dense bfloat16 operations per second by a part of the device's name, from NVIDIA's data sheets; the first that
matches counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSizes:
    """Sizes for which kernels are compared with the usual way to compute the same."""

    attention: Mapping[str, tuple[int, int, int, tuple[int, ...], bool]]
    """Heads, those of key and value, their width, the lengths of samples, and whether attention is causal."""
    patches: int
    head: tuple[int, int, int, float]
    """Tokens, width, vocabulary, and the share of the tokens with a label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RivalCase:
    """A model with its data that autotune and the plain packed loop train."""

    name: str
    make: Callable[[Path, int], tuple[Path, Path]]
    """Write a number of samples; return the model's folder and the annotation file."""
    batch: int
    limit: str | None = None
    """Memory of the device."""
    trials: int = 12
    time_limit: str = "90s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where the benchmark runs, and with what sizes."""

    accelerator: str
    """As in `Hardware`."""
    name: str
    devices: int
    peak_flops: float | None
    """Of one device; None where it is not known."""
    trained: Model
    """The model that is tuned and trained; one device holds it."""
    large: Model
    """The model of which one layer of each kind is profiled."""
    compiled: ProbeSizes
    """Packs for which compiled layers are timed: one of them has one vision unit, which has a graph of its own."""
    samples: int
    trials: int
    batch: int
    drawn_plans: int
    """Plans drawn at random whose predictions are compared with runs."""
    time_limit: str
    """Of each search."""
    timed_steps: int
    """Of each trial."""
    families: tuple[str, ...]
    """Names of tiny models whose gradients are compared with transformers' own."""
    kernels: KernelSizes
    rivals: tuple[RivalCase, ...]
    rounds_of_rival: int
    steps: int
    """Of each training next to the rival."""
    workers: int
    """Processes that load the rival's packs."""
    pretended: bool = False

    @property
    def device_counts(self) -> tuple[int, ...]:
        """One device, and all of them."""
        return (1, self.devices) if self.devices > 1 else (1,)

    @property
    def offloads(self) -> tuple[Offload, ...]:
        """Layouts that free the memory of layers: CPU ranks cannot offload what they keep."""
        return ("none",) if self.pretended else ("none", "both")


def real_target() -> Target:
    """Return the devices of this machine. Raise SystemExit where there is none."""
    here: Hardware = probe_hardware()
    if here.accelerator != "cuda":
        raise SystemExit("no CUDA device is visible to torch; `--pretend` runs the same code on the CPU")
    matching = (flops for part, flops in _PEAK_FLOPS.items() if part in here.device_name)
    return Target(
        accelerator="cuda",
        name=here.device_name,
        devices=here.devices,
        peak_flops=next(matching, None),
        # InternViT-300M with a language model like Qwen2.5-0.5B.
        trained=Model(vision=(24, 1024, 4096, 16), language=(24, 896, 4864, 14), kv_heads=2),
        # InternViT-6B with InternLM2-20B.
        large=Model(vision=(45, 3200, 12_800, 25), language=(48, 6144, 16_384, 48), kv_heads=8, vocabulary=92_544),
        compiled=ProbeSizes(unit_counts=(8, 1, 24), sample_shapes=((4, 512), (1, 4096), (8, 1024))),
        samples=2000,
        trials=12,
        batch=64,
        drawn_plans=17,
        time_limit="4min",
        timed_steps=6,
        families=_FAMILIES,
        kernels=KernelSizes(
            attention={
                "tiles of InternViT-300M": (16, 16, 64, (1025,) * 24, False),
                "windows of Qwen2.5-VL": (16, 16, 80, (64,) * 256, False),
                "samples of Qwen2.5-1.5B": (12, 2, 128, (300, 900, 1500, 2600, 700, 1100, 400, 500), True),
            },
            patches=16_384,
            head=(8192, 1536, 151_674, 0.15),
        ),
        rivals=(
            RivalCase(name="InternVL3-2B", make=internvl3_2b, batch=16),
            RivalCase(name="InternVL3-2B in 52 GiB", make=internvl3_2b, batch=16, limit="52GiB"),
            RivalCase(name="Qwen2.5-VL-3B", make=qwen2_5_vl_3b, batch=32),
            RivalCase(name="Qwen2.5-VL-3B in 76 GiB", make=qwen2_5_vl_3b, batch=32, limit="76GiB"),
        ),
        rounds_of_rival=2,
        steps=20,
        workers=8,
    )


def pretended_target() -> Target:
    """Return two CPU ranks that stand for two devices, with tiny models of as many kinds of layers."""
    return Target(
        accelerator="cpu",
        name="pretended device",
        devices=2,
        peak_flops=1e12,
        trained=Model(vision=(2, 32, 64, 2), language=(2, 32, 64, 2), kv_heads=1, tile=56),
        large=Model(vision=(45, 64, 128, 2), language=(48, 96, 192, 2), kv_heads=1, tile=56),
        compiled=ProbeSizes(unit_counts=(3, 1, 5), sample_shapes=((2, 20), (1, 50), (3, 30))),
        samples=240,
        trials=2,
        batch=8,
        drawn_plans=3,
        time_limit="10s",
        timed_steps=2,
        families=_FAMILIES,
        kernels=KernelSizes(attention={"samples": (4, 2, 16, (5, 9), True)}, patches=16, head=(32, 16, 64, 0.5)),
        rivals=(RivalCase(name="pages", make=small_pages, batch=8, limit="2GiB", trials=2, time_limit="10s"),),
        rounds_of_rival=1,
        steps=6,
        workers=0,
        pretended=True,
    )

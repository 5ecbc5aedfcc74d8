"""The devices that are measured, or the CPU that pretends to be one."""

from dataclasses import dataclass

from autotune.machine.hardware import probe_hardware
from trials.plan import Offload
from trials.tasks.request import ProbeSizes
from trials.workload import Hardware

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
class Model:
    """Sizes of an InternVL model: layers, width, width of the feed-forward part, and heads."""

    vision: tuple[int, int, int, int]
    language: tuple[int, int, int, int]
    kv_heads: int
    vocabulary: int | None = None
    """None for that of the tokenizer."""
    tile: int = 448
    """Pixels in a row."""
    patch: int = 14


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
    rounds: int
    """Runs of each plan."""
    time_limit: str
    """Of each search."""
    timed_steps: int
    """Of each trial."""
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
        rounds=3,
        time_limit="4min",
        timed_steps=6,
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
        samples=48,
        trials=2,
        batch=8,
        rounds=1,
        time_limit="10s",
        timed_steps=2,
        pretended=True,
    )

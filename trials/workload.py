"""Workloads: what a measurement depends on besides the plan. Their fingerprints are keys in the database.

A new field needs a default that describes earlier measurements, since fingerprints leave defaults out: stored rows
keep their keys. Names for people are not part of a fingerprint.
"""

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from trials import wire

_FOR_PEOPLE = frozenset({"name"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The devices of one rank group, and the machine around them."""

    accelerator: str
    """`cpu` or `cuda`."""
    device_name: str
    """The accelerator's model, or the processor's on a CPU."""
    devices: int
    """Ranks that the job may use."""
    device_memory_bytes: int
    """Memory of one accelerator; on a CPU that of the machine."""
    compute_capability: str | None
    driver: str | None
    cpu_name: str
    cpu_cores: int
    """Logical processors on which the scheduler may run this process; without accelerators the share of one of the
    groups of ranks that work at the same time."""
    ram_bytes: int
    nodes: int = 1
    """Machines over which the ranks are spread."""
    link: str | None = None
    """The slowest connection between two of the devices, in nvidia-smi's words: `NV18`, `PIX`, `SYS`."""
    topology: str | None = None
    """The connection of every pair, `0-1 NV18, 0-2 SYS, 1-2 SYS`."""
    power_limit_watts: int | None = None
    """The lowest power limit of a device, where an administrator has set it below its default (`nvidia-smi -pl`)."""

    def __str__(self) -> str:
        on = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        if self.accelerator == "cpu":  # whose ranks share the cores of one device
            return f"{self.devices} CPU rank{'s' * (self.devices > 1)}{on} ({self.device_name})"
        limit = "" if self.power_limit_watts is None else f" limited to {self.power_limit_watts} W"
        return f"{self.devices} x {self.device_name}{limit}{on}"

    @property
    def of_node(self) -> int:
        """Ranks on each node."""
        return self.devices // self.nodes

    def resized(self, devices: int) -> "Hardware":
        """Return another number of these devices, on as many such nodes as they need, or on the one node."""
        return replace(self, devices=devices, nodes=1 if self.nodes == 1 else -(-devices // self.of_node))

    def of_group(self, groups: int) -> "Hardware":
        """Return these devices as one of several groups of ranks has them, that work at the same time.

        Without accelerators they share the cores.
        """
        return replace(self, cpu_cores=max(1, self.cpu_cores // groups)) if self.accelerator == "cpu" else self

    def has_groups(self, size: int) -> bool:
        """Return whether the devices are groups of `size` neighbours, each on one node."""
        return size <= self.of_node and (self.nodes == 1 or self.of_node % size == 0)

    def spare_cores(self, groups: int = 1) -> int:
        """Return the cores of each rank that loading processes may use, with several groups of ranks on the devices.

        Each rank on an accelerator needs one core for itself, and CPU ranks need all cores.
        """
        return 0 if self.accelerator == "cpu" else max(self.cpu_cores // (self.of_node * groups) - 1, 0)

    @property
    def kind(self) -> dict[str, str | int | None]:
        """The fields, with their values, in which devices of one kind agree."""
        return {
            "accelerator": self.accelerator,
            "device_name": self.device_name,
            "compute_capability": self.compute_capability,
            "device_memory_bytes": self.device_memory_bytes,
            "power_limit_watts": self.power_limit_watts,
        }

    def learns_from(self, other: "Hardware") -> bool:
        """Return whether times on other devices, whose number may be another, tell about times on these."""
        # One device exchanges nothing.
        is_connected_alike = other.devices == 1 or (other.nodes, other.link) == (self.nodes, self.link)
        # CPU ranks share the cores of their node.
        is_as_wide = self.accelerator != "cpu" or self.cpu_cores * other.of_node == other.cpu_cores * self.of_node
        return self.kind == other.kind and is_connected_alike and is_as_wide

    @property
    def fingerprint(self) -> str:
        return wire.digest(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Versions that change speed or memory."""

    python: str
    torch: str
    deepspeed: str
    transformers: str


GRADIENT_DTYPE = "float32"
"""Type in which the engine sums gradients, for every type of weights."""


COMPILER = "inductor"
"""What compiles layers, where they are compiled."""


Part: TypeAlias = Literal["vision", "projector", "language"]
"""A part of a model that a job trains, freezes or adapts by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The model as a chain of layers, with their analytic cost."""

    name: str
    """Last part of the folder or hub id, for people."""
    family: str
    """Hugging Face `model_type`: the module of `trials.model.families`."""
    dtype: str
    vision_layers: int
    language_layers: int
    parameters: int
    unit_flops: float
    """Forward floating-point operations of one vision unit, through the tower and the projector."""
    token_flops: float
    """Forward operations of one text token in the language layers, attention excluded."""
    square_flops: float
    """Forward operations per squared sample length in the language attention."""
    config_digest: str
    """SHA-256 of the architecture and sizes in the configuration."""
    gradient_dtype: str | None = None
    """Type in which gradients are summed; None for that of the weights."""
    trained: str | None = None
    """Parts of the model that train; None for the whole model."""
    compiler: str | None = None
    """What compiles the layers; None for uncompiled layers."""
    target_flops: float = 0.0
    """Forward operations of one target in the head."""

    @property
    def element_bytes(self) -> int:
        """Size of a weight."""
        return {"float32": 4, "bfloat16": 2}[self.dtype]

    @property
    def fingerprint(self) -> str:
        return wire.digest(self, never=_FOR_PEOPLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataProfile:
    """The number and lengths of the dataset's samples."""

    samples: int
    """Samples of one epoch, repeats included."""
    text_only_samples: int
    vision_units: int
    """Sum over the epoch."""
    text_tokens: int
    """Sum over the epoch, image tokens included."""
    longest_text_tokens: int
    most_vision_units: int
    histogram: tuple[tuple[int, int, int], ...]
    """(vision units, text tokens rounded up to a multiple of 64, samples), ascending."""
    lengths_digest: str
    """SHA-256 of all lengths in order."""
    target_tokens: int | None = None
    """Sum over the epoch of the tokens with a label; None where an earlier version did not store it."""

    def __post_init__(self) -> None:
        """Raise ValueError for an epoch without samples."""
        if self.samples < 1:
            raise ValueError(f"an epoch needs at least one sample, not {self.samples}")

    @property
    def target_share(self) -> float:
        """Share of the text tokens that have a label; 1 where it is not known."""
        return 1.0 if self.target_tokens is None else self.target_tokens / max(self.text_tokens, 1)

    @property
    def fingerprint(self) -> str:
        return wire.digest(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Model, data, hardware, software, and the settings that every plan shares."""

    # Settings that hardly change time and memory of the usual steps have no part in it, such as learning rates,
    # clipping, the weights of samples in the loss and a curriculum in the first steps: measurements hold for all.
    model: ModelShape
    data: DataProfile
    hardware: Hardware
    software: Software
    oversize: str
    """Treatment of samples above a pack's capacity; measurements that skip some are not comparable with others."""
    global_batch_samples: int
    memory_limit_bytes: int
    """Limit of each rank."""

    @property
    def fingerprint(self) -> str:
        return wire.digest(self, never=_FOR_PEOPLE)

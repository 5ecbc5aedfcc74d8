"""What ranks report of a certified plan: gradients of one step and of a reference, and the samples of an epoch."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from trials.workload import Part

Reference: TypeAlias = Literal["transformers", "stages", "recomputed-stages"]
"""What gradients are compared with.

`transformers`: the whole model of transformers on each device, one sample at a time, without recomputation.
`stages`: the plan's own stages, one sample per micro-batch, without packing and recomputation.
`recomputed-stages`: the same with the plan's recomputation.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterComparison:
    """The gradient of one parameter under the plan, compared with that of the reference. Norms are Euclidean."""

    name: str
    part: Part
    found: float
    """Norm under the plan."""
    expected: float
    """Norm of the reference."""
    product: float
    """Scalar product of both."""
    difference: float
    """Norm of the difference."""
    rounding: float | None
    """Norm of the difference between two references, in the type of the weights and in float32. None where only one
    was computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochCount:
    """The samples of the first epoch as a rank builds its steps."""

    samples: int
    """In all steps, repeats included."""
    wrong: int
    """Samples of the data that are there more or less often than their repeat says; skipped ones do not count."""
    skipped: int
    """Left out because they are above a capacity of the plan."""
    oversize: int
    """Above a capacity of the plan, each in a pack of its own."""
    steps: int
    mean_samples: float
    """Samples of a micro-batch row, on average over the epoch, times the rows of a full step."""
    samples_deviation: float
    """Standard deviation over the full steps."""
    fewest_samples: int
    """In a full step, or in the only one."""
    most_samples: int
    last_samples: int
    """In the last step, which may have fewer micro-batches."""
    arrangement: str
    """Digest of the samples of every micro-batch, in order."""

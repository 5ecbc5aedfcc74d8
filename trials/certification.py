"""What ranks report of a certified plan: its steps and the reference's, inputs, saved weights, samples of an epoch."""

from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Literal, TypeAlias

from trials.workload import Part

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from trials.job import TrainingSection

# A choice: packs cannot be cut, so with long samples no arrangement brings every step near.
_LEAST_NEAR = 0.99
"""Share of the full steps that have to be near the global batch."""
_LEAST_SAMPLES = 2.0
"""Samples by which steps of a small batch may differ: packs cannot be cut."""
_CHANCE = 0.001
"""Probability that steps in random order vary by more than is allowed, where there are few steps."""
Reference: TypeAlias = Literal["transformers", "stages", "recomputed-stages"]
"""What gradients are compared with.

`transformers`: the whole model of transformers on each device, one sample at a time, without recomputation.
`stages`: the plan's own stages, one sample per micro-batch, without packing and recomputation.
`recomputed-stages`: the same with the plan's recomputation.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """What steps have to keep."""

    samples: int
    """Samples of a step."""
    tolerance: float
    """Share of `samples` by which a step may differ, or two samples."""
    variance: float
    """Most variance of a trait between steps, over that of steps in random order."""

    @classmethod
    def of_job(cls, training: "TrainingSection") -> "Mixed":
        return cls(
            samples=training.global_batch_samples, tolerance=training.batch_tolerance, variance=training.step_variance
        )

    @property
    def allowed(self) -> float:
        """Samples by which a step may differ."""
        return max(_LEAST_SAMPLES, self.tolerance * self.samples)

    def is_near(self, held: "NDArray[np.float64]") -> "NDArray[np.bool_]":
        """Return which steps with `held` samples [steps] are near enough to their number."""
        near: NDArray[np.bool_] = abs(held - self.samples) <= self.allowed
        return near

    def share_near(self, held: "NDArray[np.float64]", *, to_end: bool) -> float:
        """Return the share of an epoch's full steps with `held` samples [steps] that are near enough.

        `to_end` says that the last of them is the last step of the epoch. It may be short: it has the samples that are
        left over, in any training that drops none.
        """
        near = self.is_near(held)
        near[-1] |= to_end and held[-1] < self.samples
        return float(near.mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class Neutrality:
    """The full steps of an epoch, next to steps in random order."""

    steps: int
    steps_near: float
    """Share of the steps that have as many samples as they should, or nearly; the last of the epoch may have fewer."""
    variances: dict[str, float]
    """Variance between the steps over that of steps in random order, for each trait in which samples differ."""

    def faults(self, mixed: Mixed) -> tuple[str, ...]:
        """Return in sentences why the steps change what is learned; none where they do not."""
        allowed = max(mixed.variance, _by_chance(self.steps, len(self.variances)))
        found = [
            f"the variance of {name} between steps is {ratio:.2f} times that of random order ({allowed:.2f} is allowed)"
            for name, ratio in self.variances.items()
            if ratio > allowed
        ]
        if self.steps > 1 and self.steps_near < _LEAST_NEAR:
            found.append(
                f"{1 - self.steps_near:.0%} of the steps miss training.global_batch_samples: {mixed.samples} by more "
                f"than {mixed.allowed:g} samples"
            )
        return tuple(found)


def _by_chance(steps: int, traits: int) -> float:
    """Return the variance that no trait of random order exceeds but by `_CHANCE` (Wilson and Hilferty, 1931)."""
    if steps < 2 or not traits:
        return float("inf")
    share, quantile = 2 / (9 * (steps - 1)), NormalDist().inv_cdf(1 - _CHANCE / traits)
    return float((1 - share + quantile * share**0.5) ** 3)


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
    reading_error: float
    """Most that the norm of the difference may be by the reading alone: gradients are read from rounded moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateComparison:
    """A float32 weight after a step under the plan, next to that of torch's own AdamW. Norms are Euclidean."""

    name: str
    part: Part
    change: float
    """Norm of its change since before the first step, under the reference."""
    difference: float
    """Norm of the difference between both weights."""
    rounding: float
    """Norm of a difference that is rounding of float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientComparison:
    """The loss and the gradients of one step under the plan and under the reference, as one rank computed them."""

    loss: float
    expected_loss: float
    loss_rounding: float | None
    """Difference of two references, in the type of the weights and in float32; None where only one was computed."""
    parameters: tuple[ParameterComparison, ...]
    """Those of this rank's stage; none on a rank whose parameters another one compares."""
    samples: int
    """Samples of the step, over all ranks."""
    blank_samples: int
    """Samples of the step that could not be read, over all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """A step of the training under the plan, next to the reference."""

    number: int
    """In the training, from 0."""
    factor: float
    """Of the configured learning rates in this step, by the definition of the schedule."""
    gradients: GradientComparison | None
    """After clipping; None for a step of which only the update is compared."""
    before_clipping: GradientComparison | None
    """Before clipping, for the first step where gradients are clipped: clipped ones have lost their length."""
    updates: tuple[UpdateComparison, ...]
    """Of the trained parameters of this rank's stage, as `GradientComparison.parameters`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputCount:
    """The records of the first step that were compared with what the family's own processor makes of them."""

    records: int
    """Records whose token ids were compared."""
    labelled: int
    """Records whose labels were compared as well."""
    uncompared: int
    """Records with videos, and records that the processor refuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCount:
    """The weights that the training would have written after the steps, as transformers loads them."""

    tensors: int
    """Compared with the weights of the last step; those of adapters where only these are written."""
    size: int
    """Bytes of their files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochCount:
    """The samples of the first epoch as a rank builds its steps."""

    samples: int
    """Samples in all steps, repeats included."""
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
    neutrality: Neutrality
    """The full steps next to steps in random order."""
    arrangement: str
    """Digest of the samples of every micro-batch, in order."""

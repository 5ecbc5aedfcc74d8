"""Certificates: whether a plan makes the steps of a reference, and trains on all samples of the data."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from trials import wire
from trials.certification import (
    EpochCount,
    GradientComparison,
    InputCount,
    Mixed,
    ParameterComparison,
    Reference,
    SavedCount,
    StepReport,
    UpdateComparison,
)
from trials.errors import WireError
from trials.units import number_of
from trials.whole_file import whole_file
from trials.workload import Part, Software

if TYPE_CHECKING:
    from trials.tasks.answer import CertificationReport

CERTIFICATE_FILE = "certificate.json"

_EXPECTED, _EXPECTED_OF_PARAMETER = {"float32": 1e-4, "bfloat16": 2e-2}, {"float32": 1e-4, "bfloat16": 0.1}
"""Relative error of gradients by rounding, of a part and of a single parameter, where it is not measured."""
# A choice, as `_EXPECTED` is: the loss is a mean over all targets, so its rounding errors average out.
_EXPECTED_LOSS = {"float32": 1e-5, "bfloat16": 1e-3}
_LEAST_ERROR = 1.5e-2
"""Least error of a part in bfloat16 where errors are measured on single samples. Kernels that sum over the tokens of a
pack in bfloat16, such as those of a CPU for biases and embeddings, have larger ones there."""
_MOST_ALLOWED = 0.5
"""Most difference of a part, and the allowed one of a parameter, where rounding is measured: a gradient that is lost
differs by 1, and one of the wrong sign by 2."""
# Choices: plans without a fault differ by 0.2 of four rounding errors at most, and a lost gradient has to stand out.
_ROUNDINGS, _KNOWN = 4.0, 2.0
"""A parameter of fewer rounding errors than the first counts as that many, and of fewer than the second as noise."""
# A choice: the expected error is an estimate itself, and a larger factor would hide small faults.
_ALLOWED = 2.0
"""A difference may be this many times the expected error."""
_FLOOR = 1e-2
"""A noisy parameter whose norm is a smaller share of its part's, such as the bias of keys, counts as this share."""
_UPDATE_ERROR = 1e-5
"""Relative error of the change of a weight: torch's own update gets the gradients of the plan, which are known to some
units in the last place of their largest. Weight decay is lost in it below some 1e-5 of the change."""


_OF_STAGES = (
    "what is the same for every plan of these stages: the model's own code, the positions of tokens, the weights as "
    "they are read, the split into stages, and gradients on their way from the backward pass to the optimizer, such as "
    "averages over ranks and the shards of ZeRO"
)
_NOT_BY: dict[Reference, tuple[str, ...]] = {
    "transformers": (),
    "stages": (_OF_STAGES,),
    "recomputed-stages": (_OF_STAGES, "the recomputation of layers, which the reference has as well"),
}
"""What a reference shares with the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartComparison:
    """The gradient of a part of the model under the plan, next to that of the reference."""

    part: Part
    norm: float
    """Norm of the reference."""
    cosine: float
    """Of the angle between both; 1 where both are 0."""
    difference: float
    """Norm of the difference, relative to the norm of the reference."""
    allowed_difference: float
    largest_difference: float
    """Largest difference of a single parameter, relative to its norm, or to more where that is mostly rounding."""
    largest_parameter: str
    allowed_largest: float

    @property
    def is_empty(self) -> bool:
        """Whether both gradients are 0, so that the comparison shows nothing of the part's layers."""
        return self.norm == self.difference == 0

    @property
    def holds(self) -> bool:
        # Written so that NaN does not hold.
        return self.difference <= self.allowed_difference and self.largest_difference <= self.allowed_largest


@dataclass(frozen=True, slots=True, kw_only=True)
class LossComparison:
    """The mean loss of the step under the plan, next to that of the reference."""

    found: float
    expected: float
    allowed_difference: float
    """Relative to `expected`."""

    @property
    def holds(self) -> bool:
        return abs(self.found - self.expected) <= self.allowed_difference * abs(self.expected)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateFigure:
    """The weights after a step under the plan, next to those of torch's own AdamW with the same gradients."""

    difference: float
    """Norm of the difference over what is allowed, for the parameter where it is largest."""
    largest_parameter: str

    @property
    def holds(self) -> bool:
        return self.difference <= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepComparison:
    """A step of the training under the plan and under the reference."""

    number: int
    """In the training, from 0."""
    factor: float
    """Of the configured learning rates, by the definition of the schedule."""
    samples: int
    """Samples of the step; 0 where only the update was compared."""
    blank_samples: int
    """Samples of the step that could not be read."""
    loss: LossComparison | None
    """None where only the update was compared."""
    parts: tuple[PartComparison, ...]
    """Gradients after clipping; empty where only the update was compared."""
    before_clipping: tuple[PartComparison, ...]
    """Gradients of the first step, where the job clips them."""
    update: UpdateFigure | None
    """None where nothing trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Steps of the training under the plan and under the reference, their inputs and results, and the first epoch."""

    reference: Reference
    steps: tuple[StepComparison, ...]
    epoch: EpochCount
    inputs: InputCount
    """Records of the first step, over all ranks."""
    saved: SavedCount | None
    """None where the weights were not written."""
    left_out: tuple[str, ...] = ()
    """What was not compared, and why, in sentences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CertifiedJob:
    """The plan and the job of a certificate."""

    plan: str
    """Id of the plan."""
    workload: str
    """Fingerprint."""
    model: str
    """Name."""
    config_digest: str
    weights: Literal["random", "pretrained"]
    dtype: str
    data_digest: str
    """Digest of the dataset's lengths."""
    hardware: str
    software: Software
    seed: int
    global_batch_samples: int
    training: str
    """Settings of the optimizer, the schedule, the loss, the adapters and the steps."""
    origin: str
    """Digest of the code, the libraries, and the files of the model and the data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Whether a plan trains a job as it must, and the comparison that shows it."""

    subject: CertifiedJob
    verdict: Literal["holds", "does not hold", "not made"]
    reasons: tuple[str, ...]
    """Why it does not hold, or was not made."""
    comparison: Comparison | None
    """None if the verdict is `not made`."""
    changes_learning: tuple[str, ...]
    """What changes the training and is not part of the comparison, in sentences."""
    created: datetime
    seconds: float
    """Time that it took."""

    @property
    def holds(self) -> bool:
        return self.verdict == "holds"


def compare(dtype: str, reports: "Sequence[CertificationReport]", left_out: tuple[str, ...] = ()) -> Comparison:
    """Combine the reports of all ranks."""
    first = reports[0]
    steps = tuple(_compare_step(dtype, of_ranks) for of_ranks in zip(*(each.steps for each in reports), strict=True))
    return Comparison(
        reference=first.reference,
        steps=steps,
        epoch=first.epoch,
        inputs=InputCount(
            records=sum(each.inputs.records for each in reports),
            labelled=sum(each.inputs.labelled for each in reports),
            uncompared=sum(each.inputs.uncompared for each in reports),
        ),
        saved=first.saved,
        left_out=(*_NOT_BY[first.reference], *_unseen(steps), *left_out),
    )


def _unseen(steps: Sequence[StepComparison]) -> Iterator[str]:
    """Yield the parts whose gradients are 0 in every step, such as those behind a projector whose weights are 0, and
    those of a step that are mostly errors of the reading.
    """
    compared = [{each.part: each.is_empty for each in step.parts} for step in steps if step.parts]
    for part in dict.fromkeys(part for of_step in compared for part in of_step):
        if all(of_step.get(part, True) for of_step in compared):
            yield f"the gradient of {part}, which is 0 in the compared steps, under the plan and under the reference"
    for step in steps:
        for each in step.parts:
            if each.allowed_difference > _MOST_ALLOWED:
                lost = (
                    "which is far smaller than those of the steps before: their mean, from which it is read, is rounded"
                )
                yield f"the gradient of {each.part} in step {step.number + 1}, {lost}"


def _compare_step(dtype: str, of_ranks: Sequence[StepReport]) -> StepComparison:
    first = of_ranks[0]
    return StepComparison(
        number=first.number,
        factor=first.factor,
        samples=first.gradients.samples if first.gradients else 0,
        blank_samples=first.gradients.blank_samples if first.gradients else 0,
        loss=_compare_loss(dtype, first.gradients) if first.gradients else None,
        parts=_compare_parts(dtype, [each.gradients for each in of_ranks]),
        before_clipping=_compare_parts(dtype, [each.before_clipping for each in of_ranks]),
        update=_compare_updates([each for of_rank in of_ranks for each in of_rank.updates]),
    )


def _compare_parts(dtype: str, of_ranks: Sequence[GradientComparison | None]) -> tuple[PartComparison, ...]:
    every = [each for of_rank in of_ranks if of_rank for each in of_rank.parameters]
    by_part = {part: [each for each in every if each.part == part] for part in get_args(Part)}
    return tuple(_compare_part(part, dtype, found) for part, found in by_part.items() if found)


def _compare_loss(dtype: str, found: GradientComparison) -> LossComparison:
    error = _EXPECTED_LOSS[dtype]
    if found.loss_rounding is not None and found.expected_loss:
        error = max(error, found.loss_rounding / abs(found.expected_loss))
    return LossComparison(found=found.loss, expected=found.expected_loss, allowed_difference=_ALLOWED * error)


def _compare_updates(updates: Sequence[UpdateComparison]) -> UpdateFigure | None:
    if not updates:
        return None
    # NaN first, which is a difference.
    worst = max(updates, key=lambda each: math.inf if math.isnan(share := _share_of_allowed(each)) else share)
    share = _share_of_allowed(worst)
    return UpdateFigure(difference=1e9 if math.isnan(share) else min(share, 1e9), largest_parameter=worst.name)


def _share_of_allowed(each: UpdateComparison) -> float:
    allowed = _UPDATE_ERROR * each.change + each.rounding
    return each.difference / allowed if allowed else 1e9 * float(each.difference != 0)


def _compare_part(part: Part, dtype: str, parameters: Sequence[ParameterComparison]) -> PartComparison:
    found, expected, difference = (
        math.hypot(*values)
        for values in zip(*((each.found, each.expected, each.difference) for each in parameters), strict=True)
    )
    # Products have both signs, and sums of them would lose digits where they nearly cancel.
    product = math.fsum(each.product for each in parameters)
    roundings = [each.rounding for each in parameters if each.rounding is not None]
    allowed, allowed_largest = _ALLOWED * _EXPECTED[dtype], _ALLOWED * _EXPECTED_OF_PARAMETER[dtype]
    if roundings:
        error = max(_LEAST_ERROR, _ratio(math.hypot(*roundings), expected))
        allowed, allowed_largest = min(_ALLOWED * error, _MOST_ALLOWED), _MOST_ALLOWED
    reading_error = math.hypot(*(each.reading_error for each in parameters))
    shares = {each.name: _share(each, expected) for each in parameters}
    worst = max(shares, key=lambda name: shares[name][0] / (allowed_largest + shares[name][1]))
    largest, error_of_worst = shares[worst]
    return PartComparison(
        part=part,
        norm=expected,
        cosine=product / (found * expected) if found * expected else float(found == expected),
        difference=_ratio(difference, expected, reading_error),
        allowed_difference=allowed + _ratio(reading_error, expected, reading_error),
        largest_difference=largest,
        largest_parameter=worst,
        allowed_largest=allowed_largest + error_of_worst,
    )


def _share(each: ParameterComparison, of_part: float) -> tuple[float, float]:
    """Return (difference, error of the reading) of a parameter, over its norm or what it has to be known to."""
    rounding = each.rounding or 0.0
    size = max(each.expected, _ROUNDINGS * rounding)
    is_known = each.rounding is not None and each.expected > _KNOWN * rounding
    size = size if is_known else max(size, _FLOOR * of_part)
    return _ratio(each.difference, size, each.reading_error), _ratio(each.reading_error, size, each.reading_error)


def _ratio(difference: float, expected: float, reading_error: float = 0.0) -> float:
    """Return the difference relative to the expected value: 1 where 0 is expected and more than the error found."""
    if expected:
        return difference / expected
    return float(not difference <= reading_error)  # NaN is a difference


def faults(comparison: Comparison, mixed: Mixed, reports: "Sequence[CertificationReport]") -> tuple[str, ...]:
    """Return in sentences why the certificate does not hold; `reports` are those of all ranks."""
    epoch = comparison.epoch
    found = [fault for each in comparison.steps for fault in _faults_of_step(each)]
    found += dict.fromkeys(fault for report in reports for fault in report.faults)
    if any(each.epoch != epoch for each in reports):
        found.append("the ranks build different steps of the epoch")
    if epoch.wrong:
        found.append(
            f"{number_of(epoch.wrong, 'sample is', 'samples are')} in the epoch more or less often than the data says"
        )
    if epoch.steps > 1 and abs(epoch.mean_samples / mixed.samples - 1) > mixed.tolerance:
        found.append(
            f"a step has {epoch.mean_samples:.1f} samples on average, which is not within {mixed.tolerance:.0%} of "
            f"training.global_batch_samples: {mixed.samples}"
        )
    found += epoch.neutrality.faults(mixed)
    return tuple(found)


def _faults_of_step(step: StepComparison) -> Iterator[str]:
    of_step = f"in step {step.number + 1}"
    for text, parts in ((of_step, step.parts), (f"{of_step}, before clipping,", step.before_clipping)):
        for each in parts:
            if not each.holds:
                yield (
                    f"the gradient of {each.part} {text} differs by {each.difference:.2g} "
                    f"({each.allowed_difference:.2g} is allowed), and that of {each.largest_parameter} by "
                    f"{each.largest_difference:.2g} ({each.allowed_largest:.2g})"
                )
    if step.loss and not step.loss.holds:
        yield f"the loss {of_step} is {step.loss.found:.6g} instead of {step.loss.expected:.6g}"
    if step.update and not step.update.holds:
        yield (
            f"the weights after step {step.number + 1} differ from those of torch's AdamW with the same gradients: "
            f"{step.update.largest_parameter} by {step.update.difference:.2g} times what is allowed"
        )


def certificate_path(folder: Path, plan: str, workload: str) -> Path:
    """Return the file in `folder` for the newest certificate of a plan on a workload."""
    return folder / f"{plan}-{workload}.json"


def stored_certificates(folder: Path, plan: str) -> tuple[Certificate, ...]:
    """Return the certificates of a plan in `folder`, newest last; other files are skipped."""
    found = (read_certificate(path) for path in folder.glob(f"{plan}-*.json"))
    return tuple(sorted((each for each in found if each), key=lambda each: each.created))


def read_certificate(path: Path) -> Certificate | None:
    """Return the certificate in a file; None where there is none that can be decoded."""
    try:
        return wire.read(Certificate, path)
    except (OSError, UnicodeDecodeError, WireError):
        return None


def write_certificate(path: Path, certificate: Certificate) -> None:
    """Write the certificate, and make its folder. Raise OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as stream:
        stream.write(wire.encode(certificate).encode())

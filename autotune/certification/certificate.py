"""Certificates: whether a plan computes the gradients of a reference, and trains on all samples of the data."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from trials import wire
from trials.certification import EpochCount, ParameterComparison, Reference
from trials.errors import WireError
from trials.units import number_of
from trials.whole_file import whole_file
from trials.workload import Part, Software

if TYPE_CHECKING:
    from trials.tasks.answer import CertificationReport

CERTIFICATE_FILE = "certificate.json"

_EXPECTED = {"float32": 1e-4, "bfloat16": 2e-2}
"""Relative error of gradients by rounding, where it is not measured."""
_EXPECTED_LOSS = {"float32": 1e-5, "bfloat16": 1e-3}
_LEAST_ERROR, _LEAST_ERROR_OF_PARAMETER = 1.5e-2, 0.25
"""Least errors of bfloat16 where they are measured on single samples. Kernels that sum over the tokens of a pack in
bfloat16, such as those of a CPU for biases and embeddings, have larger ones there."""
_ALLOWED = 2.0
"""A difference may be this many times the expected error."""
_FLOOR = 1e-2
"""A parameter whose norm is a smaller share of its part's, such as the bias of keys, has mostly rounding errors."""
_GLOBAL_BATCH = 0.1
"""Every plan keeps the mean samples of a step within this share of the global batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartComparison:
    """The gradient of a part of the model under the plan, next to that of the reference."""

    part: Part
    cosine: float
    """Of the angle between both; 1 where both are 0."""
    difference: float
    """Norm of the difference, relative to the norm of the reference."""
    allowed_difference: float
    largest_difference: float
    """The same for the single parameter where it is largest, relative to 1 % of the part's norm at least."""
    largest_parameter: str
    allowed_largest: float

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
class Comparison:
    """One step of the first epoch under the plan and under the reference, and the samples of that epoch."""

    reference: Reference
    step: int
    """Number in the epoch, from 0."""
    samples: int
    """Samples of the step."""
    blank_samples: int
    """Samples of the step that could not be read."""
    loss: LossComparison
    parts: tuple[PartComparison, ...]
    epoch: EpochCount


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
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
    adapters: str | None = None
    """Settings of the LoRA adapters, where the job has some."""
    loss_weighting: str = "token"
    """As `training.loss_weighting`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Whether a plan computes the right gradients on a job, and the comparison that shows it."""

    subject: Subject
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


def compare(step: int, dtype: str, reports: "Sequence[CertificationReport]") -> Comparison:
    """Combine the reports of all ranks."""
    first = reports[0]
    every = [each for report in reports for each in report.parameters]
    by_part = {part: [each for each in every if each.part == part] for part in get_args(Part)}
    error = _EXPECTED_LOSS[dtype]
    if first.loss_rounding is not None and first.expected_loss:
        error = max(error, first.loss_rounding / abs(first.expected_loss))
    return Comparison(
        reference=first.reference,
        step=step,
        samples=first.samples,
        blank_samples=first.blank_samples,
        loss=LossComparison(found=first.loss, expected=first.expected_loss, allowed_difference=_ALLOWED * error),
        parts=tuple(_compare_part(part, dtype, found) for part, found in by_part.items() if found),
        epoch=first.epoch,
    )


def _compare_part(part: Part, dtype: str, parameters: Sequence[ParameterComparison]) -> PartComparison:
    found, expected, difference = (
        math.hypot(*values)
        for values in zip(*((each.found, each.expected, each.difference) for each in parameters), strict=True)
    )
    # Products have both signs, and sums of them would lose digits where they nearly cancel.
    product = math.fsum(each.product for each in parameters)
    worst = max(parameters, key=lambda each: _share(each.difference, each.expected, expected))
    roundings = [each.rounding for each in parameters if each.rounding is not None]
    error = largest = _EXPECTED[dtype]
    if roundings:
        error = max(_LEAST_ERROR, _ratio(math.hypot(*roundings), expected))
        largest = max(
            _LEAST_ERROR_OF_PARAMETER, *(_share(each.rounding or 0.0, each.expected, expected) for each in parameters)
        )
    return PartComparison(
        part=part,
        cosine=product / (found * expected) if found * expected else float(found == expected),
        difference=_ratio(difference, expected),
        allowed_difference=_ALLOWED * error,
        largest_difference=_share(worst.difference, worst.expected, expected),
        largest_parameter=worst.name,
        allowed_largest=_ALLOWED * largest,
    )


def _share(difference: float, expected: float, of_part: float) -> float:
    return _ratio(difference, max(expected, _FLOOR * of_part))


def _ratio(difference: float, expected: float) -> float:
    """Return the difference relative to what is expected: 1 where nothing is expected and something found."""
    if expected:
        return difference / expected
    return float(difference != 0)


def faults(comparison: Comparison, global_batch_samples: int, epochs: Iterable[EpochCount]) -> tuple[str, ...]:
    """Return in sentences why the certificate does not hold; `epochs` are as each rank has built them."""
    epoch, loss = comparison.epoch, comparison.loss
    found = [
        f"the gradient of {each.part} differs by {each.difference:.2g} ({each.allowed_difference:.2g} is allowed), and "
        f"that of {each.largest_parameter} by {each.largest_difference:.2g} ({each.allowed_largest:.2g})"
        for each in comparison.parts
        if not each.holds
    ]
    if not loss.holds:
        found.append(f"the loss of the step is {loss.found:.6g} instead of {loss.expected:.6g}")
    if any(each != epoch for each in epochs):
        found.append("the ranks build different steps of the epoch")
    if epoch.wrong:
        found.append(
            f"{number_of(epoch.wrong, 'sample is', 'samples are')} in the epoch more or less often than the data says"
        )
    if epoch.steps > 1 and abs(epoch.mean_samples / global_batch_samples - 1) > _GLOBAL_BATCH:
        found.append(
            f"a step has {epoch.mean_samples:.1f} samples on average, which is not within {_GLOBAL_BATCH:.0%} of "
            f"training.global_batch_samples: {global_batch_samples}"
        )
    return tuple(found)


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

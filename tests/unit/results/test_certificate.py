"""Certificates: what counts as a difference, and what is said of it."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from autotune.certification.certificate import (
    Certificate,
    Comparison,
    Subject,
    compare,
    faults,
    read_certificate,
    stored_certificates,
    write_certificate,
)
from autotune.certification.certificate_report import certificate_text
from autotune.certification.certify import check_place, require
from autotune.errors import NotCertified
from trials.certification import EpochCount, ParameterComparison
from trials.errors import OutputTaken
from trials.tasks.answer import CertificationReport
from trials.workload import Software

EPOCH = EpochCount(
    samples=60,
    wrong=0,
    skipped=0,
    oversize=2,
    steps=6,
    mean_samples=10.0,
    samples_deviation=0.5,
    fewest_samples=9,
    most_samples=11,
    last_samples=8,
    arrangement="0123456789abcdef",
)


def parameter(name: str, *, difference: float, expected: float = 1.0, **changes: Any) -> ParameterComparison:
    found = ParameterComparison(
        name=name,
        part="language",
        found=expected,
        expected=expected,
        product=expected**2,
        difference=difference,
        rounding=None,
    )
    return replace(found, **changes)


def report(*parameters: ParameterComparison, **changes: Any) -> CertificationReport:
    found = CertificationReport(
        reference="transformers",
        loss=2.0,
        expected_loss=2.0,
        loss_rounding=None,
        parameters=parameters,
        epoch=EPOCH,
        samples=10,
        blank_samples=0,
    )
    return replace(found, **changes)


def faults_of(*parameters: ParameterComparison, dtype: str = "float32", **changes: Any) -> tuple[str, ...]:
    return faults(compare(0, dtype, [report(*parameters, **changes)]), 10, [EPOCH])


def test_a_difference_counts_beyond_twice_the_expected_error() -> None:
    assert faults_of(parameter("a", difference=1.9e-4)) == ()
    (fault,) = faults_of(parameter("a", difference=2.1e-4))
    assert fault == (
        "the gradient of language differs by 0.00021 (0.0002 is allowed), and that of a by 0.00021 (0.0002)"
    )


def test_with_bfloat16_the_measured_rounding_is_the_expected_error() -> None:
    assert faults_of(parameter("a", difference=0.039, rounding=0.02), dtype="bfloat16") == ()
    assert faults_of(parameter("a", difference=0.041, rounding=0.02), dtype="bfloat16")


def test_a_single_parameter_that_differs_shows() -> None:
    large, small = parameter("large", difference=1e-5, expected=10.0), parameter("small", difference=1e-3)
    (fault,) = faults_of(large, small)
    assert "that of small by 0.001" in fault
    # Far below the others: nearly all of such a gradient is rounding.
    assert faults_of(large, parameter("bias", difference=1e-5, expected=1e-6)) == ()


def test_a_part_without_gradients_holds_only_without_them() -> None:
    nothing = parameter("a", difference=0.0, expected=0.0)
    assert faults_of(nothing) == ()
    assert compare(0, "float32", [report(nothing)]).parts[0].cosine == 1
    assert faults_of(replace(nothing, found=1e-9, difference=1e-9))


def test_other_faults_are_named() -> None:
    compared = compare(0, "float32", [report(loss=2.001)])
    assert faults(compared, 10, [EPOCH]) == ("the loss of the step is 2.001 instead of 2",)
    fine = compare(0, "float32", [report()])
    assert faults(fine, 10, [EPOCH, replace(EPOCH, arrangement="other")]) == (
        "the ranks build different steps of the epoch",
    )
    (fault,) = faults(fine, 12, [EPOCH])
    assert fault.startswith("a step has 10.0 samples on average, which is not within 10%")


def certificate(comparison: Comparison | None, *reasons: str) -> Certificate:
    subject = Subject(
        plan="0123456789abcdef",
        workload="fedcba9876543210",
        model="tiny",
        config_digest="digest",
        weights="random",
        dtype="float32",
        data_digest="digest",
        hardware="2 CPU ranks",
        software=Software(python="3.11", torch="2", deepspeed="0.19", transformers="5"),
        seed=0,
        global_batch_samples=10,
    )
    return Certificate(
        subject=subject,
        verdict="not made" if comparison is None else "does not hold" if reasons else "holds",
        reasons=reasons,
        comparison=comparison,
        changes_learning=("learning rate 1e-05",),
        created=datetime(2026, 11, 23, tzinfo=UTC),
        seconds=2.5,
    )


def test_a_certificate_is_stored_and_shown(tmp_path: Path) -> None:
    made = certificate(compare(3, "float32", [report(parameter("a", difference=1e-7), reference="stages")]))
    path = tmp_path / "certificates" / "0123456789abcdef-fedcba9876543210.json"
    write_certificate(path, made)
    (path.parent / "0123456789abcdef-other.json").write_text("{}")
    assert read_certificate(path) == made
    assert stored_certificates(path.parent, "0123456789abcdef") == (made,)
    text = certificate_text(made)
    assert "holds; gradients of step 3 with 10 samples, in float32, in 2.5 s" in text
    assert "the plan's own stages, one sample per micro-batch" in text
    assert "language  1.0000000  1.0e-07" in text
    assert "60 samples in 6 steps, each as often as the data says" in text


def test_nothing_is_trained_without_a_certificate_that_holds() -> None:
    compared = compare(0, "float32", [report()])
    require(certificate(compared))
    with pytest.raises(NotCertified, match="does not hold, so nothing was trained: a fault; `autotune show"):
        require(certificate(compared, "a fault"))
    with pytest.raises(NotCertified, match="could not be certified, so nothing was trained: it crashed"):
        require(certificate(None, "it crashed"))


def test_another_file_in_its_place_is_not_replaced(tmp_path: Path) -> None:
    check_place(tmp_path)
    (tmp_path / "certificate.json").write_text('{"my": "own"}')
    with pytest.raises(OutputTaken, match=r"certificate.json is not a certificate of autotune; move it"):
        check_place(tmp_path)

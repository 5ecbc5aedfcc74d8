"""Certificates: what counts as a difference, and what is said of it."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from autotune.certification.certificate import (
    Certificate,
    CertifiedJob,
    Comparison,
    compare,
    faults,
    read_certificate,
    stored_certificates,
    write_certificate,
)
from autotune.certification.certificate_report import certificate_text, updates_text
from autotune.certification.certify import check_place, require
from autotune.errors import NotCertified
from trials.certification import (
    EpochCount,
    GradientComparison,
    InputCount,
    Mixed,
    Neutrality,
    ParameterComparison,
    SavedCount,
    StepReport,
    UpdateComparison,
)
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
    neutrality=Neutrality(steps=5, steps_near=1.0, variances={"length": 0.4, "images": 1.9}),
    arrangement="0123456789abcdef",
)
MIXED = Mixed(samples=10, tolerance=0.1, variance=2.0)


def parameter(name: str, *, difference: float, expected: float = 1.0, **changes: Any) -> ParameterComparison:
    found = ParameterComparison(
        name=name,
        part="language",
        found=expected,
        expected=expected,
        product=expected**2,
        difference=difference,
        rounding=None,
        reading_error=0.0,
    )
    return replace(found, **changes)


def report(
    *parameters: ParameterComparison,
    updates: tuple[UpdateComparison, ...] = (),
    before_clipping: GradientComparison | None = None,
    loss: float = 2.0,
    **changes: Any,
) -> CertificationReport:
    step = StepReport(
        number=0,
        factor=1.0,
        gradients=gradients(*parameters, loss=loss),
        before_clipping=before_clipping,
        updates=updates,
    )
    found = CertificationReport(
        reference="transformers",
        steps=(step,),
        epoch=EPOCH,
        inputs=InputCount(records=5, labelled=4, uncompared=1),
        saved=None,
        faults=(),
    )
    return replace(found, **changes)


def gradients(*parameters: ParameterComparison, loss: float = 2.0) -> GradientComparison:
    return GradientComparison(
        loss=loss, expected_loss=2.0, loss_rounding=None, parameters=parameters, samples=10, blank_samples=0
    )


def update(difference: float, *, name: str = "a", change: float = 1e-3, rounding: float = 1e-9) -> UpdateComparison:
    return UpdateComparison(name=name, part="language", change=change, difference=difference, rounding=rounding)


def faults_of(*parameters: ParameterComparison, dtype: str = "float32", **changes: Any) -> tuple[str, ...]:
    reports = [report(*parameters, **changes)]
    return faults(compare(dtype, reports), MIXED, reports)


def test_a_difference_counts_beyond_twice_the_expected_error() -> None:
    assert faults_of(parameter("a", difference=1.9e-4)) == ()
    (fault,) = faults_of(parameter("a", difference=2.1e-4))
    assert fault == (
        "the gradient of language in step 1 differs by 0.00021 (0.0002 is allowed), and that of a by 0.00021 (0.0002)"
    )


def test_with_bfloat16_the_measured_rounding_is_the_expected_error() -> None:
    assert faults_of(parameter("a", difference=0.039, rounding=0.02), dtype="bfloat16") == ()
    assert faults_of(parameter("a", difference=0.041, rounding=0.02), dtype="bfloat16")


def test_without_a_measured_rounding_a_single_parameter_may_differ_by_more_in_bfloat16() -> None:
    large = parameter("large", difference=0.01, expected=1.0)
    # As the bias of a norm differs where a CPU sums it over the tokens of a pack.
    assert faults_of(large, parameter("bias", difference=4.5e-4, expected=1e-2), dtype="bfloat16") == ()
    (fault,) = faults_of(large, parameter("bias", difference=1e-2, expected=1e-2), dtype="bfloat16")
    assert "that of bias by 1 (0.2)" in fault


def test_a_small_parameter_without_its_gradient_shows_unless_that_is_rounding() -> None:
    large = parameter("large", difference=0.01, expected=1.0, rounding=0.01)
    for found in (0.0, -1e-3):
        lost = parameter("small", difference=1e-3 - found, expected=1e-3, rounding=1e-5)
        (fault,) = faults_of(large, lost, dtype="bfloat16")
        assert f"that of small by {1 - 1e3 * found:g} (0.5)" in fault
    noisy = parameter("noisy", difference=1e-3, expected=1e-3, rounding=1e-3)
    assert faults_of(large, noisy, dtype="bfloat16") == ()
    # A parameter of rounding alone does not allow more to others, and is allowed its own rounding.
    noise = parameter("noise", difference=0.1, expected=1e-9, rounding=0.1)
    assert faults_of(replace(large, rounding=0.3), noise, dtype="bfloat16") == ()
    (fault,) = faults_of(parameter("large", difference=1.0, rounding=1.0), dtype="bfloat16")
    assert "differs by 1 (0.5 is allowed)" in fault


def test_a_single_parameter_that_differs_shows() -> None:
    large, small = parameter("large", difference=1e-5, expected=10.0), parameter("small", difference=1e-3)
    (fault,) = faults_of(large, small)
    assert "that of small by 0.001" in fault
    # Far below the others: nearly all of such a gradient is rounding.
    assert faults_of(large, parameter("bias", difference=1e-5, expected=1e-6)) == ()


def test_a_part_without_gradients_holds_only_without_them() -> None:
    nothing = parameter("a", difference=0.0, expected=0.0)
    assert faults_of(nothing) == ()
    compared = compare("float32", [report(nothing)])
    assert compared.steps[0].parts[0].is_empty
    assert "language  both are 0" in certificate_text(certificate(compared))
    assert "Not compared: the gradient of language, which is 0 in the compared steps" in (
        certificate_text(certificate(compared))
    )
    assert faults_of(replace(nothing, found=1e-9, difference=1e-9))


def test_a_gradient_is_compared_as_exactly_as_it_was_read() -> None:
    assert faults_of(parameter("a", difference=1.19e-3, reading_error=1e-3)) == ()
    assert faults_of(parameter("a", difference=1.21e-3, reading_error=1e-3))
    other = parameter("b", difference=3e-2, expected=100.0)  # a real difference; the other is not compared
    (fault,) = faults_of(parameter("a", difference=1e-2, reading_error=2e-2), other)
    assert "that of b by 0.0003 (0.0002)" in fault
    nothing = parameter("a", difference=1e-9, expected=0.0, found=1e-9, reading_error=2e-9)
    assert faults_of(nothing) == ()
    assert faults_of(replace(nothing, difference=3e-9))
    assert compare("float32", [report(nothing)]).steps[0].parts[0].is_empty
    hidden = compare("float32", [report(parameter("a", difference=2.0, reading_error=3.0))])
    assert "Not compared: the gradient of language in step 1, which is far smaller than" in (
        certificate_text(certificate(hidden))
    )


def test_gradients_before_clipping_are_compared_too() -> None:
    (fault,) = faults_of(before_clipping=gradients(parameter("a", difference=1.0)))
    assert fault.startswith("the gradient of language in step 1, before clipping, differs by 1 (0.0002 is allowed)")


def test_a_weight_that_differs_from_torchs_own_update_shows() -> None:
    allowed = 1e-5 * 1e-3 + 1e-9
    assert faults_of(updates=(update(0.99 * allowed), update(0.0, change=0.0, rounding=0.0))) == ()
    (fault,) = faults_of(updates=(update(0.0), update(1.5 * allowed, name="b")))
    assert fault == (
        "the weights after step 1 differ from those of torch's AdamW with the same gradients: b by 1.5 times what is "
        "allowed"
    )
    for nothing in (update(float("nan")), update(1e-12, change=0.0, rounding=0.0)):
        assert faults_of(updates=(update(0.0), nothing))


def test_other_faults_are_named() -> None:
    assert faults_of(loss=2.001) == ("the loss in step 1 is 2.001 instead of 2",)
    of_ranks = [report(faults=("a label",)), report(faults=("a label", "a rate"))]
    assert faults(compare("float32", of_ranks), MIXED, of_ranks) == ("a label", "a rate")
    other = [report(), report(epoch=replace(EPOCH, arrangement="other"))]
    assert faults(compare("float32", other), MIXED, other) == ("the ranks build different steps of the epoch",)
    alike = [report(epoch=replace(EPOCH, neutrality=Neutrality(steps=99, steps_near=0.5, variances={"length": 7.0})))]
    assert faults(compare("float32", alike), MIXED, alike) == (
        "the variance of length between steps is 7.00 times that of random order (2.00 is allowed)",
        "50% of the steps miss training.global_batch_samples: 10 by more than 2 samples",
    )
    fine = [report()]
    (fault,) = faults(compare("float32", fine), replace(MIXED, samples=12), fine)
    assert fault.startswith("a step has 10.0 samples on average, which is not within 10%")


def certificate(comparison: Comparison | None, *reasons: str) -> Certificate:
    subject = CertifiedJob(
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
        training="{}",
        origin="digest",
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
    found = report(
        parameter("a", difference=1e-7),
        reference="stages",
        updates=(update(1e-9),),
        saved=SavedCount(tensors=7, size=1000),
    )
    made = certificate(compare("float32", [found, found], ("a part, since it is large",)))
    path = tmp_path / "certificates" / "0123456789abcdef-fedcba9876543210.json"
    write_certificate(path, made)
    (path.parent / "0123456789abcdef-other.json").write_text("{}")
    assert read_certificate(path) == made
    assert stored_certificates(path.parent, "0123456789abcdef") == (made,)
    text = certificate_text(made)
    assert "holds; step 1 of the training, in float32, in 2.5 s" in text
    assert "Step 1, with 1 times the learning rates, 10 samples: loss 2, expected 2" in text
    assert "Weights after it: 0.09 of the allowed difference from torch's own, in a" in text
    assert "token ids of 10 records and labels of 8 compared" in text
    assert "2 could not be" in text
    assert "Saved weights: 7 tensors, as transformers loads them" in text
    assert "Not compared: what is the same for every plan of these stages: the model's own code," in text
    assert "Not compared: a part, since it is large" in text
    assert "the plan's own stages, one sample per micro-batch" in text
    assert "language  1.0000000  1.0e-07" in text
    assert "60 samples in 6 steps, each as often as the data says" in text
    assert "100.0% of the full steps are near the global batch; variance between" in text
    assert "steps over that of random ones: length 0.40, images 1.90" in text


def test_a_certificate_of_another_job_says_so() -> None:
    made = certificate(compare("float32", [report()]))
    own, other = (certificate_text(made, workload) for workload in (made.subject.workload, "another"))
    assert own == certificate_text(made)
    named = f"for another workload ({made.subject.model} on 2 CPU ranks): holds"
    assert named in other
    assert named not in own


def test_nothing_is_trained_without_a_certificate_that_holds() -> None:
    compared = compare("float32", [report()])
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


@pytest.mark.parametrize(
    ("mean", "expected"),
    [
        (16.8, ", which makes 5 % fewer updates"),
        (14.9, ", which makes 7 % more updates"),
        (16.0, ""),
        (16.05, ""),
    ],
)
def test_a_certificate_counts_the_updates_that_another_batch_takes_away(mean: float, expected: str) -> None:
    assert updates_text(mean, 16) == expected

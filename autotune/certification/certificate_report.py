"""Certificates as text for people."""

from collections.abc import Sequence

from autotune.certification.certificate import Certificate, Comparison, PartComparison, StepComparison
from autotune.results.text_table import table
from trials.certification import EpochCount, Neutrality, Reference
from trials.units import number_of

_REFERENCES: dict[Reference, str] = {
    "transformers": "transformers' own model, samples one by one, without recomputation",
    "stages": "the plan's own stages, one sample per micro-batch, without recomputation",
    "recomputed-stages": "the plan's own stages with their recomputation, one sample per micro-batch",
}


def certificate_text(certificate: Certificate, workload: str | None = None) -> str:
    """Show the certificate in a few lines; one that was made for another than this `workload` says so."""
    subject = certificate.subject
    is_other = workload is not None and subject.workload != workload
    other = f" for another workload ({subject.model} on {subject.hardware})" if is_other else ""
    made = f"Certificate of {certificate.created:%Y-%m-%d %H:%M} UTC{other}: {certificate.verdict}"
    lines = [made, *(f"  {reason}" for reason in certificate.reasons)]
    if compared := certificate.comparison:
        numbers = ", ".join(str(each.number + 1) for each in compared.steps)
        lines[0] += (
            f"; step{'s' * (len(compared.steps) > 1)} {numbers} of the training, in {subject.dtype}, in "
            f"{certificate.seconds:.1f} s"
        )
        lines += [
            f"Compared with {_REFERENCES[compared.reference]}",
            *(_step_text(each) for each in compared.steps),
            _inputs_text(compared),
            _epoch_text(compared.epoch),
            _neutrality_text(compared.epoch.neutrality),
        ]
        if compared.saved:
            tensors = number_of(compared.saved.tensors, "tensor")
            lines.append(f"Saved weights: {tensors}, as transformers loads them, compared with those of the last step")
        lines += [f"Not compared: {each}" for each in compared.left_out]
    lines += [f"Changes learning: {each}" for each in certificate.changes_learning]
    return "\n".join(lines)


def updates_text(mean_samples: float, asked: int) -> str:
    """Return how many more or fewer updates an epoch has than with the batch asked for; empty below one per cent."""
    change = round(100 * (asked / mean_samples - 1))
    return f", which makes {abs(change)} % {'fewer' if change < 0 else 'more'} updates" if change else ""


def _step_text(step: StepComparison) -> str:
    lines = [f"Step {step.number + 1}, with {step.factor:.4g} times the learning rates"]
    if step.loss:
        lines[0] += (
            f", {number_of(step.samples, 'sample')}: loss {step.loss.found:.6g}, expected {step.loss.expected:.6g}"
        )
    if step.parts:
        lines.append(_parts_text(step.parts))
    if step.update:
        lines.append(
            f"Weights after it: {step.update.difference:.1g} of the allowed difference from torch's own, "
            f"in {step.update.largest_parameter}"
        )
    return "\n".join(lines)


def _parts_text(parts: Sequence[PartComparison]) -> str:
    rows = [
        (
            each.part,
            "both are 0" if each.is_empty else f"{each.cosine:.7f}",
            f"{each.difference:.1e}",
            f"{each.allowed_difference:.1e}",
            f"{each.largest_difference:.1e}",
            f"{each.allowed_largest:.1e}",
        )
        for each in parts
    ]
    return table(("gradient", "cosine", "difference", "allowed", "largest of a parameter", "allowed"), rows)


def _inputs_text(compared: Comparison) -> str:
    inputs = compared.inputs
    text = (
        f"Inputs: token ids of {number_of(inputs.records, 'record')} and labels of {inputs.labelled} compared with "
        "transformers' own processor and chat template"
    )
    return f"{text}; {inputs.uncompared} could not be" if inputs.uncompared else text


def _epoch_text(epoch: EpochCount) -> str:
    wrong = f"{epoch.wrong} of them wrong" if epoch.wrong else "each as often as the data says"
    return (
        f"First epoch: {number_of(epoch.samples, 'sample')} in {number_of(epoch.steps, 'step')}, {wrong}; "
        f"{epoch.mean_samples:.1f} +- {epoch.samples_deviation:.1f} samples in a full step ({epoch.fewest_samples} to "
        f"{epoch.most_samples}), {epoch.last_samples} in the last; {epoch.oversize} above a capacity, {epoch.skipped} "
        "skipped"
    )


def _neutrality_text(found: Neutrality) -> str:
    ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in found.variances.items()) or "no trait differs"
    return (
        f"Steps next to random order: {found.steps_near:.1%} of the full steps are near the global batch; variance "
        f"between steps over that of random ones: {ratios}"
    )

"""Certificates as text for people."""

from autotune.certification.certificate import Certificate, Comparison
from autotune.results.text_table import table
from trials.certification import EpochCount, Reference
from trials.units import number_of

_REFERENCES: dict[Reference, str] = {
    "transformers": "transformers' own model, samples one by one, without recomputation",
    "stages": "the plan's own stages, one sample per micro-batch, without recomputation",
    "recomputed-stages": "the plan's own stages with their recomputation, one sample per micro-batch",
}


def certificate_text(certificate: Certificate) -> str:
    """Show the certificate in a few lines."""
    made = f"Certificate of {certificate.created:%Y-%m-%d %H:%M} UTC: {certificate.verdict}"
    lines = [made, *(f"  {reason}" for reason in certificate.reasons)]
    if compared := certificate.comparison:
        lines[0] += (
            f"; gradients of step {compared.step} with {number_of(compared.samples, 'sample')}, in "
            f"{certificate.subject.dtype}, in {certificate.seconds:.1f} s"
        )
        lines += [
            f"Compared with {_REFERENCES[compared.reference]}",
            _parts_text(compared),
            _epoch_text(compared.epoch),
        ]
    lines += [f"Changes learning: {each}" for each in certificate.changes_learning]
    return "\n".join(lines)


def _parts_text(compared: Comparison) -> str:
    rows = [
        (
            each.part,
            f"{each.cosine:.7f}",
            f"{each.difference:.1e}",
            f"{each.allowed_difference:.1e}",
            f"{each.largest_difference:.1e}",
            f"{each.allowed_largest:.1e}",
        )
        for each in compared.parts
    ]
    header = ("gradient", "cosine", "difference", "allowed", "largest of a parameter", "allowed")
    loss = compared.loss
    return f"{table(header, rows)}\nLoss {loss.found:.6g}, expected {loss.expected:.6g}"


def _epoch_text(epoch: EpochCount) -> str:
    wrong = f"{epoch.wrong} of them wrong" if epoch.wrong else "each as often as the data says"
    return (
        f"First epoch: {number_of(epoch.samples, 'sample')} in {number_of(epoch.steps, 'step')}, {wrong}; "
        f"{epoch.mean_samples:.1f} +- {epoch.samples_deviation:.1f} samples in a full step ({epoch.fewest_samples} to "
        f"{epoch.most_samples}), {epoch.last_samples} in the last; {epoch.oversize} above a capacity, {epoch.skipped} "
        "skipped"
    )

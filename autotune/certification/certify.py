"""Certification of a plan: the ranks compute one real step twice, and the agent compares the results."""

import logging
import time
from datetime import UTC, datetime
from pathlib import Path

from autotune.certification.certificate import (
    CERTIFICATE_FILE,
    Certificate,
    Comparison,
    Subject,
    certificate_path,
    compare,
    faults,
    read_certificate,
    write_certificate,
)
from autotune.errors import NotCertified
from autotune.events import Listener, Phase, PhaseBegan, start_events, unheard
from autotune.folders import certificates_folder
from autotune.workload import Prepared, check_plan
from trials.certification import Reference
from trials.errors import OutputTaken
from trials.job import PARTS, LossWeighting, TrainingSection
from trials.outcome import Cause, OutOfMemory
from trials.plan import Plan
from trials.run.pool import Answers, WarmPool
from trials.sites import Site
from trials.tasks.answer import CertificationReport
from trials.tasks.request import Certification
from trials.units import number_of

_log = logging.getLogger(__name__)

_MODES = {"frozen": "frozen", "adapters": "with adapters"}
_EQUAL: dict[LossWeighting, str] = {
    "token": "target tokens equally",
    "sample": "samples equally",
    "square": "samples by the square roots of their target tokens",
}
_STEP = 0
"""Any step would do: steps are in random order."""
_TIMEOUTS = 10
"""Most time, in timeouts of a trial: a reference without packing takes longer than a few packed steps."""
_REFERENCE_BYTES = 8
"""Bytes of a parameter of the reference: a float32 weight and the float32 sum of its gradients."""


def certify(prepared: Prepared, plan: Plan, folder: Path, site: Site, listener: Listener = unheard) -> Certificate:
    """Compare one step of the plan with the best reference that fits, and store the certificate below `folder`.

    If the ranks fail, the verdict is `not made`. Raise what `check_plan` raises.
    """
    check_plan(prepared, plan)
    start = time.monotonic()
    text = f"Certifying plan {plan.id}: the gradients of one step, compared with a reference"
    listener(PhaseBegan(phase=Phase.CERTIFICATE, text=text))
    answer = _compared(prepared, plan, folder, site, listener)
    subject, training = _subject(prepared, plan), prepared.job.training
    comparison, reasons = (
        answer if isinstance(answer, tuple) else (None, (f"{answer}; logs are in {_logs(folder, plan)}",))
    )
    certificate = Certificate(
        subject=subject,
        verdict="not made" if comparison is None else "does not hold" if reasons else "holds",
        reasons=reasons,
        comparison=comparison,
        changes_learning=(*_of_data(prepared, comparison), _of_settings(training)),
        created=datetime.now(UTC),
        seconds=time.monotonic() - start,
    )
    try:
        # A full disk must not cost what took minutes to compute.
        write_certificate(_place(folder, subject), certificate)
    except OSError as error:
        _log.warning("the certificate of plan %s is not stored: %s", plan.id, error.strerror)
    return certificate


def known_certificate(prepared: Prepared, plan: Plan, folder: Path) -> Certificate | None:
    """Return the stored certificate of the plan on exactly this job, whether it holds or not; None if none was made."""
    subject = _subject(prepared, plan)
    found = read_certificate(_place(folder, subject))
    # The file is named by plan and workload, but seed, weights and adapters decide as well.
    return found if found and found.comparison and found.subject == subject else None


def warn_of(certificate: Certificate) -> None:
    """Log a warning unless the certificate holds."""
    if not certificate.holds:
        reasons = "; ".join(certificate.reasons)
        _log.warning("the certificate of plan %s: %s: %s", certificate.subject.plan, certificate.verdict, reasons)


def require(certificate: Certificate) -> None:
    """Raise NotCertified unless the certificate holds."""
    plan, reasons = certificate.subject.plan, "; ".join(certificate.reasons)
    if certificate.verdict == "not made":
        raise NotCertified(
            f"plan {plan} could not be certified, so nothing was trained: {reasons}; remove the cause, or launch "
            "without --certify"
        )
    if not certificate.holds:
        raise NotCertified(
            f"the certificate of plan {plan} does not hold, so nothing was trained: {reasons}; `autotune show {plan}` "
            "prints it; report it, or train with another plan"
        )


def check_place(output: Path) -> None:
    """Raise OutputTaken when the output folder has another file under the name of the certificate."""
    path = output / CERTIFICATE_FILE
    if path.exists() and read_certificate(path) is None:
        raise OutputTaken(f"{path} is not a certificate of autotune; move it, or name another training.output")


def _compared(
    prepared: Prepared, plan: Plan, folder: Path, site: Site, listener: Listener
) -> tuple[Comparison, tuple[str, ...]] | Cause:
    """Return the comparison with its faults, or why the ranks failed with every reference."""
    job, references = prepared.job, _references(prepared)
    launcher = site.launcher(_logs(folder, plan), plan.layout.world_size)
    with WarmPool(launcher, on_start=start_events(listener)) as pool:
        for reference in references:
            request = prepared.request(plan, Certification(step=_STEP, reference=reference))
            answer = pool.ask(request, _TIMEOUTS * job.search.trial_timeout)
            # The next reference needs less memory; any other failure would come again.
            if not isinstance(answer, OutOfMemory) or reference == references[-1]:
                break
            _log.info("the reference %s does not fit in memory: %s", reference, answer)
    if not isinstance(answer, Answers):
        return answer
    reports = [report for report in answer.reports if isinstance(report, CertificationReport)]
    comparison = compare(_STEP, job.model.dtype, reports)
    return comparison, faults(comparison, job.training.global_batch_samples, [report.epoch for report in reports])


def _references(prepared: Prepared) -> tuple[Reference, ...]:
    """Return the references to try, best first: the whole model only where it fits on one device."""
    work = prepared.workload
    on_stages: tuple[Reference, ...] = ("stages", "recomputed-stages")
    # A guess without activations: where it is wrong, the ranks run out of memory, and the next one is tried.
    fits = _REFERENCE_BYTES * work.model.parameters < work.memory_limit_bytes
    return ("transformers", *on_stages) if fits else on_stages


def _subject(prepared: Prepared, plan: Plan) -> Subject:
    job, work = prepared.job, prepared.workload
    return Subject(
        plan=plan.id,
        workload=work.fingerprint,
        model=work.model.name,
        config_digest=work.model.config_digest,
        weights=job.model.weights,
        dtype=job.model.dtype,
        data_digest=work.data.lengths_digest,
        hardware=str(work.hardware),
        software=work.software,
        seed=job.training.seed,
        global_batch_samples=job.training.global_batch_samples,
        adapters=job.training.lora.model_dump_json() if job.training.lora.rank else None,
        loss_weighting=job.training.loss_weighting,
    )


def _of_data(prepared: Prepared, comparison: Comparison | None) -> tuple[str, ...]:
    """Return what the plan and the data change in the training."""
    data, index = prepared.job.data, prepared.index
    found = []
    if comparison:
        epoch = comparison.epoch
        found.append(
            f"single steps have {epoch.fewest_samples} to {epoch.most_samples} samples, the last one "
            f"{epoch.last_samples}, instead of {prepared.job.training.global_batch_samples}; each step counts its "
            f"{_EQUAL[prepared.job.training.loss_weighting]}"
        )
        if comparison.blank_samples:
            found.append(
                f"{number_of(comparison.blank_samples, 'sample of the step is', 'samples of the step are')} blank in "
                "place of what cannot be read; the loss is still divided by the weights of all"
            )
        if epoch.skipped:
            found.append(
                f"{number_of(epoch.skipped, 'sample is', 'samples are')} above a capacity of the plan and skipped"
            )
    curriculum = prepared.job.training.curriculum
    if curriculum.steps:
        found.append(
            f"the first {curriculum.steps} steps of the training have only samples of at most {curriculum.max_tokens} "
            "text tokens, so that later steps of the first epoch have fewer of them; the step and the epoch of this "
            "certificate are without that"
        )
    if data.oversize == "truncate":
        longest = data.max_tokens or int(index.text_tokens.max())
        cut = int((index.text_tokens == longest).sum())
        found.append(f"samples are cut to {longest} tokens, at most {cut} of {len(index)}")
    return tuple(found)


def _of_settings(training: TrainingSection) -> str:
    rates = "".join(
        f", {name} {rate:g}" for name, rate in training.learning_rates.model_dump(exclude_none=True).items()
    )
    warmup = f" after a warm-up of {training.warmup:g}" if training.warmup else ""
    trained = "".join(f", {part} {_MODES[mode]}" for part in PARTS if (mode := training.mode_of(part)) != "whole")
    clip = "no clipping" if training.clip_norm is None else f"clipping at {training.clip_norm:g}"
    return (
        f"learning rate {training.learning_rate:g}{rates}, {training.schedule}{warmup}, weight decay "
        f"{training.weight_decay:g}, {clip}{trained}: the same under every plan, and not part of the comparison"
    )


def _place(folder: Path, subject: Subject) -> Path:
    return certificate_path(certificates_folder(folder), subject.plan, subject.workload)


def _logs(folder: Path, plan: Plan) -> Path:
    return folder / "certify" / plan.id

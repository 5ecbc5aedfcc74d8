"""Certification of a plan: the ranks make real steps twice, and the agent compares the results."""

import logging
import shutil
import time
from datetime import UTC, datetime
from pathlib import Path

from autotune.certification.certificate import (
    CERTIFICATE_FILE,
    Certificate,
    CertifiedJob,
    Comparison,
    certificate_path,
    compare,
    faults,
    read_certificate,
    write_certificate,
)
from autotune.certification.certificate_report import updates_text
from autotune.certification.origin import has_known_files, origin_digest
from autotune.errors import NotCertified
from autotune.events import Listener, Phase, PhaseBegan, start_events, unheard
from autotune.folders import certificates_folder
from autotune.model_shape import count_of_job
from autotune.plan_check import check_plan, check_samples
from autotune.workload import Prepared
from trials.certification import Mixed, Reference
from trials.errors import OutputTaken
from trials.job import PARTS, LossWeighting, TrainingSection
from trials.machine.control_groups import usable_memory_bytes
from trials.outcome import Cause, OutOfMemory
from trials.plan import Plan
from trials.run.pool import Answers, WarmPool
from trials.sites import Site
from trials.tasks.answer import CertificationReport
from trials.tasks.request import Certification
from trials.units import number_of

_log = logging.getLogger(__name__)

_COMPARED = {
    "learning_rate", "learning_rates", "freeze", "lora", "max_steps", "schedule", "warmup", "weight_decay", "betas",
    "clip_norm", "loss_weighting", "curriculum", "epochs", "compile", "batch_tolerance", "step_variance",
}  # fmt: skip
"""Settings of the training on which the compared steps and the verdict depend."""
_MODES = {"frozen": "frozen", "adapters": "with adapters"}
_EQUAL: dict[LossWeighting, str] = {
    "token": "target tokens equally",
    "sample": "samples equally",
    "square": "samples by the square roots of their target tokens",
}
_TIMEOUTS = 20
"""Most time, in timeouts of a trial: a reference without packing takes longer than a few packed steps."""
_REFERENCE_BYTES = 8
"""Bytes of a parameter of the reference: a float32 weight and the float32 sum of its gradients."""
_HOST_BYTES = 44
"""Bytes that the ranks keep of a parameter in the memory of the host, at most, to compare further steps."""
_SAVED_BYTES = 4 << 30
"""Most bytes of weights that `tune` writes: some seconds of a disk, so that small models are always covered. Larger
ones take minutes, which only a training that is about to begin is worth."""
# A choice: other programs write to the disk meanwhile.
_SPARE = 1.5
"""Free space for written weights, as a multiple of their bytes."""


def certify(
    prepared: Prepared, plan: Plan, folder: Path, site: Site, listener: Listener = unheard, *, whole: bool = False
) -> Certificate:
    """Compare steps of the plan with the best reference that fits, and store the certificate below `folder`.

    With `whole` also weights of more than 4 GiB are written as the training would, and compared. If the ranks fail, the
    verdict is `not made`. Raise what `check_plan` and `check_samples` raise.
    """
    check_plan(prepared, plan)
    check_samples(prepared, plan)
    start, subject = time.monotonic(), _subject(prepared, plan)
    text = f"Certifying plan {plan.id}: its first steps, inputs and saved weights, compared with a reference"
    listener(PhaseBegan(phase=Phase.CERTIFICATE, text=text))
    answer = _compared(prepared, plan, folder, site, listener, whole=whole)
    comparison, reasons = (
        answer if isinstance(answer, tuple) else (None, (f"{answer}; logs are in {_logs(folder, plan)}",))
    )
    certificate = Certificate(
        subject=subject,
        verdict="not made" if comparison is None else "does not hold" if reasons else "holds",
        reasons=reasons,
        comparison=comparison,
        changes_learning=(*_of_data(prepared, comparison), _of_settings(prepared.job.training)),
        created=datetime.now(UTC),
        seconds=time.monotonic() - start,
    )
    try:
        # A full disk must not cost what took minutes to compute.
        write_certificate(_place(folder, plan, prepared), certificate)
    except OSError as error:
        _log.warning("the certificate of plan %s is not stored: %s", plan.id, error.strerror)
    return certificate


def known_certificate(prepared: Prepared, plan: Plan, folder: Path) -> Certificate | None:
    """Return the stored certificate of the plan on exactly this job, whether it holds or not; None if none was made.

    Return None as well for a model with code of its own or one that is no local folder, since changes of its files
    cannot be detected.
    """
    if not has_known_files(prepared):
        return None
    found = read_certificate(_place(folder, plan, prepared))
    # The file is named by plan and workload, but seed, weights and adapters decide as well.
    return found if found and found.comparison and found.subject == _subject(prepared, plan) else None


def warn_of(certificate: Certificate) -> None:
    """Log a warning unless the certificate holds."""
    if not certificate.holds:
        plan, reasons = certificate.subject.plan, "; ".join(certificate.reasons)
        text = "the certificate of plan %s: %s: %s; `autotune show %s` prints it; report it, or take another plan"
        _log.warning(text, plan, certificate.verdict, reasons, plan)


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
    prepared: Prepared, plan: Plan, folder: Path, site: Site, listener: Listener, *, whole: bool
) -> tuple[Comparison, tuple[str, ...]] | Cause:
    """Return the comparison with its faults, or why the ranks failed with every reference."""
    job, references = prepared.job, _references(prepared)
    left_out = list[str]()
    scratch = _scratch(prepared, plan, folder, whole=whole)
    if isinstance(scratch, str):
        left_out.append(f"the saved weights, {scratch}")
    follows = _HOST_BYTES * prepared.workload.model.parameters < usable_memory_bytes() // 2
    if not follows:
        left_out.append(
            f"steps behind the first, for which {_HOST_BYTES} bytes of a parameter do not fit in half of the memory"
        )
    launcher = site.launcher(_logs(folder, plan), plan.layout.world_size)
    with WarmPool(launcher, on_start=start_events(listener)) as pool:
        for reference in references:
            task = Certification(
                reference=reference, follows=follows, scratch=scratch if isinstance(scratch, Path) else None
            )
            answer = pool.ask(prepared.request(plan, task), _TIMEOUTS * job.search.trial_timeout)
            # The next reference needs less memory; any other failure would come again.
            if not isinstance(answer, OutOfMemory) or reference == references[-1]:
                break
            _log.info("the reference %s does not fit in memory: %s", reference, answer)
    if not isinstance(answer, Answers):
        return answer
    reports = [report for report in answer.reports if isinstance(report, CertificationReport)]
    comparison = compare(job.model.dtype, reports, tuple(left_out))
    return comparison, faults(comparison, Mixed.of_job(job.training), reports)


def _scratch(prepared: Prepared, plan: Plan, folder: Path, *, whole: bool) -> Path | str:
    """Return the folder for weights as the training would write them, or why none are written."""
    job, model = prepared.job, prepared.workload.model
    # A folder that all nodes see, as a training needs one.
    place = folder if job.hardware.launcher == "local" else job.training.output.parent
    size = _saved_parameters(prepared) * model.element_bytes
    shown = f"{size / (1 << 30):.1f} GiB"
    if size > _SAVED_BYTES and not whole:
        return f"since they are {shown}; `autotune launch JOB --certify` compares them"
    place.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(place).free < _SPARE * size:
        return f"since {place} has no room for {shown}"
    return (place / f".certificate-{plan.id}").resolve()


def _saved_parameters(prepared: Prepared) -> int:
    """Return how many parameters the training saves at its end: with LoRA only those that train."""
    job = prepared.job
    if not job.training.lora.rank:
        return prepared.workload.model.parameters
    counts = count_of_job(job.model, job.training)
    return counts.every - counts.frozen


def _references(prepared: Prepared) -> tuple[Reference, ...]:
    """Return the references to try, best first: the whole model only where it fits on one device."""
    work = prepared.workload
    on_stages: tuple[Reference, ...] = ("stages", "recomputed-stages")
    # A guess without activations: where it is wrong, the ranks run out of memory, and the next one is tried.
    fits = _REFERENCE_BYTES * work.model.parameters < work.memory_limit_bytes
    return ("transformers", *on_stages) if fits else on_stages


def _subject(prepared: Prepared, plan: Plan) -> CertifiedJob:
    job, work = prepared.job, prepared.workload
    return CertifiedJob(
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
        training=job.training.model_dump_json(include=_COMPARED),
        origin=origin_digest(prepared),
    )


def _of_data(prepared: Prepared, comparison: Comparison | None) -> tuple[str, ...]:
    """Return what the plan and the data change in the training."""
    data, index = prepared.job.data, prepared.index
    found = []
    if comparison:
        epoch, asked = comparison.epoch, prepared.job.training.global_batch_samples
        found.append(
            f"single steps have {epoch.fewest_samples} to {epoch.most_samples} samples, the last one "
            f"{epoch.last_samples}, instead of {asked}{updates_text(epoch.mean_samples, asked)}; each step counts its "
            f"{_EQUAL[prepared.job.training.loss_weighting]}"
        )
        if blank := sum(each.blank_samples for each in comparison.steps):
            found.append(
                f"{number_of(blank, 'sample of these steps is', 'samples of these steps are')} blank in "
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
            "text tokens, so that later steps of the first epoch have fewer of them; the epoch that is counted is "
            "without that"
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
        f"{training.weight_decay:g}, {clip}{trained}: the same under every plan"
    )


def _place(folder: Path, plan: Plan, prepared: Prepared) -> Path:
    return certificate_path(certificates_folder(folder), plan.id, prepared.workload.fingerprint)


def _logs(folder: Path, plan: Plan) -> Path:
    return folder / "certify" / plan.id

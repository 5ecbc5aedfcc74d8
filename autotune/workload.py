"""Preparation of a job: its workload, which is the key of all measurements, and the index for its ranks."""

import logging
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.data_problems import (
    check_inputs,
    check_media,
    check_sources,
    model_findings,
    warn_of_bad_data,
    warn_of_little_data,
)
from autotune.errors import JobError
from autotune.events import Listener, unheard
from autotune.folders import lengths_folder
from autotune.held_out import hold_out, shown_by, trained_on
from autotune.machine.device_problems import Finding, memory_limit, warn_of
from autotune.machine.hardware import default_workers, software
from autotune.machine.job_hardware import hardware_of
from autotune.model_shape import model_shape
from trials.arrays import Ints
from trials.data.epoch import CostWeights, Epoch, EpochSettings, build_epoch
from trials.data.index import DatasetIndex, profile
from trials.data.indexing import IndexReport, build_index
from trials.data.pack_cost import cost_weights
from trials.data.records.sample import Encoder
from trials.errors import DataError, TrialsError
from trials.job import Job, TrainingSection
from trials.machine.shared_memory import shared_memory_bytes
from trials.model.inputs.encoders import load_encoder
from trials.plan import Packing, Plan
from trials.tasks.request import Request, Task
from trials.tasks.training.schedule import schedule_of
from trials.units import number_of
from trials.workload import Hardware, ModelShape, Part, Workload

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A job with its workload and dataset index, ready to run."""

    job: Job
    workload: Workload
    index: DatasetIndex
    index_file: Path
    weights: CostWeights
    held_out: DatasetIndex | None = None
    """Samples to evaluate on."""
    held_out_file: Path | None = None

    def epoch(self, packing: Packing, data_parallel: int, number: int = 0, order: Ints | None = None) -> Epoch:
        """Return the steps of epoch `number`, as the ranks will build them, of the samples in `order` or of all."""
        settings = EpochSettings.of_job(self.job, self.weights)
        return build_epoch(self.index, packing, settings, data_parallel=data_parallel, number=number, order=order)

    def request(self, plan: Plan, task: Task) -> Request:
        return Request(
            job=self.job.model_copy(update={"database": None}),  # ranks do not need its password
            plan=plan,
            task=task,
            index=self.index_file,
            held_out=self.held_out_file,
            weights=self.weights,
            memory_limit_bytes=self.workload.memory_limit_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """Facts about a job that need no reading of its data."""

    hardware: Hardware
    shape: ModelShape
    encoder: Encoder
    findings: tuple[Finding, ...]
    """Of the model, which do not keep it from being trained."""


def look_at(job: Job) -> Outline:
    """Probe the hardware and describe the model. Nothing is written.

    Raise what `hardware_of` and `model_shape` raise, JobError for a setting of a part that the model does not have,
    and DataError for an annotation file that is not there or holds nothing to train on.
    """
    check_sources(job)
    hardware = hardware_of(job)
    shape = model_shape(job.model, job.training)
    _check_parts(job, shape)
    encoder = load_encoder(job.model, job.data)
    return Outline(
        hardware=hardware,
        shape=shape,
        encoder=encoder,
        findings=tuple(model_findings(encoder, job.model)),
    )


def _check_parts(job: Job, shape: ModelShape) -> None:
    """Raise JobError for a setting of a part that the model does not have."""
    parts: tuple[Part, ...] = ("vision", "projector")
    for part in parts if not shape.vision_layers else ():
        lora = job.training.lora
        if lora.rank and (part in lora.parts or (lora.train_projector and part == "projector")):
            raise JobError(
                f"training.lora trains the {part}, but {shape.name} is a {shape.family} model without vision; "
                "leave it out"
            )
        if part in job.training.freeze:
            raise JobError(
                f"training.freeze has {part}, but {shape.name} is a {shape.family} model without vision; remove it"
            )
        if (rate := getattr(job.training.learning_rates, part)) is not None:
            raise JobError(
                f"training.learning_rates.{part}: {rate:g}, but {shape.name} is a {shape.family} model without vision; "
                "remove the key"
            )


def prepare(job: Job, folder: Path) -> Prepared:
    """Describe the job and read its data. Raise what `look_at` and `read_data` raise."""
    return read_data(job, look_at(job), folder)


def read_data(
    job: Job,
    outline: Outline,
    folder: Path,
    listener: Listener = unheard,
    *,
    cache: Path | None = None,
) -> Prepared:
    """Index the data; the index for the ranks is written to `folder`, `cache` keeps lengths for the next time.

    Raise what `build_index` raises, DataError where a model with vision is left no image, and JobError for a warm-up
    longer than the training or a curriculum that the data cannot have. Bad lines, and too few samples for a step, are
    logged as warnings.
    """
    prepared, report = _read(job, outline, folder, listener, cache)
    check_media(report, outline.encoder)
    return prepared


def _read(
    job: Job, outline: Outline, folder: Path, listener: Listener, cache: Path | None
) -> tuple[Prepared, IndexReport]:
    hardware, shape = outline.hardware, outline.shape
    if job.data.workers is None:  # set here, so that trials and the full training have the same
        workers = default_workers(hardware, job.search.parallel, shared_bytes=shared_memory_bytes())
        job = job.model_copy(update={"data": job.data.model_copy(update={"workers": workers})})
    index, report = build_index(job.data, outline.encoder, Path(), listener, cache=cache)
    warn_of_bad_data(report)
    warn_of(outline.findings)
    check_inputs(job, index, outline.encoder)
    index, held_out = hold_out(index, job.evaluation)
    if job.evaluation.sources is not None:
        held_out = _read_held_out(job, index, outline.encoder, listener, cache)
    if held_out is not None and not held_out.target_tokens.any():
        raise DataError(f"evaluation: none of the {len(held_out)} samples has a target token; choose others")
    data = profile(index)
    _check_lengths_in_steps(job.training, data.samples)
    _check_curriculum_of_data(job.training, index)
    warn_of_little_data(data, shape, job.training)
    folder.mkdir(parents=True, exist_ok=True)
    index_file = _saved(index, folder)
    workload = Workload(
        model=shape,
        data=data,
        hardware=hardware,
        software=software(),
        oversize=job.data.oversize,
        global_batch_samples=job.training.global_batch_samples,
        memory_limit_bytes=memory_limit(hardware, job.search.parallel, job.hardware.memory_limit),
    )
    prepared = Prepared(
        job=job,
        workload=workload,
        index=index,
        index_file=index_file.absolute(),
        weights=cost_weights(shape),
        held_out=held_out,
        held_out_file=None if held_out is None else _saved(held_out, folder),
    )
    return prepared, report


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What a job's data are."""

    workload: Workload
    report: IndexReport
    index: DatasetIndex
    """The samples to train on."""


def survey(job: Job, outline: Outline, listener: Listener = unheard) -> Survey:
    """Read the data of the job, without taking its devices or opening a database.

    Raise what `read_data` raises, except that lost images are left to the report.
    """
    with tempfile.TemporaryDirectory() as folder:
        prepared, report = _read(job, outline, Path(folder), listener, lengths_folder())
    return Survey(workload=prepared.workload, report=report, index=prepared.index)


def workload_of(job: Job, outline: Outline, listener: Listener = unheard) -> Workload:
    """Return the workload of the job as `survey` reads it. Raise what `read_data` raises."""
    found = survey(job, outline, listener)
    check_media(found.report, outline.encoder)
    return found.workload


def _read_held_out(
    job: Job, training: DatasetIndex, encoder: Encoder, listener: Listener, cache: Path | None
) -> DatasetIndex:
    """Return the index of `evaluation.sources`; log bad lines, and samples that are also trained on, as warnings."""
    data = job.data.model_copy(update={"sources": job.evaluation.sources})
    held_out, report = build_index(data, encoder, Path(), listener, cache=cache, section="evaluation")
    warn_of_bad_data(report)
    check_media(report, encoder)
    check_inputs(job, held_out, encoder)
    shown = shown_by(held_out, job.evaluation.seed)
    if len(rows := trained_on(training, job.training.seed, shown)):
        _log.warning(
            "%d of the %d samples of evaluation.sources are also in data.sources, %s among them: the evaluation loss "
            "will be too low; hold samples out by evaluation.samples, or choose others by `sampling`",
            len(rows),
            len(shown),
            shown.where(int(rows[0])),
        )
    return held_out


def _saved(index: DatasetIndex, folder: Path) -> Path:
    """Save an index under a name of its own, because other agents and jobs use the same folder."""
    path = folder / f"index-{index.content_digest}.npz"
    index.save(path)
    return path.absolute()


def _check_lengths_in_steps(training: TrainingSection, samples: int) -> None:
    """Raise JobError for a warm-up longer than the training of any plan; warn of `max_steps` that none makes."""
    least = (1 - training.batch_tolerance) * training.global_batch_samples
    # The last step of a curriculum is a short one, as that of an epoch is.
    most_steps = math.ceil(samples / least) + (training.curriculum.max_tokens is not None)
    check_warmup(training, [most_steps] * training.epochs)
    if training.max_steps is not None and training.max_steps > most_steps * training.epochs:
        _log.warning(
            "training.max_steps: %d are more than the %s that training.epochs: %d makes at most, after which the "
            "training ends; raise training.epochs",
            training.max_steps,
            number_of(most_steps * training.epochs, "step"),
            training.epochs,
        )


def check_warmup(training: TrainingSection, epochs: Sequence[int]) -> None:
    """Raise JobError for a warm-up that is longer than a training whose epochs have these numbers of steps."""
    try:
        schedule_of(training, epochs)
    except TrialsError as error:
        raise JobError(str(error)) from error


def check_curriculum(training: TrainingSection, samples: int, steps: int, maker: str) -> None:
    """Raise JobError for a curriculum of more steps than its `maker`, a plan, makes of its samples in an epoch."""
    wanted, most = training.curriculum.steps, training.curriculum.max_tokens
    if wanted is not None and wanted > steps:
        raise JobError(
            f"training.curriculum.steps: {wanted} are more than the {number_of(steps, 'step')} that {maker} makes of "
            f"the {number_of(samples, 'sample')} of an epoch with at most {most} text tokens; lower it, or raise "
            "max_tokens"
        )


def _check_curriculum_of_data(training: TrainingSection, index: DatasetIndex) -> None:
    """Raise JobError for a curriculum of no samples, of all, or of too few for its steps under any plan."""
    most = training.curriculum.max_tokens
    if most is None:
        return
    tokens, name = index.text_tokens, f"training.curriculum.max_tokens: {most}"
    if most < tokens.min():
        raise JobError(f"{name} is less than the {tokens.min()} text tokens of the shortest sample; raise it")
    if most >= tokens.max():
        raise JobError(
            f"{name} leaves no sample for later: the longest has {tokens.max()} text tokens; lower it, or remove "
            "training.curriculum"
        )
    # A whole number of rows makes a step, so that it may have a third fewer samples than it should.
    short = math.ceil(index.repeats[tokens <= most].sum())
    check_curriculum(training, short, math.ceil(1.5 * short / training.global_batch_samples), "any plan")

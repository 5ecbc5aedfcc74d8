"""From a job to the workload that keys everything measured, and the files that its ranks need."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autotune.hardware import default_memory_limit, probe_hardware, software
from trials.data.epoch import CostWeights, Epoch, build_epoch
from trials.data.index import DatasetIndex, profile
from trials.data.indexing import IndexReport, build_index
from trials.data.jsonl import open_annotations
from trials.data.sample import Encoder
from trials.job import Job
from trials.model.shape import cost_weights, model_shape
from trials.model.skeleton import load_config, load_family
from trials.plan import Packing, Plan
from trials.run.request import Request, Task
from trials.workload import Hardware, ModelShape, Workload

_log = logging.getLogger(__name__)
_SHOWN_LINES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A job that has been looked at: nothing has run yet."""

    job: Job
    workload: Workload
    index: DatasetIndex
    index_file: Path
    weights: CostWeights

    def epoch(self, packing: Packing, data_parallel: int) -> Epoch:
        """The first epoch's packs and steps: the same that the ranks will make."""
        return build_epoch(
            self.index,
            packing,
            data_parallel=data_parallel,
            global_batch_samples=self.job.training.global_batch_samples,
            weights=self.weights,
            seed=self.job.training.seed,
            epoch=0,
            oversize=self.job.data.oversize,
        )

    def request(self, plan: Plan, task: Task) -> Request:
        return Request(
            job=self.job.model_copy(update={"database": None}),  # its password is none of the ranks' business
            plan=plan,
            task=task,
            index=self.index_file,
            weights=self.weights,
            memory_limit_bytes=self.workload.memory_limit_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What can be known of a job in seconds, whatever the size of its data."""

    hardware: Hardware
    shape: ModelShape
    encoder: Encoder


def look_at(job: Job) -> Outline:
    """Probes the hardware and describes the model. Nothing is written.

    Raises what `probe_hardware` and `model_shape` raise, and DataError for an annotation file that is not there.
    """
    for source in job.data.sources:
        open_annotations(source.path).close()
    hardware = probe_hardware(job.hardware)
    shape = model_shape(job.model)
    family = load_family(load_config(job.model.path, trust_remote_code=job.model.trust_remote_code))
    encoder = family.encoder(job.model.path, trust_remote_code=job.model.trust_remote_code)
    return Outline(hardware=hardware, shape=shape, encoder=encoder)


def prepare(job: Job, folder: Path, progress: Callable[[int], None] | None = None) -> Prepared:
    """Looks at the job and reads its data; raises what `look_at` and `read_data` raise."""
    return read_data(job, look_at(job), folder, progress)


def read_data(job: Job, outline: Outline, folder: Path, progress: Callable[[int], None] | None = None) -> Prepared:
    """Indexes the data; `folder` takes the index for the ranks.

    Raises what `build_index` raises. Bad lines, and a step that no epoch can fill, are logged as warnings.
    """
    hardware, shape = outline.hardware, outline.shape
    index, report = build_index(job.data, outline.encoder, Path(), progress)
    _warn(report)
    data = profile(index)
    if data.samples < job.training.global_batch_samples:
        _log.warning(
            "an epoch has %d samples, fewer than training.global_batch_samples: %d, so each of its steps is smaller; "
            "lower the setting or add data",
            data.samples,
            job.training.global_batch_samples,
        )
    folder.mkdir(parents=True, exist_ok=True)
    index_file = folder / "index.npz"
    index.save(index_file)
    workload = Workload(
        model=shape,
        data=data,
        hardware=hardware,
        software=software(),
        oversize=job.data.oversize,
        global_batch_samples=job.training.global_batch_samples,
        memory_limit_bytes=job.hardware.memory_limit or default_memory_limit(hardware),
    )
    return Prepared(
        job=job, workload=workload, index=index, index_file=index_file.absolute(), weights=cost_weights(shape)
    )


def _warn(report: IndexReport) -> None:
    if report.bad:
        shown = "\n".join(f"  {line}" for line in report.bad_lines[:_SHOWN_LINES])
        more = f"\n  and {report.bad - _SHOWN_LINES} more" if report.bad > _SHOWN_LINES else ""
        _log.warning("%d of %d dataset lines are skipped:\n%s%s", report.bad, report.records, shown, more)
    if report.wrong_sizes:
        _log.warning("%d images have another size than their record says; the file's is used", report.wrong_sizes)

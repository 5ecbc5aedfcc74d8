"""A plan, its data and its settings as files of another trainer."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from autotune.data_problems import check_media, warn_of_bad_data
from autotune.draft.arguments import Arguments
from autotune.draft.present import Present
from autotune.draft.present_plan import plan_of
from autotune.draft.settings import draft_of
from autotune.errors import ExportError, PredictError
from autotune.exporting.checks import check_folder, check_wanted, target_of
from autotune.exporting.closest import Restricted
from autotune.exporting.price import Price, price_of
from autotune.exporting.same_tokens import compare_tokens
from autotune.exporting.settings import not_carried
from autotune.exporting.trainers import EXPORTS, Export, Exporter, node_notes, present_notes
from autotune.folders import lengths_folder
from autotune.forecast.forecast import Forecaster
from autotune.held_out import hold_out
from autotune.plan_file import read_plan
from trials import plugins
from trials.data.index import DatasetIndex
from trials.data.indexing import Section, build_index
from trials.data.order import epoch_order
from trials.data.records.sample import Kind
from trials.job import Job
from trials.model.inputs.encoders import load_measurer, token_limit, video_limits
from trials.model.inputs.video_limits import VideoLimits
from trials.model.skeleton import load_config
from trials.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exported:
    """Files for another trainer, and what they hold."""

    trainer: str
    """Its title."""
    folder: Path
    files: tuple[str, ...]
    command: str
    """Starts the training."""
    starts_in: str
    """Folder in which the command starts: the one of the files, or one of the trainer's repository, in words."""
    plan: Plan
    """The plan that the files hold."""
    wanted: Plan
    """The plan that was to be exported."""
    missing: tuple[str, ...]
    """What of the wanted plan the trainer does not have; empty where the files hold that plan."""
    left_out: tuple[str, ...]
    """What is not carried over, in words."""
    notes: tuple[str, ...]
    price: Price
    skipped_lines: int
    """Records of the data that cannot be used."""


def export_plan(
    forecaster: Forecaster,
    plan: Plan,
    trainer: str,
    folder: Path,
    *,
    present: Arguments | None = None,
    python: Path | None = None,
) -> Exported:
    """Write the plan, or where the trainer cannot hold it the best one that it can, into a new folder.

    `present` are the arguments of the user's own configuration of the trainer: what the export does not decide is kept
    from it. `python` is that of an environment in which the trainer is installed, if not this one. Raise ExportError
    for what the trainer cannot train as the job says, and where it counts other tokens; leave no folder behind then.
    """
    check_wanted(trainer, folder)
    exporter = plugins.load(EXPORTS, trainer)
    target = target_of(trainer, forecaster.job, forecaster.shape.family)
    wanted = forecaster.of(plan)
    restricted = Restricted(forecaster, target)
    missing: tuple[str, ...] = ()
    held = restricted.holding(plan)
    if held is None:
        missing = restricted.missing(plan)
        held = restricted.best()
    job = forecaster.job
    config = load_config(job.model.path, trust_remote_code=job.model.trust_remote_code)
    found = Export(
        job=job,
        epoch=forecaster.epoch(held.plan.packing, held.plan.layout.data),
        held=held,
        nodes=_nodes(forecaster, held.plan.layout.data),
        family=forecaster.shape.family,
        folder=folder.absolute(),
        cuts_at=token_limit(job.data, config),
        held_out=_held_out(job),
        present={} if present is None else _own(exporter, present),
        left_variables=() if present is None else _left_variables(exporter, present),
        videos=_videos(forecaster),
        python=python,
    )
    compared = tuple(compare_tokens(exporter, found))
    price = price_of(wanted, held, _present_plan(forecaster, present), restricted)
    files = _written(exporter, found, folder)
    return Exported(
        trainer=exporter.TITLE,
        folder=folder,
        files=files,
        command=exporter.command(found),
        starts_in=exporter.STARTS_IN or str(folder),
        plan=held.plan,
        wanted=plan,
        missing=missing,
        left_out=(*exporter.left_out(found), *not_carried(forecaster.job)),
        notes=(*compared, *exporter.notes(found), *node_notes(found), *present_notes(exporter, found)),
        price=price,
        skipped_lines=forecaster.report.bad,
    )


def _nodes(forecaster: Forecaster, ranks: int) -> int:
    """Return the nodes that the ranks need: of those of the job, or else of those that were profiled.

    Raise ExportError for ranks that cannot be equal on them.
    """
    stated, hardware = forecaster.job.hardware, forecaster.workload.hardware
    if nodes := stated.nodes or len(stated.hosts or ()):
        # A profile may be of fewer devices than the job has nodes.
        hardware = replace(hardware, devices=max(stated.devices or hardware.devices, nodes), nodes=nodes)

    def are_equal(ranks: int) -> bool:
        return ranks % hardware.resized(ranks).nodes == 0

    nodes = hardware.resized(ranks).nodes
    if not are_equal(ranks):
        fewer, more = (next(filter(are_equal, count(ranks, step))) for step in (-1, 1))
        raise ExportError(
            f"the {ranks} ranks of the plan cannot be equal on {nodes} nodes; give --devices {fewer} or {more}, or a "
            "--plan of as many"
        )
    return nodes


def _held_out(job: Job) -> DatasetIndex | None:
    """Return the samples that the job evaluates on; None where it has none. Log bad lines of their own as warnings."""
    evaluation = job.evaluation
    if evaluation.samples is None and evaluation.sources is None:
        return None
    data = job.data.model_copy(update={"sources": evaluation.sources or job.data.sources})
    measurer = load_measurer(job.model, data)
    section: Section = "data" if evaluation.sources is None else "evaluation"
    index, report = build_index(data, measurer, Path(), cache=lengths_folder(), section=section)
    if evaluation.sources is None:  # the data of the training, of which its reading warns
        return hold_out(index, evaluation)[1]
    warn_of_bad_data(report)
    check_media(report, measurer)
    return index.keep(np.sort(epoch_order(index, evaluation.seed, 0))).each_once


def _own(exporter: Exporter, present: Arguments) -> Mapping[str, Any]:
    """Return the arguments of a configuration of this trainer, with `ENV` for variables of a script.

    Raise ExportError for a configuration of another trainer.
    """
    if not exporter.READER.recognises(present):
        raise ExportError(f"--from: the configuration is not one of {exporter.TITLE}; give one, or leave --from out")
    kept = _kept_variables(exporter, present)
    return present.values | ({"ENV": kept} if kept else {})


def _kept_variables(exporter: Exporter, present: Arguments) -> dict[str, str]:
    """Return the variables of a script that the trainer's files hold."""
    return {
        name: value for name, value in present.passed.items() if name in exporter.VARIABLES and isinstance(value, str)
    }


def _left_variables(exporter: Exporter, present: Arguments) -> tuple[str, ...]:
    return tuple(sorted(present.passed.keys() - _kept_variables(exporter, present).keys()))


def _videos(forecaster: Forecaster) -> VideoLimits | None:
    """Return what decides on the frames of videos; None where no sample has one."""
    job = forecaster.job
    has_videos = bool((forecaster.index.kind & Kind.VIDEO).any())
    return video_limits(load_measurer(job.model, job.data)) if has_videos else None


def _present_plan(forecaster: Forecaster, present: Arguments | None) -> Plan | None:
    """Return the plan of the user's present configuration, or else the one that the job names; None without."""
    job, devices = forecaster.job, forecaster.cluster.devices
    if present is not None:
        found = draft_of(present, devices).present
        return plan_of(found, job.model.path, job.model.dtype, devices)[0] if isinstance(found, Present) else None
    if job.search.current_plan is None:
        return None
    try:
        return read_plan(job.search.current_plan)
    except PredictError as error:
        raise ExportError(f"search.current_plan: {error}") from error


def _written(exporter: Exporter, found: Export, folder: Path) -> tuple[str, ...]:
    """Write all files, and return their names; where that fails, nothing is left."""
    partial = folder.absolute().with_name(f".{folder.name}-{uuid4().hex[:8]}.partial")
    try:
        partial.mkdir()
        exporter.write(found, partial)
        check_folder(folder)  # another process may have made it
        partial.rename(folder)
    except OSError as error:
        raise ExportError(f"{folder} cannot be written ({error.strerror or error}); name another folder") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return tuple(sorted(str(path.relative_to(folder)) for path in folder.iterdir()))

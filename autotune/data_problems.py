"""Problems of the data of a job, and of the model's encoder that reads it."""

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from autotune.machine.device_problems import Finding
from trials.data import formats
from trials.data.index import DatasetIndex
from trials.data.indexing import LISTED, IndexReport, set_images
from trials.data.packs import Oversize, samples_above
from trials.data.records.sample import Encoder, Measurer
from trials.errors import DataError
from trials.job import Job, ModelSection, TrainingSection
from trials.model.inputs.chat_template import template_file
from trials.model.inputs.encoders import video_limits
from trials.plan import Packing
from trials.tasks.certifying.inputs import compare_inputs
from trials.units import number_of
from trials.workload import DataProfile, ModelShape

_log = logging.getLogger(__name__)
_SHOWN_LINES = 5
_SHOWN_KINDS = 5
"""Kinds of unused things that have a finding each."""
_COMPARED = 8
"""Records of a data set whose ids and labels are compared with those of transformers, if it has no more kinds of them:
images are prepared for it."""
_LENGTHS = "lengths"
"""The format of files that hold lengths and no conversation."""


def check_sources(job: Job) -> None:
    """Raise DataError for an annotation file that is not there or holds only lengths."""
    for key, sources in (("data", job.data.sources), ("evaluation", job.evaluation.sources or ())):
        for file in (file for source in sources for file in formats.resolve(source, Path())):
            if file.format == _LENGTHS:
                raise DataError(
                    f"{key}.sources: {file.path} holds only lengths, so there is nothing to train on; give the "
                    "annotation file that they were measured from, or look at its packs with `autotune pack INPUT`"
                )


def check_inputs(job: Job, index: DatasetIndex, encoder: Encoder) -> None:
    """Raise DataError where ids or labels of some records are not what transformers makes of them.

    They are the smallest of each kind, and some from all of the data.
    """
    by_size = np.lexsort((index.text_tokens, index.vision_units))
    _, smallest = np.unique(index.kind[by_size], return_index=True)
    spread = np.linspace(0, len(index) - 1, _COMPARED).astype(np.int64)
    rows = list(dict.fromkeys([*by_size[smallest].tolist(), *spread.tolist()]))[: max(_COMPARED, len(smallest))]
    count, faults = compare_inputs(job.model, index, encoder, rows)
    if faults:
        raise DataError(
            f"{faults[0]}. Training on this would not be what the data says; please report it with the files of the "
            "model's tokenizer and processor"
        )
    if count.records and not count.labelled:
        _log.warning(
            "token ids were compared with those of transformers, labels of no record: what the model's chat template "
            "writes around an answer depends on that answer"
        )


def model_findings(encoder: Encoder, model: ModelSection) -> Iterator[Finding]:
    """Yield what makes a trained model worse without a fault in the training."""
    if encoder.no_template:
        yield Finding(
            what=f"model {model.path} has no chat template: {encoder.no_template}",
            remedy="save the template that the model was trained with as chat_template.jinja in the model folder",
        )
    if (videos := video_limits(encoder)) and videos.unknown:
        yield Finding(
            what=f"settings in {videos.file} of model {model.path} that nothing reads: {', '.join(videos.unknown)}",
            remedy=f"correct their names, or take them out: frames of videos are decided by {', '.join(videos.read)}",
        )
    if encoder.no_end:
        file = template_file(model.path)
        yield Finding(
            what=f"answers of the trained model will not end: {encoder.no_end}",
            remedy=f"write {{{{ eos_token }}}} behind an answer in {file} of the model folder",
        )
    if encoder.other_prompt:
        yield Finding(
            what=f"the trained model will be asked with a text that it did not learn: {encoder.other_prompt}",
            remedy=f"write the same in both places of {template_file(model.path)} in the model folder",
        )


def _lost_media(report: IndexReport, measurer: Measurer) -> Finding | None:
    """Return a finding where a model with vision is left text alone, because every image is lost."""
    if not (measurer.takes_images and report.first_bad_media) or report.has_media:
        return None
    use = "train" if report.section == "data" else "evaluate"
    return Finding(
        what=f"no image or video is left to {use} on: {report.bad_media} of {number_of(report.bad_media, 'record')} "
        f"with some cannot be used, the first is {report.first_bad_media}",
        remedy=f"correct `images` of the source, as by {set_images(report.section)}, or the records, or take these "
        f"records out to {use} on text alone",
    )


def check_media(report: IndexReport, measurer: Measurer) -> None:
    """Raise DataError where a model with vision is left text alone, because every image is lost.

    Whatever derives figures from data calls it: those of the text that is left are of another training.
    """
    if lost := _lost_media(report, measurer):
        raise DataError(f"{lost.what}; {lost.remedy}")


def data_findings(report: IndexReport, measurer: Measurer) -> Iterator[Finding]:
    """Yield lines that cannot be used, and keys of records that a training does not use."""
    if lost := _lost_media(report, measurer):
        yield lost
    elif report.bad:
        yield Finding(
            what=f"{report.bad} of {number_of(report.records, 'dataset line')} cannot be used, the first is "
            f"{report.bad_lines[0]}",
            remedy="correct the lines, or `images` and `format` of the source, as by "
            f"{set_images(report.section)}; otherwise they are skipped",
        )
    for each in report.mistakes:
        yield Finding(what=f"probably a mistake: {each}", remedy=each.remedy)
    for each in report.surprises[:_SHOWN_KINDS]:
        yield Finding(what=f"not used by a training: {each}", remedy=each.remedy)
    if (more := len(report.surprises) - _SHOWN_KINDS) > 0:
        yield Finding(what=f"not used by a training: {more} more of these", remedy="autotune doctor --json lists all")


def warn_of_bad_data(report: IndexReport) -> None:
    """Log what is skipped, cut or unused, and images of another size than recorded, as warnings."""
    if report.bad:
        shown = "\n".join(f"  {line}" for line in report.bad_lines[:_SHOWN_LINES])
        hidden = report.bad - _SHOWN_LINES
        more = f"\n  and {hidden} more; `autotune pack JOB --json` has the first {LISTED}" if hidden > 0 else ""
        _log.warning(
            "%d of %d dataset lines are skipped; correct them, or `images` and `format` of their source, as by "
            "%s:\n%s%s",
            *(report.bad, report.records, set_images(report.section), shown, more),
        )
    if report.cut:
        _log.warning(
            "%d of %s %s %d tokens: longer ones are cut to that",
            report.cut,
            number_of(report.usable, "sample"),
            "has" if report.cut == 1 else "have",
            report.max_tokens,
        )
    if report.wrong_sizes:
        _log.warning(
            "%s another size than recorded; the size in the file is used",
            number_of(report.wrong_sizes, "image has", "images have"),
        )
    for each in report.mistakes:
        _log.warning("probably a mistake: %s; %s", each, each.remedy)
    if unused := report.unused_lines():
        _log.warning("not used by the training:\n%s", "\n".join(f"  {line}" for line in unused))


def warn_of_little_data(data: DataProfile, shape: ModelShape, training: TrainingSection) -> None:
    """Log a warning where an epoch has fewer samples than the global batch, or trained parts of a model see nothing."""
    idle = [part for part in ("vision", "projector") if training.mode_of(part) != "frozen"]
    if shape.vision_layers and not data.vision_units and idle and training.weight_decay:
        _log.warning(
            "no sample has an image, so the weights of %s have no gradient, and weight decay alone changes them; set "
            "training.freeze: [vision, projector]",
            " and ".join(idle),
        )
    if data.samples < training.global_batch_samples:
        _log.warning(
            "an epoch has %s, fewer than training.global_batch_samples: %d, so each of its steps is smaller; lower "
            "the setting or add data",
            number_of(data.samples, "sample"),
            training.global_batch_samples,
        )


def warn_of_skipped(index: DatasetIndex, packing: Packing, oversize: Oversize, name: str) -> None:
    """Log how many samples the plan of this name leaves out under `data.oversize: skip`.

    Raise DataError for a sample above its capacities under `fail`.
    """
    count = samples_above(index, packing, oversize)
    if count and oversize == "skip":
        _log.warning(
            "%s leaves out %d of %s, which %s above its qv and qt (data.oversize: skip)",
            name,
            count,
            number_of(len(index), "sample"),
            "is" if count == 1 else "are",
        )

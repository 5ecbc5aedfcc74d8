"""The samples of a job as a PyTorch dataset."""

import logging
import operator
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch.utils.data import Dataset

from autotune.data_problems import (
    check_inputs,
    check_media,
    check_sources,
    model_findings,
    warn_of_bad_data,
    warn_of_little_data,
)
from autotune.folders import lengths_folder
from autotune.held_out import hold_out
from autotune.job_file import JobLike, as_job
from autotune.machine.device_problems import warn_of
from autotune.model_shape import model_shape
from trials.data.epoch import CostWeights
from trials.data.index import DatasetIndex, profile
from trials.data.indexing import build_index
from trials.data.latest import LatestSamples
from trials.data.loader import encode
from trials.data.pack_cost import cost_weights
from trials.data.records.sample import Encoded, Encoder
from trials.errors import DataError
from trials.job import Job
from trials.model.inputs.encoders import load_encoder

_log = logging.getLogger(__name__)


class _VideoShown(DataError):
    """A sample has a video."""


class SampleDataset(Dataset[Encoded]):
    """The samples on which a job trains, encoded for its model. Reads the data, but uses no device and no database.

    Samples are counted from 0 in the order of their records, without those that are not trained on. `index.record` has
    the position of each among all records of `data.sources`, as in the file that `autotune pack --out` writes.
    """

    job: Job
    index: DatasetIndex
    """Place and lengths of each sample."""
    records: int
    """Records of the data, those that are not trained on included."""
    weights: CostWeights
    """Cost by which packs are matched, as in `launch`."""
    encoder: Encoder

    def __init__(self, job: JobLike) -> None:
        """Measure the lengths of samples that are not in the cache. Raise JobError, ModelError and DataError."""
        self.job = as_job(job)
        check_sources(self.job)
        self.encoder = load_encoder(self.job.model, self.job.data)
        shape = model_shape(self.job.model, self.job.training)
        self.weights = cost_weights(shape)
        index, report = build_index(self.job.data, self.encoder, Path(), cache=lengths_folder())
        warn_of_bad_data(report)
        check_media(report, self.encoder)
        warn_of(model_findings(self.encoder, self.job.model))
        check_inputs(self.job, index, self.encoder)
        self.index, _ = hold_out(index, self.job.evaluation)
        warn_of_little_data(profile(self.index), shape, self.job.training)
        self.records = report.records
        self._latest = LatestSamples("go on from the last checkpoint of your loop")
        """Those of this process: each worker of a `DataLoader` counts its own."""

    def __len__(self) -> int:
        return len(self.index)

    def __iter__(self) -> Iterator[Encoded]:
        """Yield each sample once, in the order of the records."""
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, number: int) -> Encoded:
        """Encode a sample. One that can no longer be read is blank, with a warning, as in a launch.

        Raise IndexError for a number that no sample has. Raise DataError under `data.on_error: fail` instead of a blank
        sample, for a sample with a video, and where more than half of the latest samples are blank.
        """
        row = operator.index(number)
        if not 0 <= row < len(self):
            raise IndexError(f"sample {number} is not one of the {len(self)} that are trained on, counted from 0")
        try:
            if self.index.sample(row).videos:
                raise _VideoShown(
                    f"{self.index.where(row)}: shows a video, whose inputs transformers makes in its own processor; "
                    "train on videos with `autotune launch JOB`"
                )
            sample = encode(self.index, row, self.encoder, pixels=True)
        except DataError as error:
            # A video is no damaged sample: blanks would replace all videos of the data.
            if self.job.data.on_error == "fail" or isinstance(error, _VideoShown):
                raise
            _log.warning("%s; a blank sample is used instead", error)
            self._latest.add(1, (str(error),))
            blank = self.encoder.blank(self.index.lengths(row), pixels=True)
            # Not zeros, which Idefics3 takes for padding and removes.
            return replace(blank, pixel_values=None if blank.pixel_values is None else np.ones_like(blank.pixel_values))
        self._latest.add(1)
        return sample

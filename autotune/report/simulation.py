"""Simulations of the plans of a study from its stored profile and histogram of lengths, without its data."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from autotune.epoch_balance import Balance, balance
from autotune.machine.hardware import default_workers
from autotune.prediction.memory import PeakParts
from autotune.prediction.predictor import Prediction, Predictor
from autotune.prediction.timeline import Timeline, timeline
from autotune.report.source import NO_PROFILE, StudySource
from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.study_settings import LOADING_WORKERS, training_of
from trials.costs.layer_costs import LayerCosts
from trials.data.epoch import Epoch, EpochSettings, build_epoch
from trials.data.formats import AnnotationFile
from trials.data.index import DatasetIndex
from trials.data.pack_cost import cost_weights
from trials.data.packs import Oversize
from trials.errors import TrialsError
from trials.plan import Packing, Plan
from trials.workload import DataProfile

# Choices: enough samples for several steps, and few enough to be packed in less than a second for each plan.
_LEAST_SAMPLES, _MOST_SAMPLES = 2000, 60_000
_LEAST_STEPS = 4
# A choice: packs and steps of more ranks take a report too long.
_MOST_RANKS = 4096
_OVERSIZE: dict[str, Oversize] = {"own-pack": "own-pack", "truncate": "truncate", "skip": "skip", "fail": "own-pack"}
"""A sample that the job would refuse was not there; drawn lengths may exceed a capacity by a part of a bin."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simulated:
    """One plan on drawn samples."""

    prediction: Prediction
    timeline: Timeline
    memory: tuple[PeakParts, ...]
    """By stage."""
    packs: "PackedEpoch"
    epoch_factor: float
    """Samples of the whole epoch over those that were drawn."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedEpoch:
    """An epoch of drawn samples, and its balance."""

    epoch: Epoch
    balance: Balance


class Simulator:
    """Simulator of plans of one workload, each on the same drawn samples."""

    def __init__(self, source: StudySource) -> None:
        self._source = source
        self._work = source.workload
        training = training_of(source.study.settings)
        self._settings = EpochSettings(
            global_batch_samples=self._work.global_batch_samples,
            weights=cost_weights(self._work.model),
            seed=source.study.seed,
            oversize=_OVERSIZE.get(self._work.oversize, "own-pack"),
            batch_tolerance=training.batch_tolerance,
            step_variance=training.step_variance,
        )
        self._built: dict[tuple[Packing, int], Epoch] = {}

    @cached_property
    def index(self) -> DatasetIndex:
        """The drawn samples. Raise ValueError for an unusable histogram."""
        wanted = max(_LEAST_SAMPLES, _LEAST_STEPS * self._work.global_batch_samples)
        return drawn_index(self._work.data, min(wanted, _MOST_SAMPLES))

    def packs(self, plan: Plan) -> PackedEpoch | str:
        """Pack the samples as the plan does, or return why they cannot be packed."""
        try:
            epoch = self._epoch(plan.packing, plan.layout.data)
            return PackedEpoch(epoch=epoch, balance=balance(epoch, self._settings.weights))
        except (TrialsError, ValueError, ArithmeticError) as error:
            return f"the samples of the stored histogram cannot be packed like this: {error}"

    def simulate(self, plan: Plan) -> Simulated | str:
        """Simulate a typical step and the epoch of a plan, or return why that is not possible."""
        if self._predictor is None:
            return self._source.profile if isinstance(self._source.profile, str) else NO_PROFILE
        if plan.layout.world_size > _MOST_RANKS:
            return f"{plan.layout.world_size} ranks are too many to simulate here"
        packs = self.packs(plan)
        if isinstance(packs, str):
            return packs
        try:
            prediction = self._predictor.predict(plan)
            return Simulated(
                prediction=prediction,
                timeline=timeline(self._predictor.corrected, plan, prediction),
                memory=self._predictor.corrected.peak_parts(plan),
                packs=packs,
                epoch_factor=self._work.data.samples / packs.balance.samples,
            )
        except (ValueError, ArithmeticError, IndexError) as error:
            return f"the stored profile cannot predict this plan: {error}"

    @cached_property
    def costs(self) -> LayerCosts | None:
        """Costs of the layers with the loading workers of the study, by which the search predicted."""
        if isinstance(self._source.profile, str):
            return None
        workers = self._source.study.settings.get(LOADING_WORKERS)
        # An earlier version did not store them.
        known = workers if isinstance(workers, int) else default_workers(self._work.hardware)
        return self._source.profile.costs.with_workers(known)

    @cached_property
    def _predictor(self) -> CalibratedPredictor | None:
        if self.costs is None:
            return None
        try:
            base = Predictor(self.costs, self._epoch, self._work.model.element_bytes)
            return CalibratedPredictor(base, self._source.calibration)
        except (KeyError, ValueError):  # a dtype or calibration that this version does not know
            return None

    def _epoch(self, packing: Packing, data_parallel: int) -> Epoch:
        key = packing, data_parallel
        if key not in self._built:
            self._built[key] = build_epoch(self.index, packing, self._settings, data_parallel=data_parallel)
        return self._built[key]


_BIN_TOKENS = 64
"""Width of the histogram's bins: stored tokens are rounded up to a multiple of it."""
# Lengths are kept as 32-bit integers (`DatasetIndex`).
_MOST = (1 << 31) - 1


def drawn_index(data: DataProfile, most: int) -> DatasetIndex:
    """Return an index of at most `most` samples, evenly spread over the histogram; without files.

    Tokens are spread evenly over their bins, so their mean is near the dataset's; each sample has the
    dataset's share of targets. Raise ValueError for a histogram
    that describes no dataset.
    """
    table = np.array(data.histogram, dtype=np.float64).reshape(-1, 3)
    units, tokens, counts = table.T
    if not len(table) or not np.isfinite(table).all() or (table < 0).any() or max(units.max(), tokens.max()) > _MOST:
        raise ValueError("the stored histogram of lengths describes no dataset")
    ends = np.cumsum(counts)
    total = float(ends[-1])
    if total < 1:
        raise ValueError("the stored histogram of lengths has no sample")
    count = int(min(total, most))
    # Evenly spaced instead of drawn at random: the sample has the mean and the tails of the whole.
    places = (np.arange(count) + 0.5) * total / count
    bins = np.minimum(np.searchsorted(ends, places, side="right"), len(table) - 1)
    inside = np.clip((places - (ends - counts)[bins]) / counts[bins], 0.0, 1.0)
    lengths = np.floor(tokens[bins] - _BIN_TOKENS + 1 + inside * _BIN_TOKENS)
    drawn = np.clip(lengths, 1, max(1, min(data.longest_text_tokens, _MOST))).astype(np.int32)
    numbers = np.arange(count)
    targets = np.rint(data.target_share * drawn)
    return DatasetIndex(
        files=(AnnotationFile(path=Path(), images=Path(), format="", repeat=1.0),),
        file=np.zeros(count, dtype=np.int32),
        offset=numbers.astype(np.int64),
        line=(numbers + 1).astype(np.int32),
        record=numbers.astype(np.int64),
        kind=np.zeros(count, dtype=np.int8),
        vision_units=units[bins].astype(np.int32),
        text_tokens=drawn,
        target_tokens=np.clip(targets, 1, drawn).astype(np.int32),
    )

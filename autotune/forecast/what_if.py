"""What an epoch would be if a model's images, videos or cutoff were set otherwise."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autotune.data_problems import warn_of_bad_data
from autotune.errors import NoFeasiblePlan, NoProfile, PackError, ProfileError
from autotune.events import Listener, Phase, PhaseBegan
from autotune.forecast.cluster import Cluster, ClusterOptions, cluster_of_store
from autotune.forecast.forecast import Forecast, ForecastData, Forecaster
from autotune.forecast.model_settings import CUTOFF, ModelSettings, settings_text
from autotune.model_shape import model_shape
from autotune.packing.balance import Balanced, balanced
from autotune.packing.material import Material, PackOptions, job_material
from autotune.prediction.calibration import CalibrationState
from storage.errors import DatabaseUnavailable
from storage.reading import read_store
from trials.arrays import Ints
from trials.data.index import DatasetIndex
from trials.data.indexing import LISTED
from trials.data.records.file_chunk import where
from trials.job import Job

_LARGEST = 10
"""Samples that are named."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Variant:
    """The data of a job under some settings."""

    settings: Mapping[str, float]
    """Those that differ from the job's."""
    packs: Balanced
    """Packs of an epoch, compared by analytic cost."""
    forecast: Forecast | None
    """The best plan, as a profile and trials predict it; None where there is no profile, or no plan fits."""
    lost: int
    """Samples of the job that cannot be trained on under these settings."""
    lost_lines: tuple[str, ...]
    """The first `LISTED` of them: file and line, and the reason."""

    @property
    def index(self) -> DatasetIndex:
        return self.packs.material.index

    @property
    def operations(self) -> float:
        """Floating-point operations of the forward passes of an epoch, without the waiting of ranks."""
        sizes = self.packs.after.epoch.pack_sizes()
        return float(sizes.cost(self.packs.material.forward).sum())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WhatIf:
    """A job's data as it is, and under other settings."""

    variants: tuple[Variant, ...]
    """That of the job comes first."""
    trials: int
    """Number of trials that have corrected the forecasts."""
    unknown: str | None
    """Why no seconds and bytes are forecast; None where they are."""

    @property
    def largest(self) -> Ints:
        """The rows of the job's samples that fill most of a pack, those first that set its capacities and the peak."""
        now = self.variants[0]
        packing, index = now.packs.packing, now.index
        filled = np.maximum(index.vision_units / max(packing.qv, 1), index.text_tokens / packing.qt)
        largest: Ints = np.argsort(-filled, kind="stable")[:_LARGEST]
        return largest


def what_if(
    job: Job,
    path: Path,
    several: Sequence[Mapping[str, float]],
    *,
    database_url: str | None,
    listener: Listener,
) -> WhatIf:
    """Return the data of a job as it is, and under each of `several` settings; `path` names the job in reports.

    What the job as it is skips or does not use is logged as warnings. Raise PackError for a setting that the model's
    processors do not have or that changes nothing, and what `job_material` raises.
    """
    of_model = ModelSettings.of(job)
    for each in several:
        of_model.check(each)
    jobs: list[Job] = []
    packs: list[Balanced] = []
    for settings in ({}, *several):
        listener(PhaseBegan(phase=Phase.LENGTHS, text=f"Reading {path}{_with(settings)}"))
        jobs.append(_cut_job(job, settings))
        with of_model.changed(settings) as model:
            changed = jobs[-1].model_copy(update={"model": job.model.model_copy(update={"path": model})})
            # All variants hold out the same records: where some are lost, another draw would be of others.
            held_out = packs[0].material.held_out if packs else None
            material = job_material(changed, path, PackOptions(), listener, held_out=held_out)
        if not settings:
            warn_of_bad_data(material.found)
        packs.append(balanced(material, PackOptions()))
        _check_cut(settings, packs[0].material, material)
    forecasts = _Forecasts.of(job, packs[0].material, database_url)
    variants = tuple(
        Variant(
            settings=settings,
            packs=of_packs,
            forecast=forecasts.best(each, of_packs.material, listener),
            lost=len(_lost(packs[0].material, of_packs.material)),
            lost_lines=_lost_lines(packs[0].material, of_packs.material),
        )
        for settings, each, of_packs in zip(({}, *several), jobs, packs, strict=True)
    )
    return WhatIf(variants=variants, trials=forecasts.trials, unknown=forecasts.unknown)


def _lost(now: Material, then: Material) -> Ints:
    """Return the rows of the job's samples that cannot be trained on then."""
    return np.flatnonzero(np.isin(now.index.record, then.index.record, invert=True))


def _lost_lines(now: Material, then: Material) -> tuple[str, ...]:
    reasons = {where(line.path, line.place): str(line) for line in then.found.bad_lines}
    places = (now.index.where(int(row)) for row in _lost(now, then)[:LISTED])
    # Without a reason: another draw of `sampling`, and what is bad behind the first LISTED lines.
    return tuple(reasons.get(place, place) for place in places)


def _check_cut(settings: Mapping[str, float], now: Material, then: Material) -> None:
    """Raise PackError for a cutoff above all samples."""
    if CUTOFF in settings and not (now.cut or then.cut or len(_lost(now, then))):
        raise PackError(
            f"what if: {CUTOFF}={settings[CUTOFF]} changes nothing: no sample has more than "
            f"{then.index.text_tokens.max()} tokens; leave it out, or lower it"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Forecasts:
    """Forecasts of one job with any data, on the devices of a stored profile."""

    unknown: str | None = None
    """Why there are none."""
    cluster: Cluster | None = None
    trials: int = 0
    """Number of trials that have corrected the layer costs."""
    learnt: CalibrationState | None = None

    @classmethod
    def of(cls, job: Job, material: Material, database_url: str | None) -> "_Forecasts":
        """Return forecasts with layer costs as trials with the job's own data correct them."""
        try:
            with read_store(database_url) as store:
                shape = model_shape(job.model, job.training)
                cluster = cluster_of_store(job, shape, store, ClusterOptions())
                forecaster = Forecaster(job, shape, cluster, _data(material))
                forecaster.learn(store.comparable_trials(forecaster.workload))
        except (NoProfile, ProfileError, DatabaseUnavailable) as error:
            return cls(unknown=str(error))
        return cls(
            cluster=cluster, trials=forecaster.trials, learnt=forecaster.calibration if forecaster.trials else None
        )

    def best(self, job: Job, material: Material, listener: Listener) -> Forecast | None:
        """Return the best plan for the data.

        What trials tell of a plan beyond the layer costs counts for none: with other data it would be unknown, and
        times would differ by more than the data do.
        """
        if self.cluster is None:
            return None
        listener(PhaseBegan(phase=Phase.PREDICTION, text="Solving for the best plan"))
        shape = model_shape(job.model, job.training)
        try:
            return Forecaster(job, shape, self.cluster, _data(material), state=self.learnt).best(1)[0]
        except NoFeasiblePlan:
            return None


def _data(material: Material) -> ForecastData:
    return ForecastData(index=material.index, report=material.found)


def _cut_job(job: Job, settings: Mapping[str, float]) -> Job:
    if CUTOFF not in settings:
        return job
    cut = {"oversize": "truncate", "max_tokens": int(settings[CUTOFF])}
    return job.model_copy(update={"data": job.data.model_copy(update=cut)})


def _with(settings: Mapping[str, float]) -> str:
    return f" with {settings_text(settings)}" if settings else ""

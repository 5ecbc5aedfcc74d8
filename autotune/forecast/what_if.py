"""What an epoch would be if a model's images, videos or cutoff were set otherwise."""

import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autotune.data_problems import warn_of_bad_data
from autotune.errors import NoFeasiblePlan, NoProfile, PackError, ProfileError
from autotune.events import Listener, Phase, PhaseBegan
from autotune.forecast.cluster import Cluster, ClusterOptions, cluster_of_store
from autotune.forecast.forecast import Forecast, ForecastData, Forecaster
from autotune.model_shape import model_shape
from autotune.packing.balance import Balanced, balanced
from autotune.packing.material import Material, PackOptions, job_material
from autotune.prediction.calibration import CalibrationState
from storage.errors import DatabaseUnavailable
from storage.reading import read_store
from trials.arrays import Ints
from trials.data.index import DatasetIndex
from trials.errors import ModelError
from trials.job import Job
from trials.model.hub import folder_of
from trials.model.inputs.encoders import load_measurer

CUTOFF = "cutoff"
"""Tokens to which samples are cut, as `oversize: truncate` does."""
_IMAGES = (("preprocessor_config.json", None), ("processor_config.json", "image_processor"))
_VIDEOS = (("video_preprocessor_config.json", None), ("processor_config.json", "video_processor"))
"""Files of a model's settings, with the key of these in a file of several processors."""
_SETTINGS: Mapping[str, tuple[tuple[tuple[str, str | None], ...], tuple[str, ...]]] = {
    "max_pixels": (_IMAGES, ("max_pixels", "size.longest_edge")),
    "min_pixels": (_IMAGES, ("min_pixels", "size.shortest_edge")),
    "max_tiles": (_IMAGES, ("max_patches",)),
    "frames": (_VIDEOS, ("num_frames",)),
    "fps": (_VIDEOS, ("fps",)),
}
"""Where each setting stands, and its names in the files of different models."""
_RESOLUTIONS = "image_grid_pinpoints"
_EDGES = {"shortest_edge", "longest_edge"}
NAMES = (*_SETTINGS, CUTOFF)
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


def checked_settings(settings: Mapping[str, float] | str) -> dict[str, float]:
    """Return settings, or those of a text with NAME=VALUE pairs and commas between. Raise PackError for others."""
    if not isinstance(settings, str | Mapping):
        raise PackError(f"what if: settings are a mapping or a text with NAME=VALUE, not {settings!r}")
    pairs = [_pair(each) for each in settings.split(",")] if isinstance(settings, str) else [*settings.items()]
    found: dict[str, float] = {}
    for name, value in pairs:
        if name not in NAMES:
            raise PackError(f"what if: {str(name)!r} is no setting; give NAME=VALUE with one of {', '.join(NAMES)}")
        if name in found:
            raise PackError(f"what if: {name} is given twice; compare its values as two variants")
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not (math.isfinite(number) and (name == "fps" or number.is_integer())):
            kind = "a number" if name == "fps" else "a whole number"
            raise PackError(f"what if: {name} is {value!r} and has to be {kind}; give {name}=2, say")
        found[name] = number if name == "fps" else int(number)
        if not 0 < number < 1 << 31:
            raise PackError(f"what if: {name} is {value} and has to be above 0 and below 2^31; give {name}=2, say")
    return found


def _pair(text: str) -> tuple[str, Any]:
    name, _, value = (part.strip() for part in text.partition("="))
    return name, value


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
    for each in several:
        _check_followed(job, each)
    jobs: list[Job] = []
    packs: list[Balanced] = []
    for settings in ({}, *several):
        listener(PhaseBegan(phase=Phase.LENGTHS, text=f"Reading {path}{_with(settings)}"))
        jobs.append(_cut_job(job, settings))
        with _model_with(job.model.path, settings) as model:
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
            lost=_lost(packs[0].material, of_packs.material),
        )
        for settings, each, of_packs in zip(({}, *several), jobs, packs, strict=True)
    )
    return WhatIf(variants=variants, trials=forecasts.trials, unknown=forecasts.unknown)


def _lost(now: Material, then: Material) -> int:
    return len(np.setdiff1d(now.index.record, then.index.record))


def _check_cut(settings: Mapping[str, float], now: Material, then: Material) -> None:
    """Raise PackError for a cutoff above all samples."""
    if CUTOFF in settings and not (now.cut or then.cut or _lost(now, then)):
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


def settings_text(settings: Mapping[str, float]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def _check_followed(job: Job, settings: Mapping[str, float]) -> None:
    """Raise PackError for settings that the model's processors do not have, do not read, or refuse."""
    of_files = {name: value for name, value in settings.items() if name in _SETTINGS}
    try:
        together = _digest(job, of_files)
    except ModelError as error:
        raise PackError(f"what if: {settings_text(of_files)} cannot be followed: {error}") from error
    for name, value in of_files.items():
        with suppress(ModelError):  # what cannot be left out is read
            if _digest(job, {other: of_files[other] for other in of_files if other != name}) == together:
                raise PackError(
                    f"what if: {name}={value} changes nothing: the processors of {job.model.path} have it already, or "
                    "do not read it; leave it out"
                )


def _digest(job: Job, settings: Mapping[str, float]) -> str:
    """Return the digest of what lengths depend on. Raise ModelError for settings that a processor refuses."""
    with _model_with(job.model.path, settings) as path:
        try:
            return load_measurer(job.model.model_copy(update={"path": path}), job.data).digest
        except ModelError as error:
            raise ModelError(str(error).replace(path, job.model.path)) from error


@contextmanager
def _model_with(path: str, settings: Mapping[str, float]) -> Iterator[str]:
    """Give a folder of links to the files of a model, with other settings of its processors.

    Raise PackError for settings that its files do not have.
    """
    of_files = {name: value for name, value in settings.items() if name in _SETTINGS}
    if not of_files:
        yield path
        return
    source = Path(folder_of(path))
    names = {name for name, _ in (*_IMAGES, *_VIDEOS)}
    files = {name: json.loads(source.joinpath(name).read_bytes()) for name in names if (source / name).is_file()}
    known = [name for name in _SETTINGS if _holders(files, name)]
    for name, value in of_files.items():
        if name not in known:
            raise PackError(
                f"what if: {name}: the processors of {path} have no such setting; give one of "
                f"{', '.join((*known, CUTOFF))}{_of_resolutions(files, name)}"
            )
        for holder, key in _holders(files, name):
            holder[key] = value
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made, source.name)
        folder.mkdir()
        for file in source.iterdir():
            if file.name not in files:
                folder.joinpath(file.name).symlink_to(file.resolve())
        for name, contents in files.items():
            folder.joinpath(name).write_text(json.dumps(contents))
        yield str(folder)


def _of_resolutions(files: Mapping[str, Any], name: str) -> str:
    """Return what to change instead where images are cut to one of a list of resolutions, as in LLaVA-OneVision."""
    parts = (files.get(file, {}).get(part) if part else files.get(file) for file, part in _IMAGES)
    if _SETTINGS[name][0] is not _IMAGES or not any(part and _RESOLUTIONS in part for part in parts):
        return ""
    return (
        f". Its images are cut by {_RESOLUTIONS}, which the model reads too: change it in config.json and "
        f"{_IMAGES[0][0]} of a copy of the model folder, and compare with `autotune pack JOB --set model.path=COPY`"
    )


def _holders(files: Mapping[str, Any], name: str) -> list[tuple[dict[str, Any], str]]:
    """Return where a setting stands in the files of a model: mappings, and its key in each."""
    places, names = _SETTINGS[name]
    found: list[tuple[dict[str, Any], str]] = []
    for file, part in places:
        settings: dict[str, Any] = files.get(file, {})
        settings = settings.get(part) or {} if part else settings
        for path in names if settings else ():
            *outer, key = path.split(".")
            holder = settings.get(outer[0]) or {} if outer else settings
            # Of a size, both edges bound pixels, and one alone is the length of an edge. Settings of videos have
            # defaults.
            if holder.keys() >= _EDGES if outer else places is _VIDEOS or key in holder:
                found.append((holder, key))
    return found

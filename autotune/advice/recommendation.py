"""The best plan for each number of devices of one kind, without any of them: measured where the database knows it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Literal, TypeAlias

from autotune.advice.data_sheets import DATA_SHEETS, DataSheet, unknown_device
from autotune.advice.sheet_costs import DEVICES_OF_NODE, SheetCosts
from autotune.errors import NoFeasiblePlan, NoProfile, ProfileError, RecommendError
from autotune.events import Listener, Note, Phase, PhaseBegan, unheard
from autotune.forecast.cluster import Cluster, ClusterOptions, cluster_of_profile, cluster_of_store
from autotune.forecast.forecast import Forecast, ForecastData, Forecaster
from autotune.forecast.profile_file import ProfiledCosts
from autotune.machine.hardware import default_memory_limit, software
from autotune.model_shape import model_shape
from autotune.search.execution.profiling import design
from storage.errors import DatabaseUnavailable
from storage.reading import read_store
from storage.store import Store
from trials.data.index import profile
from trials.job import Job
from trials.workload import Hardware, ModelShape

MOST_DEVICES = 64
SPREAD = 0.4
"""Relative error of times, a choice: the largest of the few that docs/guide.md compares with measured ones."""
_CORES, _RAM_BYTES = 16, 128 << 30
"""Of each device, as cloud machines usually have them; only what a plan offloads depends on the memory."""


Origin: TypeAlias = Literal["measured", "measured layers, analytic links", "analytic"]
"""Where times come from: a profile, the profile of a single device with links of the data sheet, or that alone."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceChoice:
    """The best plan for a number of devices; None where none fits."""

    devices: int
    forecast: Forecast | None
    origin: Origin
    relative_error: float
    """Of the times."""
    memory_limit_bytes: int
    """Per rank."""
    extrapolated: tuple[str, ...] = ()
    """Quantities that were not measured, in words."""
    trials: int = 0
    """Number of trials that have corrected the times."""
    why_not: str = ""
    """Why no plan fits."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recommendation:
    """Choices of one job on one kind of device, by ascending numbers of devices."""

    shape: ModelShape
    job: Job
    device: str
    sheet: DataSheet | None
    profiled: str | None
    """Devices on which the layers were profiled, and when; None where they were not."""
    samples: int
    """Samples of an epoch, repeats included."""
    skipped_lines: int
    """Records of the data that cannot be used."""
    choices: tuple[DeviceChoice, ...]
    deadline_seconds: float | None

    @property
    def advised(self) -> DeviceChoice | None:
        """The fewest devices that meet the deadline, or without one that fit; None where no number does."""
        limit = math.inf if self.deadline_seconds is None else self.deadline_seconds
        return next((each for each in self.choices if each.forecast and self.training_seconds(each) <= limit), None)

    def training_seconds(self, choice: DeviceChoice) -> float:
        """Return the seconds of all steps, without evaluations and checkpoints; infinite where no plan fits."""
        if choice.forecast is None:
            return math.inf
        training, prediction = self.job.training, choice.forecast.prediction
        epochs: float = training.epochs
        if training.max_steps is not None:
            epochs = min(epochs, training.max_steps / len(prediction.step_seconds))
        return epochs * prediction.epoch_seconds

    def device_hours(self, choice: DeviceChoice) -> float:
        return choice.devices * self.training_seconds(choice) / 3600


def recommend_for(
    job: Job,
    device: str,
    *,
    devices: Sequence[int] | None = None,
    deadline_seconds: float | None = None,
    database_url: str | None = None,
    listener: Listener = unheard,
) -> Recommendation:
    """Return the best plan for each number of devices, by default every power of 2 up to 64.

    `device` is the short name of a data sheet, or part of the name of devices with a stored profile of the model. Of a
    job, its search and its devices do not count, but for the memory limit of a rank.

    Raise RecommendError for a device of which neither is known, for a number that is not positive, for layers that
    cannot be computed without a device; ProfileError for a device with stored profiles of other models alone; and what
    `ForecastData.of` and `model_shape` raise.
    """
    if job.training.compile:
        raise RecommendError(
            "training.compile: layers are computed as they are, not as a compiler makes them; set it to false"
        )
    counts = tuple(devices) if devices else tuple(1 << power for power in range(MOST_DEVICES.bit_length()))
    if wrong := [count for count in counts if count < 1]:
        raise RecommendError(f"{wrong[0]} devices are none to train on; give 1 or more")
    shape, sheet = model_shape(job.model, job.training), DATA_SHEETS.get(device.lower())
    measured: dict[int, Cluster | None] = dict.fromkeys(counts)
    profiled: list[str] = []
    try:
        with read_store(database_url) as store:
            profiled = [each.hardware.device_name for each in store.layer_profiles()]
            for count in counts:
                measured[count] = _measured(job, shape, store, sheet or device, count)
    except DatabaseUnavailable as error:
        listener(Note(text=f"Nothing that was measured is known: {error}"))
    first = measured[counts[0]]
    if first is None and sheet is None:
        raise unknown_device(device, profiled)
    listener(PhaseBegan(phase=Phase.LENGTHS, text="Reading the data"))
    data = ForecastData.of(job, listener)
    lengths = profile(data.index)
    analytic: SheetCosts | None = None
    if sheet and any(each is None or each.profiled.hardware.devices == 1 for each in measured.values()):
        listener(PhaseBegan(phase=Phase.PREDICTION, text=f"Computing the layers on {sheet.name}"))
        sizes = design(lengths, shape, (), DEVICES_OF_NODE, 0.0).sizes
        analytic = SheetCosts.of(sheet, job.model, job.training, sizes)
    found = {count: _cluster(job, shape, count, measured[count], analytic) for count in sorted({*counts})}
    choices = tuple(_choice(job, cluster, origin, data, database_url) for cluster, origin in found.values())
    return Recommendation(
        job=job,
        shape=shape,
        device=sheet.name if sheet else first.name if first else device,
        sheet=sheet,
        profiled="; ".join(dict.fromkeys(str(each.profiled) for each in measured.values() if each)) or None,
        samples=lengths.samples,
        skipped_lines=data.report.bad,
        choices=choices,
        deadline_seconds=deadline_seconds,
    )


def _measured(job: Job, shape: ModelShape, store: Store, device: DataSheet | str, count: int) -> Cluster | None:
    """Return what is stored of a device. Raise ProfileError for other models alone, where there is no data sheet."""
    is_named, name = (False, device) if isinstance(device, str) else (True, device.name)
    options = ClusterOptions(devices=count, device_profile=name, is_whole_name=is_named)
    try:
        return cluster_of_store(job, shape, store, options)
    except NoProfile:
        return None
    except ProfileError:
        if isinstance(device, str):
            raise
        return None


def _cluster(
    job: Job, shape: ModelShape, count: int, measured: Cluster | None, analytic: SheetCosts | None
) -> tuple[Cluster, Origin]:
    """Return devices with measured costs as far as there are any, else those of the data sheet."""
    if measured is None:
        assert analytic is not None  # else the device would be unknown
        return sheet_cluster(job, shape, analytic, count), "analytic"
    if analytic is None or count == 1 or measured.profiled.hardware.devices > 1:
        return measured, "measured"
    # One device has no neighbour to exchange with.
    alone = measured.profiled
    costs, hardware = analytic.linked(alone.costs, count), replace(alone.hardware, devices=count)
    linked = cluster_of_profile(job, replace(alone, costs=costs, hardware=hardware), ClusterOptions(devices=count))
    return linked, "measured layers, analytic links"


def sheet_cluster(job: Job, shape: ModelShape, costs: SheetCosts, count: int) -> Cluster:
    """Return a number of devices that are not here, with costs of their data sheet alone."""
    hardware = _hardware(costs.sheet, count)
    profiled = ProfiledCosts(
        hardware=hardware, model=shape, software=software(), created=datetime.now(UTC), costs=costs.on(count)
    )
    return Cluster(
        devices=count,
        memory_limit_bytes=job.hardware.memory_limit or default_memory_limit(hardware),
        profiled=profiled,
        measured="nothing",
        extrapolated=(f"all times, from the data sheet of {costs.sheet.name}",),
    )


def _choice(job: Job, cluster: Cluster, origin: Origin, data: ForecastData, database_url: str | None) -> DeviceChoice:
    forecaster = Forecaster(job, cluster.profiled.model, cluster, data)
    if origin == "measured":
        with read_store(database_url) as store:
            trials = store.comparable_trials(forecaster.workload)
        forecaster.learn(trials)
    best: Forecast | None
    try:
        best = forecaster.best(1, remedy="give more --devices, or another --device")[0]
    except NoFeasiblePlan as error:
        best, why_not = None, str(error)
    else:
        why_not = ""
    return DeviceChoice(
        devices=cluster.devices,
        forecast=best,
        origin=origin,
        relative_error=best.relative_error if best and origin == "measured" else SPREAD,
        memory_limit_bytes=cluster.memory_limit_bytes,
        extrapolated=() if origin == "analytic" else forecaster.cluster.extrapolated,
        trials=forecaster.trials,
        why_not=why_not,
    )


def _hardware(sheet: DataSheet, devices: int) -> Hardware:
    nodes = -(-devices // DEVICES_OF_NODE)
    of_node = min(devices, DEVICES_OF_NODE)
    return Hardware(
        accelerator="cuda",
        device_name=sheet.name,
        devices=devices,
        device_memory_bytes=sheet.memory_bytes,
        compute_capability=None,
        driver=None,
        cpu_name="",
        cpu_cores=_CORES * of_node,
        ram_bytes=_RAM_BYTES * of_node,
        nodes=nodes,
    )

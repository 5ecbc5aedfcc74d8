"""The best plan for each number of devices of one kind, without any of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from autotune.advice.data_sheets import DataSheet
from autotune.advice.sheet_costs import DEVICES_OF_NODE, SheetCosts
from autotune.errors import NoFeasiblePlan, RecommendError
from autotune.events import Listener, Phase, PhaseBegan, unheard
from autotune.forecast.cluster import Cluster
from autotune.forecast.forecast import Forecast, ForecastData, Forecaster
from autotune.forecast.profile_file import ProfiledCosts
from autotune.machine.hardware import default_memory_limit, software
from autotune.model_shape import model_shape
from autotune.search.execution.profiling import design
from trials.data.index import profile
from trials.job import Job
from trials.workload import Hardware, ModelShape

MOST_DEVICES = 64
SPREAD = 0.4
"""Relative error of times, a choice: the largest of the few that docs/guide.md compares with measured ones."""
_CORES, _RAM_BYTES = 16, 128 << 30
"""Of each device, as cloud machines usually have them; only what a plan offloads depends on the memory."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceChoice:
    """The best plan for a number of devices; None where none fits."""

    devices: int
    forecast: Forecast | None
    why_not: str = ""
    """Why no plan fits."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recommendation:
    """Choices of one job on one kind of device, by ascending numbers of devices."""

    shape: ModelShape
    job: Job
    sheet: DataSheet
    samples: int
    memory_limit_bytes: int
    choices: tuple[DeviceChoice, ...]
    deadline_seconds: float | None

    @property
    def advised(self) -> DeviceChoice | None:
        """The fewest devices that meet the deadline, or without one that fit; None where no number does."""
        limit = math.inf if self.deadline_seconds is None else self.deadline_seconds
        return next((each for each in self.choices if each.forecast and self.training_seconds(each) <= limit), None)

    def training_seconds(self, choice: DeviceChoice) -> float:
        """Return the seconds of all epochs; infinite where no plan fits."""
        return self.job.training.epochs * choice.forecast.prediction.epoch_seconds if choice.forecast else math.inf

    def device_hours(self, choice: DeviceChoice) -> float:
        return choice.devices * self.training_seconds(choice) / 3600


def recommend_for(
    job: Job,
    sheet: DataSheet,
    *,
    devices: Sequence[int] | None = None,
    deadline_seconds: float | None = None,
    listener: Listener = unheard,
) -> Recommendation:
    """Return the best plan for each number of devices, by default every power of 2 up to 64.

    Of a job, its search, its database and its devices do not count, but for the memory limit of a rank.

    Raise RecommendError for a number that is not positive, for layers that cannot be computed without a device, and
    what `ForecastData.of` and `model_shape` raise.
    """
    if job.training.compile:
        raise RecommendError(
            "training.compile: layers are computed as they are, not as a compiler makes them; set it to false"
        )
    counts = tuple(devices) if devices else tuple(1 << power for power in range(MOST_DEVICES.bit_length()))
    if wrong := [count for count in counts if count < 1]:
        raise RecommendError(f"{wrong[0]} devices are none to train on; give 1 or more")
    shape = model_shape(job.model, job.training)
    listener(PhaseBegan(phase=Phase.LENGTHS, text="Reading the data"))
    data = ForecastData.of(job, listener)
    listener(PhaseBegan(phase=Phase.PREDICTION, text=f"Computing the layers on {sheet.name}"))
    sizes = design(profile(data.index), shape, (), DEVICES_OF_NODE, 0.0).sizes
    costs = SheetCosts.of(sheet, job.model, job.training, sizes)
    limit = job.hardware.memory_limit or default_memory_limit(_hardware(sheet, 1))
    return Recommendation(
        job=job,
        shape=shape,
        sheet=sheet,
        samples=len(data.index),
        memory_limit_bytes=limit,
        choices=tuple(_choice(job, _cluster(costs, shape, count, limit), data) for count in sorted(set(counts))),
        deadline_seconds=deadline_seconds,
    )


def _choice(job: Job, cluster: Cluster, data: ForecastData) -> DeviceChoice:
    try:
        best = Forecaster(job, cluster.profiled.model, cluster, data).best(
            1, remedy="give more --devices, or another --device"
        )[0]
    except NoFeasiblePlan as error:
        return DeviceChoice(devices=cluster.devices, forecast=None, why_not=str(error))
    return DeviceChoice(devices=cluster.devices, forecast=best)


def _cluster(costs: SheetCosts, shape: ModelShape, devices: int, limit: int) -> Cluster:
    return Cluster(
        devices=devices,
        memory_limit_bytes=limit,
        profiled=ProfiledCosts(
            hardware=_hardware(costs.sheet, devices),
            model=shape,
            software=software(),
            created=datetime.now(UTC),
            costs=costs.on(devices),
        ),
        measured="nothing",
        extrapolated=(f"all times, from the data sheet of {costs.sheet.name}",),
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

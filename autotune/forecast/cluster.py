"""The devices of a forecast, with their measured and their extrapolated costs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Self

from autotune.dimensions.averages import average_of_all
from autotune.errors import NoProfile, ProfileError
from autotune.forecast.profile_file import ProfiledCosts, read_profile, stored_costs
from autotune.machine.hardware import ENOUGH_SHARED_BYTES, default_memory_limit, probe_hardware, software
from autotune.machine.job_hardware import hardware_of
from autotune.prediction.fit.profiled_sizes import beyond_profile
from storage.records import LayerProfile
from storage.store import Store
from trials.costs.coefficients import LayerKind
from trials.costs.exchange import ExchangeName
from trials.costs.layer_costs import LayerCosts
from trials.job import Job
from trials.machine.shared_memory import shared_memory_bytes
from trials.units import number_of
from trials.workload import DataProfile, Hardware, ModelShape, Software

_JSON = ".json"
_MEASURES = "`autotune profile JOB` or `autotune tune JOB` measures one on the hardware itself"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Options of a forecast that override the job and this machine."""

    devices: int | None = None
    memory_limit_bytes: int | None = None
    """Per rank."""
    device_profile: str | None = None
    """A file of layer costs, or the name of hardware with a stored profile, or a part of it."""
    is_whole_name: bool = False
    """Whether `device_profile` is no part of a name."""

    @property
    def profile_file(self) -> Path | None:
        """Path in `device_profile` if it ends in `.json` or exists; else None."""
        path = None if self.device_profile is None else Path(self.device_profile)
        return path if path is not None and (path.suffix == _JSON or path.is_file()) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices, and the costs of a model's layers on them."""

    devices: int
    memory_limit_bytes: int
    """Per rank."""
    profiled: ProfiledCosts
    """Costs as they were measured, possibly on another number of devices."""
    measured: str
    """Description of the measured quantities and their source."""
    extrapolated: tuple[str, ...]
    """Descriptions of the quantities that were not measured."""
    shared_bytes: int = ENOUGH_SHARED_BYTES
    """Shared memory for packs of images, as far as it is known."""

    @property
    def name(self) -> str:
        return self.profiled.hardware.device_name

    @property
    def costs(self) -> LayerCosts:
        """Costs on all devices of the cluster."""
        return self.costs_on(self.devices)

    def for_data(self, data: DataProfile) -> Self:
        """Return the cluster, which says if the profile is of data with other sizes than these."""
        if (why := beyond_profile(self.profiled.costs.sizes, data, self.profiled.model)) is None:
            return self
        what = f"the layers' times and bytes to other sizes: {why}; `autotune profile JOB` measures them"
        return replace(self, extrapolated=(*self.extrapolated, what))

    def costs_on(self, devices: int) -> LayerCosts:
        """Return the costs on a number of devices, with scaled reductions and gathers where these were not timed."""
        costs, profiled = self.profiled.costs, self.profiled.hardware.devices
        if 1 in (devices, profiled):
            return costs
        # Each rank of a ring sends 2 (n - 1) / n of the bytes (Patarasuk and Yuan 2009).
        scale = (1 - 1 / devices) / (1 - 1 / profiled)
        of_all = (
            replace(each.times(scale), ranks=devices)
            for each in costs.exchanges
            if each.name in ("average", "gather", "scatter") and each.ranks == profiled and each.within == 1
            if not _was_timed(costs, each.name, devices, each.layer)
        )
        return replace(costs, exchanges=(*costs.exchanges, *of_all))


def _was_timed(costs: LayerCosts, name: ExchangeName, ranks: int, layer: LayerKind | None = None) -> bool:
    """Return whether this exchange of as many ranks at once was timed, in a pipeline or not."""
    wanted = (name, ranks, layer, 1)
    return any((each.name, each.ranks, each.layer, each.within) == wanted for each in costs.exchanges)


def cluster_of_file(job: Job, shape: ModelShape, path: Path, options: ClusterOptions) -> Cluster:
    """Return the devices on which a profile file was measured, whether they are here or not.

    Raise ProfileError for a file that cannot be used or is of another model.
    """
    profiled = read_profile(path)
    if difference := _difference(profiled.model, shape):
        raise ProfileError(
            f"{path} is of another model, {profiled.model.name} with {difference}; write one of {shape.name} with "
            "`autotune profile JOB --out FILE`"
        )
    return cluster_of_profile(job, profiled, options, f", read from {path}")


def cluster_of_store(job: Job, shape: ModelShape, store: Store, options: ClusterOptions) -> Cluster:
    """Return the devices of a stored profile: this machine's, or those that the options name.

    Raise NoProfile when there is none, ProfileError when all are of other models, and what `probe_hardware` raises.
    """
    name, here, devices = options.device_profile, None, options.devices or job.hardware.devices
    if name is not None:
        stored = store.layer_profiles(hardware_name=name)
        # The whole name of one device may be part of another's: NVIDIA L4 and NVIDIA L40S.
        whole = tuple(profile for profile in stored if profile.hardware.device_name.casefold() == name.casefold())
        stored = whole if whole or options.is_whole_name else stored
        found = _profiles_of_model(stored, shape, f"devices called {name!r}", store)
    else:
        # A forecast may be for more devices than this machine has.
        if options.devices is None:
            here = hardware_of(job)
        else:
            here = replace(probe_hardware().of_group(job.search.parallel), devices=options.devices)
        devices = here.devices
        stored = tuple(profile for profile in store.layer_profiles() if profile.hardware.kind == here.kind)
        found = _profiles_of_model(stored, shape, here.device_name, store)
        options = replace(options, devices=devices)  # those of the job, of whichever the profile is

    def distance(profile: LayerProfile) -> tuple[int, ...]:
        there = profile.hardware
        number = devices or there.devices
        unlike = () if here is None else (there != here, not here.learns_from(there))
        # Exchanges of fewer devices than were profiled are timed too.
        return *unlike, there.devices < number, abs(there.devices - number), profile.software != software()

    profiled = stored_costs(min(found, key=distance))
    cluster = cluster_of_profile(job, profiled, options)
    if here is None:
        return cluster
    extrapolated = (*cluster.extrapolated, *_other_cores(profiled.hardware, here))
    return replace(cluster, extrapolated=extrapolated, shared_bytes=shared_memory_bytes())


def cluster_of_profile(job: Job, profiled: ProfiledCosts, options: ClusterOptions, source: str = "") -> Cluster:
    """Return as many devices as the options ask for, of those that were profiled."""
    there = profiled.hardware
    devices = options.devices or job.hardware.devices or there.devices
    # CPU ranks share the memory, so their usual limit depends on their number, and on that of their groups.
    usual = default_memory_limit(there.resized(devices), job.search.parallel)
    memory = options.memory_limit_bytes or job.hardware.memory_limit or usual
    return Cluster(
        devices=devices,
        memory_limit_bytes=memory,
        profiled=profiled,
        measured=f"the layers' times and bytes, sends and reductions, on {profiled}{source}",
        extrapolated=tuple(_extrapolated(profiled, devices, memory, usual)),
    )


def _other_cores(there: Hardware, here: Hardware) -> Iterable[str]:
    """Yield if as many CPU ranks have other cores here than those that were profiled, as of another search.parallel."""
    if here.accelerator == "cpu" and here.devices == there.devices and here.cpu_cores != there.cpu_cores:
        ranks, cores = number_of(here.devices, "CPU rank"), number_of(here.cpu_cores, "core")
        yield f"the time of {ranks} with {cores}, from that with {there.cpu_cores}"


def _extrapolated(profiled: ProfiledCosts, devices: int, memory: int, usual: int) -> Iterable[str]:
    there = profiled.hardware.devices
    if devices > there > 1:
        yield (
            f"reductions over {devices} devices, from those over {there} as on a ring; sends, and exchanges of ranks "
            f"that share packs, as between the {there}, so slower links between machines are not considered"
        )
    if there > devices > 1 and not _was_timed(profiled.costs, "average", devices):
        yield f"reductions over {devices} devices, from those over {there} as on a ring"
    if profiled.costs.of_node and profiled.costs.timed_degrees("tensor"):
        yield (
            "reductions of data ranks that tensor ranks spread over more nodes, from those over all ranks, by what the "
            "link of a node carries"
        )
    if devices != there and profiled.hardware.accelerator == "cpu":
        ranks = number_of(devices, "CPU rank")
        yield f"the time of {ranks}, as if each had as many cores as the {there} that were profiled"
    if devices > there == 1:
        # One device has no neighbour: its profile holds 0 for links and reductions.
        link, reduction = profiled.costs.link, average_of_all(profiled.costs)
        times = {"sends": link.latency_seconds + link.seconds_per_byte, "reductions": reduction}
        if missing := [what for what, seconds in times.items() if not seconds]:
            yield f"{' and '.join(missing)} are assumed to take no time: only one device was profiled"
    if memory > usual:
        yield f"a memory limit of {_gibi(memory)}, above the {_gibi(usual)} that these devices leave"
    changed = [
        f"{name} {then}, here {now}"
        for name, then, now in zip(
            ("Python", "torch", "deepspeed", "transformers"),
            _versions(profiled.software),
            _versions(software()),
            strict=True,
        )
        if then != now
    ]
    if changed:
        yield f"the software: profiled with {', '.join(changed)}"


def _profiles_of_model(
    profiles: Sequence[LayerProfile], shape: ModelShape, devices: str, store: Store
) -> list[LayerProfile]:
    """Return the profiles of exactly this model."""
    differences = [(profile, _difference(profile.model, shape)) for profile in profiles]
    found = [profile for profile, difference in differences if difference is None]
    if found:
        return found
    if profiles:
        similar = [pair for pair in differences if pair[0].model.family == shape.family]
        # A profile of another family cannot be used, whatever else differs.
        others = dict.fromkeys(f"{profile.model.name} with {difference}" for profile, difference in similar)
        dtypes = [
            each.model.dtype
            for each, _ in similar
            if not _difference(replace(each.model, dtype=shape.dtype, gradient_dtype=shape.gradient_dtype), shape)
        ]
        remedy = f"set model.dtype to {dtypes[0]}, or " if dtypes else ""
        raise ProfileError(
            f"the layers of {shape.name} in {shape.dtype} were not profiled on {devices}, only those of "
            f"{', '.join(others) or 'models of other families'}; {remedy}{_MEASURES}"
        )
    known = dict.fromkeys(profile.hardware.device_name for profile in store.layer_profiles())
    stored = f"; profiles are stored for {', '.join(known)}" if known else ""
    raise NoProfile(
        f"no profile of the layers is stored for {devices}{stored}; {_MEASURES}, and `autotune recommend MODEL DATA "
        "--device NAME` predicts from a data sheet"
    )


def _difference(profiled: ModelShape, wanted: ModelShape) -> str | None:
    """Describe the first difference between two models apart from their names; None if there is none."""
    names = (field.name for field in fields(ModelShape) if field.name != "name")
    pairs = ((name, getattr(profiled, name), getattr(wanted, name)) for name in names)
    return next((f"{name} {there}, not {here}" for name, there, here in pairs if there != here), None)


def _versions(value: Software) -> tuple[str, ...]:
    return (value.python, value.torch, value.deepspeed, value.transformers)


def _gibi(size: int) -> str:
    return f"{size / (1 << 30):.4g} GiB"

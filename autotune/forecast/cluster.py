"""The devices that a forecast is for, what was measured of them, and what is extrapolated."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.errors import NoProfile, PredictError, ProfileError
from autotune.hardware import default_memory_limit, probe_hardware, software
from autotune.predict.costs import KINDS, LayerCosts
from storage.records import LayerProfile
from storage.store import Store
from trials import wire
from trials.errors import WireError
from trials.job import HardwareSection, Job
from trials.workload import Hardware, ModelShape, Software

_JSON = ".json"
_MEASURES = "`autotune profile JOB` or `autotune tune JOB` measures one on the hardware itself"
_SAME_KIND = ("accelerator", "device_name", "compute_capability", "device_memory_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the forecast is for, otherwise than the job and this machine say."""

    devices: int | None = None
    memory_bytes: int | None = None
    """Per rank."""
    device_profile: str | None = None
    """A file of layer costs, or a part of the name of hardware whose profile is stored."""

    @property
    def profile_file(self) -> Path | None:
        """Where `device_profile` names a file: one that exists, or a name that ends like one."""
        path = None if self.device_profile is None else Path(self.device_profile)
        return path if path is not None and (path.suffix == _JSON or path.is_file()) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices with the costs of a model's layers on them."""

    name: str
    """Of the devices, or of the file that their costs come from."""
    devices: int
    memory_bytes: int
    """Per rank."""
    costs: LayerCosts
    measured: str
    extrapolated: tuple[str, ...]
    """What is not as it was measured."""


def cluster_of_file(job: Job, shape: ModelShape, path: Path, wishes: Wishes) -> Cluster:
    """The costs that the file holds; how many devices, and their memory, are given or stand in the job.

    Raises ProfileError for a file that cannot be used or is of another model, and PredictError when either is missing.
    """
    costs = _read_costs(path)
    _check_model(costs, shape, path)
    devices, memory = wishes.devices or job.hardware.devices, wishes.memory_bytes or job.hardware.memory_limit
    for value, option, key in ((devices, "--devices", "devices"), (memory, "--memory", "memory_limit")):
        if value is None:
            raise PredictError(f"{path} holds costs, not devices; give {option}, or hardware.{key} in the job")
    assert devices is not None  # as the loop made sure of
    assert memory is not None
    return Cluster(
        name=path.name,
        devices=devices,
        memory_bytes=memory,
        costs=costs,
        measured=f"the layers' times and bytes, as {path} has them",
        extrapolated=tuple(_free(costs, devices, "the file holds none")),
    )


def cluster_of_store(job: Job, shape: ModelShape, store: Store, wishes: Wishes) -> Cluster:
    """The stored costs of this machine's devices, or of those that the wish names.

    Raises NoProfile when there is none, ProfileError when all are of other models, and what `probe_hardware` raises.
    """
    name = wishes.device_profile
    if name is not None:
        found = _of_model(store.layer_profiles(hardware_name=name), shape, f"devices called {name!r}", store)
    else:
        wanted = None if wishes.devices is not None else job.hardware.devices
        here = probe_hardware(HardwareSection(devices=wanted))
        stored = [profile for profile in store.layer_profiles() if _is_like(profile.hardware, here)]
        found = _of_model(stored, shape, here.device_name, store)
        found = sorted(found, key=lambda profile: (profile.hardware != here, profile.software != software()))
    return _of_profile(job, found[0], wishes)


def _of_profile(job: Job, profile: LayerProfile, wishes: Wishes) -> Cluster:
    there = profile.hardware
    devices = wishes.devices or job.hardware.devices or there.devices
    usual = default_memory_limit(replace(there, devices=devices))
    memory = wishes.memory_bytes or job.hardware.memory_limit or usual
    try:
        costs = wire.decode(LayerCosts, profile.document)
    except WireError as error:
        raise NoProfile(f"the stored profile of {there.device_name} cannot be read: {error}; {_MEASURES}") from error
    return Cluster(
        name=there.device_name,
        devices=devices,
        memory_bytes=memory,
        costs=_over(costs, there.devices, devices),
        measured=f"the layers' times and bytes, sends and reductions, on {there.devices} x {there.device_name}, "
        f"{profile.created:%Y-%m-%d %H:%M} UTC",
        extrapolated=tuple(_extrapolated(profile, costs, devices, memory, usual)),
    )


def _extrapolated(profile: LayerProfile, costs: LayerCosts, devices: int, memory: int, usual: int) -> Iterable[str]:
    there = profile.hardware.devices
    if devices > there > 1:
        yield (
            f"reductions over {devices} devices, from those over {there} as on a ring; sends as between the {there}, "
            "so slower links between machines are not in it"
        )
    if devices > there and profile.hardware.accelerator == "cpu":
        yield f"the time of {devices} CPU ranks, as if each had as many cores as the {there} that were profiled"
    if devices > there == 1:
        yield from _free(costs, devices, "one device was profiled")
    if memory > usual:
        yield f"a memory limit of {_gibi(memory)}, above the {_gibi(usual)} that these devices leave"
    changed = [
        f"{name} {then}, here {now}"
        for name, then, now in zip(
            ("Python", "torch", "deepspeed", "transformers"),
            _versions(profile.software),
            _versions(software()),
            strict=True,
        )
        if then != now
    ]
    if changed:
        yield f"the software: profiled with {', '.join(changed)}"


def _free(costs: LayerCosts, devices: int, reason: str) -> Iterable[str]:
    link = costs.link
    missing = [
        what
        for what, cost in (
            ("sends", link.latency_seconds + link.seconds_per_byte),
            ("reductions", costs.reduce_seconds_per_byte),
        )
        if not cost
    ]
    if devices > 1 and missing:
        yield f"{' and '.join(missing)} count nothing: {reason}"


def _over(costs: LayerCosts, profiled: int, devices: int) -> LayerCosts:
    """Each rank of a ring passes on 2 (n - 1) / n of the bytes (Patarasuk and Yuan 2009)."""
    if not devices > profiled > 1:
        return costs
    scale = (1 - 1 / devices) / (1 - 1 / profiled)
    return replace(costs, reduce_seconds_per_byte=costs.reduce_seconds_per_byte * scale)


def _of_model(profiles: Sequence[LayerProfile], shape: ModelShape, devices: str, store: Store) -> list[LayerProfile]:
    """Those of exactly this model; its name alone changes nothing."""
    found = [profile for profile in profiles if replace(profile.model, name=shape.name) == shape]
    if found:
        return found
    if profiles:
        others = dict.fromkeys(f"{profile.model.name} in {profile.model.dtype}" for profile in profiles)
        raise ProfileError(
            f"the layers of {shape.name} in {shape.dtype} were not profiled on {devices}, only those of "
            f"{', '.join(others)}; {_MEASURES}"
        )
    known = dict.fromkeys(profile.hardware.device_name for profile in store.layer_profiles())
    beside = f"; profiles are stored for {', '.join(known)}" if known else ""
    raise NoProfile(f"no profile of the layers is stored for {devices}{beside}; {_MEASURES}")


def _is_like(one: Hardware, other: Hardware) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in _SAME_KIND)


def _read_costs(path: Path) -> LayerCosts:
    try:
        return wire.decode(LayerCosts, path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ProfileError(
            f"{path} cannot be read ({why}); give a file that `autotune profile JOB --out` wrote"
        ) from error
    except WireError as error:
        raise ProfileError(f"{path}: {error}; write it anew with `autotune profile JOB --out`") from error


def _check_model(costs: LayerCosts, shape: ModelShape, path: Path) -> None:
    """By the number of parameters: costs say nothing else of their model. Tied weights count once in the model."""
    kinds = dict(costs.layers)
    missing = [kind for kind in KINDS if kind not in kinds]
    if missing:
        raise ProfileError(
            f"{path} holds no costs of {', '.join(missing)}; write it anew with `autotune profile JOB --out`"
        )
    counts = {"vision": shape.vision_layers, "language": shape.language_layers}
    held = sum(cost.parameters * counts.get(kind, 1) for kind, cost in costs.layers)
    if not shape.parameters <= held <= shape.parameters + kinds["head"].parameters:
        raise ProfileError(
            f"{path} is of another model: its layers make {held:,} parameters for {shape.vision_layers} vision and "
            f"{shape.language_layers} language layers, but {shape.name} has {shape.parameters:,}; profile this model"
        )


def _versions(value: Software) -> tuple[str, ...]:
    return (value.python, value.torch, value.deepspeed, value.transformers)


def _gibi(size: int) -> str:
    return f"{size / (1 << 30):.4g} GiB"

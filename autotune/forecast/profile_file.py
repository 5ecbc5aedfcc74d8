"""Layer costs with the model and hardware that they were measured on, as `profile --out` writes them."""

from dataclasses import dataclass
from datetime import UTC
from pathlib import Path

from pydantic import AwareDatetime

from autotune.errors import NoProfile, ProfileError
from storage.records import LayerProfile
from trials import wire
from trials.costs.layer_costs import LayerCosts
from trials.errors import WireError
from trials.regular_file import read_regular
from trials.workload import Hardware, ModelShape, Software

PROFILE_MARK = b'{"hardware":{'
"""How a profile begins."""
_MOST_BYTES = 1 << 20  # a real one has a few KiB
_AGAIN = "write it again with `autotune profile JOB --out FILE`"
_COUNTS = ("devices", "device_memory_bytes", "ram_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledCosts:
    """Costs of a model's layers, and what they were measured on."""

    hardware: Hardware
    model: ModelShape
    software: Software
    created: AwareDatetime
    costs: LayerCosts

    def __post_init__(self) -> None:
        """Raise ValueError for impossible hardware."""
        for name in _COUNTS:
            if (value := getattr(self.hardware, name)) < 1:
                raise ValueError(f"hardware.{name} is {value}, but has to be at least 1")

    def __str__(self) -> str:
        taken = self.created.astimezone(UTC)
        disturbed = f", while {self.costs.disturbance}" if self.costs.disturbance else ""
        return f"{self.hardware}, {taken:%Y-%m-%d %H:%M} UTC{disturbed}"


def stored_costs(profile: LayerProfile) -> ProfiledCosts:
    """Read the costs of a stored profile. Raise NoProfile for a document of another version."""
    try:
        costs = wire.decode(LayerCosts, profile.document)
    except WireError as error:
        raise NoProfile(
            f"the stored profile of {profile.hardware.device_name} cannot be read: {error}; measure it again with "
            "`autotune profile JOB` on the hardware itself"
        ) from error
    return ProfiledCosts(
        hardware=profile.hardware, model=profile.model, software=profile.software, created=profile.created, costs=costs
    )


def read_profile(path: Path) -> ProfiledCosts:
    """Read a file that `autotune profile JOB --out FILE` wrote. Raise ProfileError for anything else."""
    try:
        return wire.decode(ProfiledCosts, read_regular(path, _MOST_BYTES).decode())
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror or error if isinstance(error, OSError) else "it is not a text file"
        raise ProfileError(
            f"{path} cannot be read ({why}); give a file that `autotune profile JOB --out FILE` wrote"
        ) from error
    except WireError as error:
        raise ProfileError(f"{path}: {error}; {_AGAIN}") from error

"""This machine alone."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trials import plugins
from trials.errors import SiteError
from trials.hardware_section import HardwareSection
from trials.launchers.commands import Command, worker_commands
from trials.launchers.local import LocalLauncher
from trials.sites import SITES, Place, Shape, Site


@dataclass(frozen=True, slots=True)
class LocalSite:
    """Ranks that are processes of this machine."""

    accelerator: str
    groups: int = 1

    def launcher(self, folder: Path, world_size: int, *, group: int = 0) -> LocalLauncher:
        return LocalLauncher(folder, world_size, self.accelerator, group=group, groups=self.groups)

    def commands(self, world_size: int, request: Path) -> tuple[Command, ...]:
        return worker_commands(world_size, self.accelerator, request, groups=self.groups)


def shape(settings: HardwareSection, _: Mapping[str, str]) -> Shape:
    if settings.hosts or settings.hostfile or (settings.nodes or 1) > 1:
        raise SiteError(
            "hardware.launcher: local starts ranks on this machine alone, but hardware names more nodes; name another "
            f"launcher: {', '.join(name for name in plugins.names(SITES) if name != 'local')}"
        )
    return Shape(nodes=1)


@contextmanager
def open_site(place: Place) -> Iterator[Site]:
    yield LocalSite(place.hardware.accelerator, place.groups)

"""Sites: the machines on which groups of ranks are started, and the tool that reaches them.

One module for each value of `hardware.launcher`, found by its name.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trials.hardware_section import HardwareSection
from trials.launchers import Launcher
from trials.launchers.commands import Command
from trials.launchers.node_messages import NodeFacts
from trials.plugins import Plugins
from trials.workload import Hardware

if TYPE_CHECKING:
    from trials.launchers.nodes import Starter


class Site(Protocol):
    """Where ranks are started."""

    def launcher(self, folder: Path, world_size: int, *, group: int = 0) -> Launcher:
        """Return a launcher of groups of `world_size` ranks, which writes requests, errors and logs to `folder`.

        Of the job's groups, which work at the same time, the first has the first devices, and so on. All ranks have the
        share of the cores of such a group, so that a training is as fast as its trials.
        """

    def commands(self, world_size: int, request: Path) -> tuple[Command, ...]:
        """Return commands, to be run at the same time, that serve the request in a folder without an agent.

        All machines must see the folder, and the files that the request names.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The machines of a job."""

    nodes: int
    of_node: int | None = None
    """Most ranks on each, where the tool says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a site is opened with."""

    settings: HardwareSection
    hardware: Hardware
    """All devices of a group of ranks."""
    groups: int
    """Groups that work at the same time."""
    folder: Path
    """For files of the site."""
    facts: Callable[[], NodeFacts]
    """Describes this machine."""
    show: Callable[[str], None]
    """Shows people what they have to do."""

    @contextmanager
    def nodes(self, address: str, starter: "Starter") -> Iterator[Site]:
        """Serve the nodes that `starter` starts at an `address` of this machine; they end with the context."""
        from trials.launchers.node_ranks import NodeSite  # noqa: PLC0415 - these import torch, and jobs are read first
        from trials.launchers.nodes import Nodes  # noqa: PLC0415

        hardware = self.hardware
        with Nodes(
            hardware.nodes,
            hardware.of_node,
            address,
            self.facts(),
            starter,
            groups=self.groups,
            patience_seconds=self.settings.start_timeout,
        ) as nodes:
            yield NodeSite(nodes, hardware.accelerator, self.groups)


class SiteModule(Protocol):
    """A module of this package."""

    def shape(self, settings: HardwareSection, environment: Mapping[str, str]) -> Shape:
        """Return how many machines there are. Raise SiteError for settings that the tool cannot use.

        Nothing is started.
        """

    def open_site(self, place: Place) -> AbstractContextManager[Site]:
        """Open the site. Nodes start with the first group of ranks, and have ended when the context is left."""


SITES: Plugins[SiteModule] = Plugins("trials.sites", "launchers")

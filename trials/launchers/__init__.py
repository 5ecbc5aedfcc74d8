"""Launchers: they start the ranks of a plan, send them requests and collect their answers.

A `WarmPool` uses a launcher, and decides when ranks start and end. One module each.
"""

from collections.abc import Mapping, Set
from typing import Protocol

from trials.outcome import Crash
from trials.tasks.answer import Answer
from trials.tasks.request import Request
from trials.tasks.stop import Stop


class RankGroup(Protocol):
    """Ranks that were started together and serve one request after another. Not for use by several threads."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids in order of rank; empty until all of them run, and where they run on other machines."""

    @property
    def aftermath_seconds(self) -> float:
        """Seconds after the failure of a rank in which its cause may still show, since its neighbours fail as well."""

    def send(self, request: Request) -> None:
        """Send the request to every rank. Return at once, even while the ranks are still starting."""

    def begun(self) -> Set[int]:
        """Return the ranks that have begun with the last request: their processes run, and all is imported."""

    def next_step(self) -> float | None:
        """Return the seconds of the next timed step of a steered trial, on rank 0; None while there is no new one.

        After each step but the last, all ranks wait for `decide`.
        """

    def decide(self, *, go_on: bool) -> None:
        """Answer the step that `next_step` returned: run the next one, or report the steps so far."""

    def stop(self, when: Stop) -> None:
        """Ask the ranks to end a training, with a checkpoint. Other tasks run to their end."""

    def answers(self) -> Mapping[int, Answer]:
        """Return the answers to the last request so far, by rank, in the order in which the ranks gave them."""

    def ended(self) -> Mapping[int, Crash]:
        """Return how each rank that has ended did, by rank: its exit code or signal, or the loss of its node."""

    def end(self) -> None:
        """End every rank and the processes that it started."""


class Launcher(Protocol):
    """Launcher of groups of ranks."""

    @property
    def world_size(self) -> int:
        """Number of ranks of a group."""

    def start(self) -> RankGroup:
        """Start a new group. Return before its ranks are ready for work."""

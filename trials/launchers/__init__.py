"""Launchers: where and how the ranks of one plan are started, and how they get requests and give answers.

One file each. A launcher is handed to a `WarmPool`, which decides when ranks start and end.
"""

from collections.abc import Mapping, Set
from typing import Protocol

from trials.tasks.answer import Answer
from trials.tasks.request import Request


class RankGroup(Protocol):
    """Ranks that were started together and serve one request after another. Not for use by several threads."""

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes in order of rank; empty until all of them run, and where they run on other machines."""

    def send(self, request: Request) -> None:
        """Give every rank the request. Returns at once, also while the ranks are still starting."""

    def begun(self) -> Set[int]:
        """The ranks that have begun with the last request: their processes run, and all is imported."""

    def next_step(self) -> float | None:
        """Seconds of the next timed step of a steered trial, on rank 0; None while there is no new one.

        All ranks wait for `decide` after each step but the last.
        """

    def decide(self, *, go_on: bool) -> None:
        """Answer the step that `next_step` gave: run the next one, or report the steps until now."""

    def answers(self) -> Mapping[int, Answer]:
        """The answers to the last request by rank, those so far, in the order in which the ranks gave them."""

    def dead(self) -> Mapping[int, int]:
        """Exit codes of the ranks that have ended, by rank; minus the signal for one that was killed."""

    def end(self) -> None:
        """End every rank and the processes that it started."""


class Launcher(Protocol):
    """Starts groups of ranks."""

    @property
    def world_size(self) -> int:
        """Ranks of a group."""

    def start(self) -> RankGroup:
        """Start a new group. Returns before its ranks are ready for work."""

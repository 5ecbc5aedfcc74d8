"""Channels: how the agent and the ranks of one request exchange messages, by files in a folder or through a store.

One module for each transport. A message is a text under a name. It is written once and never changes.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from trials import wire


class Channel(Protocol):
    """The messages of one request, at the agent's end or at that of a rank."""

    @property
    def rendezvous(self) -> str:
        """The `init_method` of torch.distributed by which the ranks of the request form their process group."""

    def put(self, name: str, text: str) -> None:
        """Write a message, which others see only when it is complete. Raise OSError when it cannot be written."""

    def get(self, name: str) -> str | None:
        """Return a message; None while there is none."""

    def written(self, names: Iterable[str]) -> list[str]:
        """Return the names of the messages that are there, in the order in which they were written."""

    def file(self, path: Path) -> Path:
        """Return where a rank finds a file that the agent has at `path`."""


def send(channel: Channel, name: str, value: object) -> None:
    """Write a value as JSON."""
    channel.put(name, wire.encode(value))


def receive(kind: type[wire.T], channel: Channel, name: str) -> wire.T | None:
    """Return the value of a message; None while there is none. Raise WireError when it cannot be decoded."""
    text = channel.get(name)
    return None if text is None else wire.decode(kind, text)

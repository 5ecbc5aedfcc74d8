"""The channel over which a rank gets a request."""

import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from trials.channels import Channel
from trials.channels.folder import FolderChannel
from trials.launchers.node_messages import AGENT, FILES, TOKEN

if TYPE_CHECKING:
    from trials.channels.store import SignedStore


def open_channel(line: str) -> Channel:
    """Return the channel that the agent names in a line: a folder, or on a node a request in the agent's store."""
    return FolderChannel(Path(line)) if AGENT not in os.environ else _store_channel(line)


def _store_channel(name: str) -> Channel:
    from trials.channels.store import StoreChannel  # noqa: PLC0415  # torch is imported by then

    return StoreChannel(_store(), name, Path(os.environ[FILES]))


@cache
def _store() -> "SignedStore":
    """Return this process's connection to the store of its agent."""
    from trials.channels.store import join_store  # noqa: PLC0415

    return join_store(os.environ[AGENT], os.environ[TOKEN])

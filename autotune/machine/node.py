"""This machine as a node of a job on several: what nodes compare, their folder, and the service of an agent."""

import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock, Timeout

import autotune
import trials
from autotune.errors import DeviceBusy, HardwareError
from autotune.machine.devices import device_names, locked
from autotune.machine.hardware import software, whole_machine
from trials.channels.store import split
from trials.data.source_code import code_digest
from trials.errors import AutotuneError
from trials.launchers.network import address_towards
from trials.launchers.node_messages import TOKEN, NodeFacts
from trials.run.node import AgentAccess, Surroundings, serve_agent

_NUMBERS = ("GROUP_RANK", "CROSS_RANK")
"""Variables with the number of a node, by torchrun and DeepSpeed."""
_PREFIX, _LOCK = "autotune-node-", "in-use.lock"


def serve(access: AgentAccess, show: Callable[[str], None], stops: Callable[[], bool]) -> None:
    """Start ranks here for the agent until its work ends or `stops` returns True; `show` gets texts for the user.

    Raise AutotuneError where the connection to the agent fails.
    """
    facts = node_facts()
    with ExitStack() as stack:
        folder = stack.enter_context(node_folder())
        if access.number:  # on node 0 the agent itself has locked the devices
            try:
                stack.enter_context(locked(device_names(facts.hardware, 1)))
            except DeviceBusy as error:
                facts = replace(facts, problem=f"cannot take part: {error}")
        address = address_towards(split(access.address)[0])
        around = Surroundings(facts=facts, address=address, folder=folder, show=show, stops=stops)
        try:
            serve_agent(access, around)
        except ConnectionError as error:
            raise AutotuneError(f"{error}; start this node again once its agent waits for it") from error


def token_of(environment: Mapping[str, str], file: Path | None) -> str:
    """Return the agent's token, of the file or of the environment. Raise AutotuneError where there is none."""
    if file is None:
        token = environment.get(TOKEN, "")
    else:
        try:
            token = file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise AutotuneError(
                f"cannot read the token in {file} ({why}); copy the file from the node of the agent"
            ) from error
    if not token:
        raise AutotuneError(f"there is no token; give the agent's by --token-file, or in {TOKEN}")
    return token


def number_of_node(environment: Mapping[str, str]) -> int:
    """Return the number of this node, as torchrun or DeepSpeed says. Raise HardwareError where neither started it."""
    for name in _NUMBERS:
        if environment.get(name, "").isdigit():
            return int(environment[name])
    raise HardwareError(
        "the number of this node is not known: neither torchrun nor DeepSpeed started it; give it by --number"
    )


def node_facts() -> NodeFacts:
    """Describe this machine, with all devices that ranks may use, the versions and the source files."""
    return NodeFacts(
        host=platform.node(),
        package=version("vlm-autotune"),
        code=_code(),
        software=software(),
        hardware=whole_machine(),
    )


@cache
def _code() -> str:
    return code_digest(autotune, trials)[:16]


@contextmanager
def node_folder() -> Iterator[Path]:
    """Provide a new folder, which is removed at the end; first remove those of this user's nodes that were killed.

    A node keeps the logs of its ranks and the files of its agent there while it works.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError, Timeout):
            _remove_unused(folder)
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name, FileLock(Path(name) / _LOCK):
        yield Path(name)


def _remove_unused(folder: Path) -> None:
    """Remove the folder of a node that has ended. Raise Timeout where the node still works."""
    # Other users may write to the folder for temporary files, and a link of theirs could lead the lock elsewhere.
    is_own = folder.lstat().st_uid == os.getuid()
    # A node that has just made its folder has not locked it yet.
    if is_own and (folder / _LOCK).is_file():
        # The system releases the lock of a process that is killed.
        with FileLock(folder / _LOCK, timeout=0):
            shutil.rmtree(folder)

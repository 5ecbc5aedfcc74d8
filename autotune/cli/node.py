"""The command `node`, which starts ranks on this machine for an agent on another one."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import click

from autotune.cli.context import Options
from autotune.errors import AutotuneError, HardwareError
from autotune.machine.network import address_towards
from autotune.machine.node_facts import node_facts
from trials.channels.store import split
from trials.launchers.node_messages import TOKEN
from trials.run.node import Agent, serve_agent

_NUMBERS = ("GROUP_RANK", "SLURM_NODEID", "RANK")
"""Variables with the number of a node, by torchrun, Slurm and DeepSpeed, where they start one process on each."""


def serve_node(options: Options, address: str, *, number: int | None, token_file: Path | None) -> None:
    try:
        host, _ = split(address)
    except ValueError as error:
        raise click.UsageError(f"AGENT: {error}") from error
    own = _number(os.environ) if number is None else number
    agent = Agent(address=address, token=_token(os.environ, token_file), number=own)
    with tempfile.TemporaryDirectory(prefix="autotune-node-") as folder:
        serve_agent(agent, node_facts(), address_towards(host), Path(folder), options.display.tell)


def _token(environment: Mapping[str, str], file: Path | None) -> str:
    if file is None:
        token = environment.get(TOKEN, "")
    else:
        try:
            token = file.read_text().strip()
        except OSError as error:
            raise AutotuneError(
                f"cannot read the token in {file} ({error.strerror}); copy the file from the node of the agent"
            ) from error
    if not token:
        raise AutotuneError(f"there is no token; give the agent's by --token-file, or in {TOKEN}")
    return token


def _number(environment: Mapping[str, str]) -> int:
    for name in _NUMBERS:
        if environment.get(name, "").isdigit():
            return int(environment[name])
    raise HardwareError(
        "the number of this node is not known: neither torchrun, Slurm nor DeepSpeed started it; give it by --number"
    )

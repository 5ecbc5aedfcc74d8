"""The command `node`, which starts ranks on this machine for an agent on another one."""

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import click

from autotune.cli.context import Options, Terminated, first_signal_noted
from autotune.cli.visible import visible
from autotune.errors import DeviceBusy, HardwareError
from autotune.machine.devices import device_names, locked
from autotune.machine.node_facts import node_facts
from autotune.machine.node_folder import node_folder
from trials.channels.store import split
from trials.errors import AutotuneError
from trials.launchers.network import address_towards
from trials.launchers.node_messages import TOKEN
from trials.run.node import AgentAccess, Surroundings, serve_agent

_NUMBERS = ("GROUP_RANK", "CROSS_RANK")
"""Variables with the number of a node, by torchrun and DeepSpeed."""


def serve_node(options: Options, address: str, *, number: int | None, token_file: Path | None) -> None:
    try:
        host, _ = split(address)
    except ValueError as error:
        raise click.UsageError(f"AGENT: {error}") from error
    if os.environ.get("LOCAL_RANK", "0") != "0":  # the first process of a node serves it
        return
    options.display.close()  # it would count the seconds, to the end of the agent's work
    own = _number(os.environ) if number is None else number
    access = AgentAccess(address=address, token=_token(os.environ, token_file), number=own)
    facts = node_facts()
    with ExitStack() as stack:
        folder = stack.enter_context(node_folder())
        noted = stack.enter_context(first_signal_noted())
        if own:  # on node 0 the agent itself has locked the devices
            try:
                stack.enter_context(locked(device_names(facts.hardware, 1)))
            except DeviceBusy as error:
                facts = replace(facts, problem=f"cannot take part: {error}")
        around = Surroundings(
            facts=facts,
            address=address_towards(host),
            folder=folder,
            show=partial(_show, options),
            stops=lambda: noted.number is not None,
        )
        try:
            serve_agent(access, around)
        except ConnectionError as error:
            raise AutotuneError(f"{error}; start this node again once its agent waits for it") from error
    if noted.number is not None:
        raise Terminated(noted.number)


def _show(options: Options, text: str) -> None:
    if not options.quiet:
        click.echo(visible(text), err=True)


def _token(environment: Mapping[str, str], file: Path | None) -> str:
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


def _number(environment: Mapping[str, str]) -> int:
    for name in _NUMBERS:
        if environment.get(name, "").isdigit():
            return int(environment[name])
    raise HardwareError(
        "the number of this node is not known: neither torchrun nor DeepSpeed started it; give it by --number"
    )

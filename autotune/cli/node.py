"""The command `node`, which starts ranks on this machine for an agent on another one."""

import os
from pathlib import Path

import click

from autotune.cli.context import Options, Terminated, first_signal_noted
from autotune.cli.parameters import Count, common_with_ranks
from autotune.cli.visible import visible


@click.command()
@click.argument("agent", metavar="HOST:PORT")
@click.option("--number", type=Count(0), help="Number of this node. Default: as torchrun or DeepSpeed says.")
@click.option(
    "--token-file", type=click.Path(path_type=Path), help="File with the agent's token. Default: in AUTOTUNE_TOKEN."
)
@common_with_ranks
def node(options: Options, agent: str, number: int | None, token_file: Path | None) -> None:
    """Serve the search or training of another machine with the devices of this one, until it ends."""
    from autotune.machine.node import number_of_node, serve, token_of
    from trials.channels.store import split
    from trials.run.node import AgentAccess

    try:
        split(agent)
    except ValueError as error:
        raise click.UsageError(f"AGENT: {error}") from error
    if os.environ.get("LOCAL_RANK", "0") != "0":  # the first process of a node serves it
        return
    options.display.close()  # it would count the seconds, to the end of the agent's work
    own = number_of_node(os.environ) if number is None else number

    def show(text: str) -> None:
        if not options.quiet:
            click.echo(visible(text), err=True)

    with first_signal_noted() as noted:
        access = AgentAccess(address=agent, token=token_of(os.environ, token_file), number=own)
        serve(access, show, stops=lambda: noted.number is not None)
    if noted.number is not None:
        raise Terminated(noted.number)

"""The command `node`, over a function of `autotune.cli.node`."""

from pathlib import Path

import click

from autotune.cli.context import Options
from autotune.cli.parameters import common_with_ranks


@click.command()
@click.argument("agent", metavar="HOST:PORT")
@click.option(
    "--number", type=click.IntRange(min=0), help="Number of this node. Default: as torchrun or DeepSpeed says."
)
@click.option(
    "--token-file", type=click.Path(path_type=Path), help="File with the agent's token. Default: in AUTOTUNE_TOKEN."
)
@common_with_ranks
def node(options: Options, agent: str, number: int | None, token_file: Path | None) -> None:
    """Serve the search or training of another machine with the devices of this one, until it ends."""
    from autotune.cli.node import serve_node

    serve_node(options, agent, number=number, token_file=token_file)

"""The command line. Heavy imports wait inside the commands, so that `--help` answers at once."""

from autotune.cli.commands import main

__all__ = ["main"]

"""The command line. Commands import heavy modules inside their functions, so that `--help` stays fast."""

from autotune.cli.commands import main

__all__ = ["main"]

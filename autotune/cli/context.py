"""What all commands share: output, errors and the place of the database."""

import functools
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import click

from autotune.errors import AutotuneError, exit_code
from storage.errors import StorageError
from trials.errors import TrialsError

INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of every command."""

    as_json: bool
    database: str | None
    verbose: int
    quiet: bool

    def tell(self, text: str) -> None:
        """Progress: to stderr, unless the user wants quiet."""
        if not self.quiet:
            click.echo(text, err=True)

    def give(self, document: Mapping[str, Any], text: Callable[[], str]) -> None:
        """The result: one JSON document, or a text for people."""
        click.echo(json.dumps(document, indent=2) if self.as_json else text())

    def database_url(self, of_job: str | None = None) -> str | None:
        """`--db`, else AUTOTUNE_DB_URL, else the job's; None for the user's own file."""
        return self.database or os.environ.get("AUTOTUNE_DB_URL") or of_job


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Gives the command its Options, and turns an error of ours into one message and an exit code."""

    @functools.wraps(command)
    def run(*, as_json: bool, db: str | None, verbose: int, quiet: bool, **arguments: Any) -> None:
        options = Options(as_json=as_json, database=db, verbose=verbose, quiet=quiet)
        _configure_logging(options)
        try:
            command(options, **arguments)
        except (AutotuneError, StorageError, TrialsError) as error:
            click.echo(f"Error: {error}", err=True)
            sys.exit(exit_code(error))
        except KeyboardInterrupt:
            click.echo("Interrupted; what was measured is kept.", err=True)
            sys.exit(INTERRUPTED)

    return run


def _configure_logging(options: Options) -> None:
    level = logging.ERROR if options.quiet else (logging.WARNING, logging.INFO, logging.DEBUG)[min(options.verbose, 2)]
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    for name in ("autotune", "storage", "trials"):
        logging.getLogger(name).setLevel(level)

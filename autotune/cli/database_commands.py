"""The commands of `autotune db` and `autotune studies`, each over a library function."""

from pathlib import Path
from typing import Any

import click

from autotune.cli.context import Options
from autotune.cli.parameters import SIZE, DefaultGroup, common


@click.group()
def db() -> None:
    """Upgrade, check, repair, vacuum and share the database."""


@db.command()
@common
def upgrade(options: Options) -> None:
    """Create the tables, or bring older ones to this version after a backup."""
    from autotune.cli.stored.database import upgrade_database

    upgrade_database(options)


@db.command()
@common
def check(options: Options) -> None:
    """Verify every row, reference and page of the database; exit with 1 if anything is wrong."""
    from autotune.cli.stored.database import check_database

    check_database(options)


@db.command()
@common
def repair(options: Options) -> None:
    """Copy the database, then save what can be read and drop rows that contradict themselves."""
    from autotune.cli.stored.database import repair_database

    repair_database(options)


@db.command()
@common
def vacuum(options: Options) -> None:
    """Free the space of deleted rows."""
    from autotune.cli.stored.database import vacuum_database

    vacuum_database(options)


@db.command()
@click.option(
    "--study", "studies", metavar="STUDY", multiple=True, help="A finished study; may be given several times."
)
@click.option(
    "--hardware",
    metavar="NAME",
    help="Every finished study on devices with NAME in their name, but archived and imported ones.",
)
@click.option("--all", "takes_all", is_flag=True, help="Every finished study, but archived and imported ones.")
@click.option("--out", type=click.Path(path_type=Path), help="Write to this .jsonl file. Default: stdout.")
@common
def export(options: Options, studies: tuple[str, ...], hardware: str | None, takes_all: bool, out: Path | None) -> None:
    """Write finished studies, with all that was measured, as a bundle for another database."""
    from autotune.cli.stored.database import export_bundle

    export_bundle(options, studies, hardware="" if takes_all else hardware, out=out)


@db.command(name="import")
@click.argument("bundle", type=click.Path(path_type=Path))
@common
def import_(options: Options, bundle: Path) -> None:
    """Import a BUNDLE that `autotune db export` wrote; its plans count as measured elsewhere."""
    from autotune.cli.stored.database import import_bundle

    import_bundle(options, bundle)


@click.group(cls=DefaultGroup)
def studies() -> None:
    """List studies, or show, delete or archive some. Without a command: `studies list`."""


@studies.command(name="list")
@click.argument("study", required=False)
@click.option("--model", metavar="NAME", help="Only studies of models with NAME in their name.")
@click.option("--tag", metavar="TAG", help="Only studies with this tag.")
@click.option("--archived", is_flag=True, help="List archived studies too.")
@click.option("--top", type=SIZE, help="Show at most this many.")
@common
def list_(options: Options, study: str | None, **wanted: Any) -> None:
    """List the stored studies, or show every trial and the winner of STUDY."""
    from autotune.cli.stored.studies import list_studies, show_study

    if study is None:
        list_studies(options, **wanted)
    else:
        show_study(options, study, **wanted)


_STUDIES = click.argument("names", metavar="STUDY...", nargs=-1, required=True)


@studies.command()
@_STUDIES
@click.option("--yes", is_flag=True, help="Do not ask.")
@common
def delete(options: Options, names: tuple[str, ...], yes: bool) -> None:
    """Delete each STUDY with its trials, its winner, and the plans that no other study tried."""
    from autotune.cli.stored.studies import delete_studies

    delete_studies(options, names, is_confirmed=yes)


@studies.command()
@_STUDIES
@common
def archive(options: Options, names: tuple[str, ...]) -> None:
    """Hide each STUDY from lists, later searches and launches, which use it only by name."""
    from autotune.cli.stored.studies import archive_studies

    archive_studies(options, names, is_undone=False)


@studies.command()
@_STUDIES
@common
def unarchive(options: Options, names: tuple[str, ...]) -> None:
    """Undo `studies archive`."""
    from autotune.cli.stored.studies import archive_studies

    archive_studies(options, names, is_undone=True)

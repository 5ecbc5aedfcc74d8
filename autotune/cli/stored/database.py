"""The commands `db`: upgrade, check, repair, vacuum, export and import."""

import platform
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import click

from autotune import output_file
from autotune.cli.context import Options
from autotune.errors import DatabaseFaulty, DeviceBusy
from autotune.machine.agent import Agent, place
from storage import bundles
from storage.errors import DatabaseUnavailable, UnknownRecord
from storage.reading import read_store
from storage.store import Store, open_store
from trials import wire
from trials.units import number_of

_SHOWN = 20
_MEBI = 1 << 20


def upgrade_database(options: Options) -> None:
    with open_store(options.database_url()) as store:
        revision, shown = store.revision, store.masked_url
    options.give(lambda: {"revision": revision}, lambda: f"{shown} has the tables of revision {revision}.")


def check_database(options: Options) -> None:
    """Print the problems, then raise DatabaseFaulty if there are any."""
    with read_store(options.database_url()) as store:
        found = list(store.problems())
    lines = [str(problem) for problem in found]
    text = "\n".join((*lines[:_SHOWN], *([f"... {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else [])))
    options.give(
        lambda: {"problems": [wire.to_document(problem) for problem in found]}, lambda: text or "No problems found."
    )
    if found:
        raise DatabaseFaulty(f"problems found: {len(found)}; `autotune db repair` copies the database, then repairs it")


def repair_database(options: Options) -> None:
    """Repair the database. Raise DeviceBusy while another process works with it."""
    from storage.upkeep.repair import repair

    url = options.database_url()
    done = repair(url, check=lambda: _check_unused(url, "repair"))
    dropped = "; ".join(f"{count} of {table}" for table, count in done.dropped.items()) or "nothing"
    others = f" Left out of other programs: {', '.join(done.left_out)}; they are in the copy." if done.left_out else ""
    read = f", {number_of(sum(done.read.values()), 'row was', 'rows were')} read" if done.read else ""
    options.give(
        lambda: wire.to_document(done),
        lambda: f"Repaired. Copy from before the repair: {done.kept_as}{read}. Rows dropped: {dropped}.{others}",
    )


def vacuum_database(options: Options) -> None:
    """Free unused space. Raise DeviceBusy while another process works with a SQLite file."""
    url = options.database_url()
    with read_store(url) as store:
        done, name = store.vacuum(lambda: _check_unused(url, "vacuum")), store.masked_url
    before, after = done.bytes_before / _MEBI, done.bytes_after / _MEBI
    options.give(lambda: wire.to_document(done), lambda: f"{name}: {before:.1f} MiB before, {after:.1f} MiB now.")


def export_bundle(options: Options, names: Sequence[str], *, hardware: str | None, out: Path | None) -> None:
    """Export the named studies, and all on devices with `hardware` in their name; an empty text is in all names."""
    if not names and hardware is None:
        raise click.UsageError("name what to export: --study STUDY, --hardware NAME, or --all")
    if out:
        output_file.check_output_file(out, (".jsonl",), bundles.FORMAT.encode())
    with read_store(options.database_url()) as store:
        ids = dict.fromkeys(store.find_study(name).id for name in names)
        if hardware is not None:
            found = store.best_plans(hardware_name=hardware)
            ids |= dict.fromkeys(best.study_id for best in found if best.imported_from is None)
        if not ids:
            where = f"ran on {hardware!r}" if hardware else "is here, but archived or imported ones"
            raise UnknownRecord(f"no finished study {where}; `autotune studies --archived` lists all")
        if out is None:
            options.give_lines(store.export_studies(tuple(ids), _name(store)))
            return
        with output_file.whole(out) as partial, partial.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(store.export_studies(tuple(ids), _name(store)))
    options.give(
        lambda: {"studies": list(ids), "file": str(out)},
        lambda: f"Wrote {number_of(len(ids), 'study', 'studies')} to {out}",
    )


def import_bundle(options: Options, bundle: Path) -> None:
    with bundles.opened(bundle) as text:
        bundles.check(text)  # before a database is made for it
    with open_store(options.database_url()) as store:
        done = store.import_bundle(bundle)
    options.give(
        lambda: wire.to_document(done),
        lambda: (
            f"Imported {number_of(done.new, 'row')} from {done.source}; "
            f"{number_of(done.known, 'row was', 'rows were')} here already. Imported plans were measured elsewhere: "
            "run `autotune tune JOB` to measure them here."
        ),
    )


def _name(store: Store) -> str:
    """Return a name of this database for users of other hosts."""
    return f"{platform.node()}: {store.name}"


def _check_unused(url: str | None, purpose: str) -> None:
    """Raise DeviceBusy if another process uses the database, as far as it can be read."""
    with suppress(DatabaseUnavailable), open_store(url) as store, Agent(store) as agent:
        if (other := agent.another()) is not None:
            raise DeviceBusy(f"{place(other)} works with the database; wait for it or end it before the {purpose}")

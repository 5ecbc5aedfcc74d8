"""Maintenance of a store: deletion, archiving, notes and tags, bundles, and checks."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from storage.annotation import Annotation, Subject, checked_note, checked_tag
from storage.database.engine import Database
from storage.deletion import Deletion, Use
from storage.queries import annotations as annotation_queries
from storage.queries import deletion
from storage.queries import studies as study_queries
from storage.queries import tried as tried_queries
from storage.transactions import reading
from storage.upkeep import schema

if TYPE_CHECKING:
    from storage.bundles import Imported
    from storage.upkeep.health import Damage
    from storage.upkeep.vacuum import Vacuumed


class Housekeeping:
    """Methods of `Store` that maintain its records; they have the same contract."""

    def __init__(self, database: Database) -> None:
        """Take ownership of an open database with current tables."""
        self._database = database

    def exclusive(self) -> AbstractContextManager[None]:
        """Hold the lock that `open_store` takes to create tables; other processes that want it wait."""
        return schema.lock(self._database)

    def deletion(self, study_ids: Collection[str]) -> Deletion:
        """Return what `delete_studies` would delete, and the processes that may prevent it."""
        with self._database.transaction(snapshot=True) as connection:
            return deletion.examine(connection, study_ids)

    def delete_studies(self, study_ids: Collection[str], gone: Collection[str] = ()) -> Deletion:
        """Delete the studies with their trials and winners, and the plans that no other study tried.

        The trainings, notes and tags of these plans are deleted too; workloads and layer profiles stay. Results that
        arrive later raise DeletedRecord. The agents in `gone` are ended. Raise StudyInUse, with nothing changed,
        while another agent searches in one of the studies or trains with one of their plans.
        """
        with self.exclusive(), self._database.transaction(write=True) as connection:
            return deletion.delete_studies(connection, set(study_ids), gone)

    def withdraw_study(self, study_id: str, agent_id: str) -> None:
        """Delete a study whose search could not begin: it has no trials, and no other agent works on it."""
        with self.exclusive(), self._database.transaction(write=True) as connection:
            deletion.withdraw(connection, study_id, agent_id)

    def searches(self, study_ids: Collection[str]) -> tuple[Use, ...]:
        """Return the agents that have not ended and search in one of the studies."""
        with self._database.transaction() as connection:
            return tuple(deletion.searches(connection, study_ids))

    def archive_studies(self, study_ids: Collection[str], gone: Collection[str] = ()) -> None:
        """Archive the studies: they are not listed, and later searches and launches use them only by name.

        The agents in `gone` are ended. Raise StudyInUse, with nothing changed, while another agent searches in one.
        """
        with self._database.transaction(write=True) as connection:
            deletion.archive(connection, set(study_ids), gone)

    def unarchive_studies(self, study_ids: Collection[str]) -> None:
        """Undo `archive_studies`."""
        with self._database.transaction(write=True) as connection:
            deletion.unarchive(connection, set(study_ids))

    find_subject = reading(tried_queries.subject)
    annotations = reading(annotation_queries.of)

    def set_note(self, subject: Subject, note: str | None) -> None:
        """Replace the note of a study or plan; None removes it. Raise BadAnnotation."""
        text = None if note is None else checked_note(note)
        with self._database.transaction(write=True) as connection:
            annotation_queries.set_note(connection, subject, text)

    def change_tags(self, subject: Subject, added: Collection[str] = (), removed: Collection[str] = ()) -> Annotation:
        """Add and remove tags of a study or plan, and return its note and tags. Raise BadAnnotation."""
        add, remove = ([checked_tag(tag) for tag in tags] for tags in (added, removed))
        with self._database.transaction(write=True) as connection:
            return annotation_queries.change_tags(connection, subject, add, remove)

    def export_studies(self, study_ids: Sequence[str], source: str) -> Iterator[str]:
        """Yield the lines of a bundle with the studies; `source` names this database for readers.

        Raise UnknownRecord, and UnfinishedStudy for a study without a winner.
        """
        from storage import bundles  # noqa: PLC0415 - look-ups do without

        with self._database.transaction(snapshot=True) as connection:
            for study_id in study_ids:
                study_queries.check_finished(connection, study_id)
            yield from bundles.lines(connection, study_ids, source)

    def import_bundle(self, path: Path) -> "Imported":
        """Store the rows of a bundle that this database lacks, with their provenance; a second import has no effect.

        Raise BadBundle, with nothing stored.
        """
        from storage import bundles  # noqa: PLC0415 - look-ups do without

        with bundles.opened(path) as text:
            digest = bundles.check(text)
        with self.exclusive(), bundles.opened(path) as text, self._database.transaction(write=True) as connection:
            return bundles.take_in(connection, text, digest)

    def problems(self) -> "tuple[Damage, ...]":
        """Read the whole database, and return everything in it that no version of this software writes."""
        from storage.upkeep import health  # noqa: PLC0415 - look-ups do without

        with self._database.transaction(snapshot=True) as connection:
            return tuple(health.problems(connection))

    def vacuum(self, check: Callable[[], None] = lambda: None) -> "Vacuumed":
        """Free the space of deleted rows, and update the statistics of the tables.

        SQLite rewrites the whole file while others wait: `check` must raise while another process uses the file.
        Raise DatabaseUnavailable, with nothing changed.
        """
        from storage.upkeep.vacuum import vacuum  # noqa: PLC0415 - look-ups do without

        return vacuum(self._database, check)

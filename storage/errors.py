"""Errors of the store.

StorageError
|-- BadUrl                 a database URL that cannot be understood; nothing was opened
|-- DatabaseUnavailable    the database cannot be opened, read or written just now
|   |-- DatabaseDamaged    it has content that no version of this software writes
|   `-- SpoolUnavailable   results cannot be put on disk to wait for their database
|-- NoHome                 the user's own folders cannot be found
|-- OtherVersion           the database is of a version that this one does not know; nothing was changed
|-- NotStorable            a number that no column takes: not finite, or of more than 64 bits
|-- BadBundle              a file of exported results cannot be imported; nothing was stored
|-- UnfinishedStudy        a study has no winner yet
|-- Superseded             an agent missed its heartbeats, and another one replaced it
|-- ResourceHeld           another agent uses the devices
|-- StudyInUse             a process works on a study, or trains with one of its plans
|-- BadAnnotation          a note or a tag that is not stored
|-- AlreadyFinished        a finished trial or training cannot get another result
|-- AmbiguousId            several plans or studies begin with the given id
`-- UnknownRecord          nothing is stored under the given id
    |-- DeletedRecord      a user has deleted it
    `-- UnknownPlan        no plan that was tried begins with the given id
"""

from trials.errors import AutotuneError


class StorageError(AutotuneError):
    """Base of every error of this package; no message holds a password."""


class BadUrl(StorageError):
    """The text is not the URL of a database that can be used."""


class DatabaseUnavailable(StorageError):
    """The database cannot be opened, read or written; trying again after the remedy is safe."""


class DatabaseDamaged(DatabaseUnavailable):
    """A file or row of the database has content that no version of this software writes."""


class SpoolUnavailable(DatabaseUnavailable):
    """The folder where results wait for their database cannot be written."""


class NoHome(StorageError):
    """The user has no home folder, and the variables that name others are not set."""


class OtherVersion(StorageError):
    """The database has tables that this version does not know."""


class NotStorable(StorageError):
    """A value holds a number that is not finite or has more than 64 bits; nothing was stored."""


class BadBundle(StorageError):
    """A file of exported results is incomplete, changed, of another version, or contradicts what is stored."""


class UnfinishedStudy(StorageError):
    """A study that is to be exported has no winner yet."""


class Superseded(StorageError):
    """An agent missed its heartbeats for too long; another one replaced it."""


class ResourceHeld(StorageError):
    """Another agent holds a lease of the resource."""

    def __init__(self, resource: str = "it", holder_id: str = "") -> None:
        super().__init__(f"{resource} is used by agent {holder_id}; wait for it")
        self.resource = resource
        self.holder_id = holder_id


class StudyInUse(StorageError):
    """A process works on a study, or trains with one of its plans; nothing was changed."""


class BadAnnotation(StorageError):
    """A note or a tag is empty, too long, one too many, or not plain text; nothing was stored."""


class AlreadyFinished(StorageError):
    """A trial or training is already finished with a different result."""


class AmbiguousId(StorageError):
    """More than one stored plan or study begins with the given id."""


class UnknownRecord(StorageError):
    """Nothing is stored under the given id."""


class DeletedRecord(UnknownRecord):
    """A user has deleted what was stored under the given id."""


class UnknownPlan(UnknownRecord):
    """No plan that a stored study tried begins with the given id."""

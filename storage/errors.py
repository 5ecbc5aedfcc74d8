"""What can go wrong while results are kept or looked up.

StorageError
|-- BadUrl                 a database URL that cannot be understood; nothing was opened
|-- DatabaseUnavailable    the database cannot be opened, read or written just now
|-- DatabaseTooNew         a newer version of this software wrote the database; nothing was changed
|-- AlreadyFinished        something finished is immutable and was given another content
|-- AmbiguousPlan          several plans begin with the given id
`-- UnknownRecord          nothing is stored under the given id
    `-- UnknownPlan        no winning plan begins with the given id
"""


class StorageError(Exception):
    """Base of every error of this package; the message names the value and the remedy, and never a password."""


class BadUrl(StorageError):
    """The text is not the URL of a database that can be used."""


class DatabaseUnavailable(StorageError):
    """The database cannot be opened, read or written; trying again after the remedy is safe."""


class DatabaseTooNew(StorageError):
    """The database has tables that this version does not know."""


class AlreadyFinished(StorageError):
    """A trial or launch is finished with another content than the one given."""


class AmbiguousPlan(StorageError):
    """More than one stored plan begins with the given id."""


class UnknownRecord(StorageError):
    """Nothing is stored under the given id."""


class UnknownPlan(UnknownRecord):
    """No stored winning plan begins with the given id."""

"""Results written to disk before the database, so that no lock, crash or full disk loses a measurement."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

from storage.errors import AlreadyFinished, DeletedRecord, SpoolUnavailable, StorageError, UnknownRecord
from storage.launch_speed import LaunchWindow
from storage.records import LaunchResult, TrialResult
from storage.store import Store
from trials import wire
from trials.errors import WireError
from trials.regular_file import read_regular
from trials.whole_file import whole_file

_MOST_BYTES = 32 << 20  # far above any result; a larger file is none of this program
Kept: TypeAlias = TrialResult | LaunchResult | LaunchWindow
"""What waits for its database."""
_KINDS: Mapping[str, type[Kept]] = {".launch.json": LaunchResult, ".window.json": LaunchWindow}
"""Kinds of files by the ends of their names; others hold the result of a trial."""
_logger = logging.getLogger(__name__)


class Spool:
    """A directory of results that wait for their database, one file per trial, training or window of a training.

    Any number of processes may call `put` and `replay` at once. Replay after each `put`, and at the next start.
    """

    def __init__(self, directory: Path) -> None:
        """Create the directory, with mode 0700, if necessary. Raise SpoolUnavailable."""
        self._directory = directory
        with self._errors():
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def put(self, result: Kept) -> None:
        """Write the result and sync it to disk, so that it survives a power loss.

        Raise SpoolUnavailable, and WireError for a number that is not finite or has more than 64 bits.
        """
        text = wire.encode(result)
        with self._errors(), whole_file(self._directory / _name(result), mode=0o600) as stream:
            stream.write(text.encode())

    def keep(self, result: Kept, store: Store) -> None:
        """Put the result, or store it at once if that fails: the database may be on another disk.

        Raise what `put` raised if both fail.
        """
        try:
            self.put(result)
        except SpoolUnavailable as error:
            try:
                _store(store, result)
            except StorageError:
                raise error from None
            _logger.warning("stored in the database directly, because no file could be written: %s", error)

    def pending(self) -> tuple[Path, ...]:
        """Return the waiting files, by name."""
        return tuple(sorted(self._directory.glob("*.json")))

    def replay(self, store: Store) -> int:
        """Store every waiting result, remove its file, and return how many were stored.

        A file that cannot be decoded, or contradicts a stored result, is renamed to `.bad` and logged. A file that
        cannot be read, or whose trial this database does not know, stays and is logged. That of a deleted study is
        removed. Raise DatabaseUnavailable; the files then stay.
        """
        return sum(self._replay(path, store) for path in self.pending())

    def _replay(self, path: Path, store: Store) -> bool:
        try:
            kind = next((kind for end, kind in _KINDS.items() if path.name.endswith(end)), TrialResult)
            _store(store, wire.decode(kind, read_regular(path, _MOST_BYTES)))
        except FileNotFoundError:  # another process has stored it
            return False
        except (WireError, AlreadyFinished) as error:
            aside = path.with_suffix(".bad")
            with suppress(FileNotFoundError):  # another process has done so
                path.replace(aside)
            _logger.warning("set aside %s: %s", aside, error)
            return False
        except DeletedRecord as error:
            path.unlink(missing_ok=True)
            _logger.info("removed %s: %s", path, error)
            return False
        except (OSError, UnknownRecord) as error:
            _logger.warning("kept %s: %s", path, error)
            return False
        # Last: after a crash before this, the file is stored once more, which has no effect.
        path.unlink(missing_ok=True)
        return True

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SpoolUnavailable(
                f"cannot keep results in {self._directory}: {error.strerror}; free some space or make it writable, "
                "then run the command again: what was kept before is safe"
            ) from error


def _name(result: Kept) -> str:
    """Return the name of the file. No two results have the same one."""
    match result:
        case TrialResult():
            return f"{result.trial_id}.json"
        case LaunchResult():
            return f"{result.launch_id}.launch.json"
        case LaunchWindow():
            return f"{result.launch_id}-{result.first_step}.window.json"


def _store(store: Store, result: Kept) -> None:
    match result:
        case TrialResult():
            store.finish_trial(result)
        case LaunchResult():
            store.finish_launch(result)
        case LaunchWindow():
            store.add_window(result)

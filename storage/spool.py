"""Results written to disk before the database, so that no lock, crash or full disk loses a measurement."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from storage.errors import AlreadyFinished, DeletedRecord, SpoolUnavailable, StorageError, UnknownRecord
from storage.records import LaunchResult, TrialResult
from storage.store import Store
from trials import wire
from trials.errors import WireError
from trials.regular_file import read_regular
from trials.whole_file import whole_file

_MOST_BYTES = 32 << 20  # far above any result; a larger file is none of this program
_OF_LAUNCH = ".launch.json"
_logger = logging.getLogger(__name__)


class Spool:
    """A directory of results that wait for their database, one file per trial or training.

    Any number of processes may call `put` and `replay` at once. Replay after each `put`, and at the next start.
    """

    def __init__(self, directory: Path) -> None:
        """Create the directory, with mode 0700, if necessary. Raise SpoolUnavailable."""
        self._directory = directory
        with self._errors():
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def put(self, result: TrialResult | LaunchResult) -> None:
        """Write the result and sync it to disk, so that it survives a power loss.

        Raise SpoolUnavailable, and WireError for a number that is not finite or has more than 64 bits.
        """
        text = wire.encode(result)
        name = f"{result.trial_id}.json" if isinstance(result, TrialResult) else f"{result.launch_id}{_OF_LAUNCH}"
        with self._errors(), whole_file(self._directory / name, mode=0o600) as stream:
            stream.write(text.encode())

    def keep(self, result: TrialResult | LaunchResult, store: Store) -> None:
        """Put the result, or store it at once if that fails: the database may be on another disk.

        Raise what `put` raised if both fail.
        """
        try:
            self.put(result)
        except SpoolUnavailable as error:
            try:
                _finish(store, result)
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
            content = read_regular(path, _MOST_BYTES)
            of_launch = path.name.endswith(_OF_LAUNCH)
            _finish(store, wire.decode(LaunchResult, content) if of_launch else wire.decode(TrialResult, content))
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


def _finish(store: Store, result: TrialResult | LaunchResult) -> None:
    if isinstance(result, LaunchResult):
        store.finish_launch(result)
    else:
        store.finish_trial(result)

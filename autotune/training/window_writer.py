"""The way of a training's speed into the database, which never holds the training up."""

import logging
from threading import Event, Thread
from typing import Self

from storage.errors import StorageError
from storage.launch_speed import LaunchWindow
from storage.spool import Spool
from storage.store import Store

_log = logging.getLogger(__name__)


class WindowWriter:
    """Writer of windows to a spool, from which a thread stores them: a locked database may take minutes to answer."""

    def __init__(self, spool: Spool, store: Store) -> None:
        self._spool, self._store = spool, store
        self._wake, self._has_ended, self._has_warned = Event(), False, False
        self._thread = Thread(target=self._replay, name="windows", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Wait until the thread has tried to store what waits."""
        self._has_ended = True
        self._wake.set()
        self._thread.join()

    def add(self, window: LaunchWindow) -> None:
        """Keep a window. One that can be written nowhere is lost, with a warning."""
        try:
            self._spool.keep(window, self._store)
        except StorageError as error:
            self._warn(f"steps {window.first_step} to {window.last_step}: their speed is not kept: {error}")
        self._wake.set()

    def _replay(self) -> None:
        is_last = False
        while not is_last:
            self._wake.wait()
            self._wake.clear()
            is_last = self._has_ended  # before the replay, so that it has what came until the end
            try:
                self._spool.replay(self._store)
            except StorageError as error:
                self._warn(f"the speed of the training is not stored yet: {error}")

    def _warn(self, text: str) -> None:
        """Warn once in a training."""
        _log.log(logging.INFO if self._has_warned else logging.WARNING, text)
        self._has_warned = True

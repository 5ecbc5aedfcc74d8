"""The folders of this user, as platformdirs finds them by HOME and the XDG variables."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from platformdirs import user_cache_path, user_data_path, user_state_path

from storage.errors import NoHome


def data_folder() -> Path:
    """Return the folder of the user's database and files of ranks. Raise NoHome."""
    return _found(user_data_path)


def cache_folder() -> Path:
    """Return the folder of what can be measured again. Raise NoHome."""
    return _found(user_cache_path)


def state_folder() -> Path:
    """Return the folder of locks that all processes of the user see, whatever their data folder. Raise NoHome."""
    return _found(user_state_path)


def _found(folder: Callable[[str], Path]) -> Path:
    with suppress(RuntimeError):  # versions of platformdirs before 4.5 return a relative path
        if (found := folder("autotune")).is_absolute():
            return found
    raise NoHome(
        "this user has no home folder; set HOME, or XDG_DATA_HOME, XDG_CACHE_HOME and XDG_STATE_HOME, to an absolute "
        "path"
    )

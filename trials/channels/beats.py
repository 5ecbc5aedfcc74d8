"""Signs of life of the processes at a store. They are counted: no clocks are compared."""

from collections.abc import Iterable

from trials.channels.store import SignedStore

# Choices: a lost node is found after 15 s; fewer beats would give up a process that swaps or imports for seconds.
BEAT_SECONDS = 1.0
"""Between two signs of life, and between two looks at those of others."""
MISSED_BEATS = 15
"""Looks in a row without a new sign of life after which a process is given up. A process that is stopped for a while,
and looks at nobody meanwhile, misses nothing."""


class Heart:
    """Signs of life under one name, with a count of the looks since the last ones of others."""

    def __init__(self, store: SignedStore, name: str) -> None:
        self._store, self._name, self._count = store, name, 0
        self._heard: dict[str, int] = {}
        self._missed: dict[str, int] = {}

    def beat(self, others: Iterable[str]) -> dict[str, int]:
        """Give a sign of life, and return for each other process how many looks ago it gave its last one."""
        self._count += 1
        self._store.set(beat_key(self._name), str(self._count))
        for name in others:
            count = int(self._store.read(beat_key(name)) or 0)
            # A copy of an old sign is no new one.
            is_new = count > self._heard.get(name, 0)
            self._missed[name] = 0 if is_new else self._missed.get(name, 0) + 1
            self._heard[name] = max(count, self._heard.get(name, 0))
        return {name: self._missed[name] for name in others}

    def give_up(self, name: str) -> None:
        """Tell another process, which may be heard again later, that it has been given up."""
        self._store.set(_lost_key(name), "given up")

    @property
    def is_given_up(self) -> bool:
        """Whether another process has given this one up."""
        return self._store.read(_lost_key(self._name)) is not None


def _lost_key(name: str) -> str:
    return f"lost/{name}"


def beat_key(name: str) -> str:
    """Return the key of the store under which a process gives its signs of life."""
    return f"beat/{name}"

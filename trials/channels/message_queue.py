"""Messages of one writer to one reader, in order, through the agent's store."""

from trials.channels.store import SignedStore


class Outbox:
    """The writer's end."""

    def __init__(self, store: SignedStore, name: str) -> None:
        self._store, self._name, self._sent = store, name, 0

    def send(self, text: str) -> None:
        self._sent += 1
        self._store.put(f"{self._name}/{self._sent}", text)


class Inbox:
    """The reader's end."""

    def __init__(self, store: SignedStore, name: str) -> None:
        self._store, self._name, self._read = store, name, 0

    def next(self) -> str | None:
        """Return the next message; None while there is no new one."""
        text = self._store.get(f"{self._name}/{self._read + 1}")
        self._read += text is not None
        return text

"""Messages through torch's TCPStore, which the agent serves: the channel of ranks on other nodes.

TCPStore itself asks nobody for a password: whoever reaches its port can read and write. So each message carries a code
that only the holders of the agent's token can compute (HMAC, RFC 2104), over its key and its text; a message without
the right code is refused. What is in the messages is not secret.
"""

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from torch._C import _DistError as DistError
from torch._C._distributed_c10d import TCPStore

from trials.errors import NotSigned
from trials.whole_file import whole_file

STORE_SCHEME = "agent-store"
_CHUNK_BYTES = 4 << 20
"""TCPStore accepts at most 8 MiB in one value (`MAX_PAYLOAD_LEN` of its libuv backend)."""
# A choice: nodes may start some seconds before the agent, and a wrong address is reported within half a minute.
_CONNECT_SECONDS = 30.0


class SignedStore:
    """A connection to the agent's TCPStore, with the token. Not for use by several threads: a call may wait.

    All methods raise ConnectionError once the agent has ended. While the network is cut, they wait. Writes are not
    confirmed: other connections find them in the order in which they were made, maybe after the call has returned.
    """

    def __init__(self, tcp_store: TCPStore, token: str) -> None:
        self._tcp = tcp_store
        self._token = token.encode()

    @property
    def address(self) -> str:
        """`HOST:PORT` of the agent."""
        return join(self._tcp.host, self._tcp.port)

    def put(self, key: str, text: str) -> None:
        """Write a message under a key that is new."""
        self.set(key, f"{self.take_number('messages')} {text}")

    def get(self, key: str) -> str | None:
        """Return a message; None while there is none. Raise NotSigned for one of somebody without the token."""
        found = self.read(key)
        return None if found is None else found.partition(" ")[2]

    def written(self, keys: Iterable[str]) -> list[str]:
        """Return the keys that have a message, in the order in which the messages were written."""
        numbers = {key: int(text.partition(" ")[0]) for key in keys if (text := self.read(key)) is not None}
        return sorted(numbers, key=numbers.__getitem__)

    def set(self, key: str, text: str) -> None:
        """Write a text under a key, in place of an earlier one."""
        with _connected():
            self._tcp.set(key, f"{self._code(key, text)} {text}")

    def read(self, key: str) -> str | None:
        """Return the text that `set` wrote; None while there is none. Raise NotSigned as `get` does."""
        with _connected():
            # `get` waits for a key that is not there.
            if not self._tcp.check([key]):
                return None
            found = self._tcp.get(key)
        code, _, text = found.decode(errors="replace").partition(" ")
        if not hmac.compare_digest(code, self._code(key, text)):
            raise NotSigned(f"the message {key} was written by somebody without the token of this search or training")
        return text

    def take_number(self, key: str) -> int:
        """Return 1 for the first who asks, 2 for the second, and so on."""
        with _connected():
            return int(self._tcp.add(key, 1))

    def give_file(self, path: Path) -> None:
        """Offer a file to others, by its name, which identifies the content. Do nothing when it was given before."""
        if self.read(f"files/{path.name}") is not None:
            return
        chunks = 0
        with path.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                # In hexadecimal: texts are all that messages hold.
                for half in (chunk[: _CHUNK_BYTES // 2], chunk[_CHUNK_BYTES // 2 :]):
                    self.set(f"files/{path.name}/{chunks}", half.hex())
                    chunks += 1
        # The number of chunks is written last, so that a process that reads it finds every chunk.
        self.set(f"files/{path.name}", str(chunks))

    def take_file(self, name: str, folder: Path) -> Path:
        """Return the path in `folder` of a file that was given; it is fetched unless it is there. Raise OSError."""
        path = folder / name
        if not path.exists():
            chunks = self.read(f"files/{name}")
            if chunks is None:
                raise FileNotFoundError(f"the agent has not given the file {name}")
            with whole_file(path, durable=False) as stream:
                for number in range(int(chunks)):
                    stream.write(bytes.fromhex(self.read(f"files/{name}/{number}") or ""))
        return path

    def forget(self, prefix: str) -> None:
        """Delete all keys that begin with the prefix."""
        with _connected():
            for key in self._tcp.list_keys():
                if key.startswith(prefix):
                    self._tcp.delete_key(key)

    def _code(self, key: str, text: str) -> str:
        # The key is signed too, so that nobody can copy a message to another key.
        return hmac.new(self._token, f"{key}\n{text}".encode(), hashlib.sha256).hexdigest()


class StoreChannel:
    """The messages of one request: keys of the store that begin with its name."""

    def __init__(self, store: SignedStore, name: str, files: Path) -> None:
        """`files` is the folder of this node in which it keeps the agent's files."""
        self._store = store
        self._files = files
        self.name = name

    @property
    def rendezvous(self) -> str:
        return f"{STORE_SCHEME}://{self._store.address}/{self.name}/rendezvous"

    def put(self, name: str, text: str) -> None:
        self._store.put(f"{self.name}/{name}", text)

    def get(self, name: str) -> str | None:
        return self._store.get(f"{self.name}/{name}")

    def written(self, names: Iterable[str]) -> list[str]:
        keys = self._store.written([f"{self.name}/{name}" for name in names])
        return [key.removeprefix(f"{self.name}/") for key in keys]

    def file(self, path: Path) -> Path:
        return self._store.take_file(path.name, self._files)


def serve_store(address: str, token: str) -> SignedStore:
    """Serve a new store at an address of this machine, on a port that the system chooses, and at no other address.

    Raise OSError when this machine does not have the address.
    """
    family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    port = listener.getsockname()[1]
    # torch itself listens on every interface, whatever the address.
    return SignedStore(
        TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()), token
    )


def join_store(agent: str, token: str) -> SignedStore:
    """Connect to the store at `HOST:PORT`. Raise ConnectionError when it cannot be reached."""
    return SignedStore(connect(agent), token)


def connect(agent: str) -> TCPStore:
    """Return a connection to the TCPStore at `HOST:PORT`, with which no other part of this process works."""
    host, port = split(agent)
    try:
        # torch tries again and again until its time is over, and says little in the end.
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
        return TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_SECONDS)
        )
    except (OSError, DistError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConnectionError(f"{agent} cannot be reached: {reason}") from error


@contextmanager
def _connected() -> Iterator[None]:
    try:
        yield
    except DistError as error:
        raise ConnectionError(f"the agent has ended: {error}") from error


def join(host: str, port: int) -> str:
    """Return `HOST:PORT`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(agent: str) -> tuple[str, int]:
    """Return (host, port). Raise ValueError for a text that is not `HOST:PORT`."""
    host, _, port = agent.rpartition(":")
    if not (host and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ValueError(f"{agent!r} is not HOST:PORT")
    return host.strip("[]"), int(port)

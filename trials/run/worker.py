"""A rank process: `python -m trials.run.worker`. Its RANK, LOCAL_RANK and WORLD_SIZE come from the environment.

With `--request FOLDER` it serves that request and ends: for launchers of other tools, which set MASTER_ADDR. Without,
it serves one request after another, whose folders come as lines on its standard input, and ends when that closes.
"""

import argparse
import contextlib
import gc
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from trials import streams
from trials.lifeline import end_with


def main() -> None:
    """Serves requests until there are no more, or one fails: a failed rank is not used again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--request", type=Path, help="folder of the one request to serve")
    parser.add_argument("--agent", type=int, help="process that sends requests, with which this one ends")
    arguments = parser.parse_args()
    if arguments.agent is not None:
        end_with(arguments.agent)
    folder = arguments.request
    streams.hold_descriptors()
    sys.stdout, sys.stderr = streams.lossy(sys.stdout, 1), streams.lossy(sys.stderr, 2)  # a full disk under the log
    requests: Iterable[Path] = [folder] if folder else _lines_of_stdin()
    serve = _import_serve()
    for request_folder in requests:
        if not serve(request_folder):
            sys.exit(1)


def _import_serve() -> Callable[[Path], bool]:
    """`serve` with torch, DeepSpeed and transformers: most of a rank's start.

    The collector looks for garbage again and again among the many objects that they make, and finds none. So it rests
    meanwhile, and leaves them out afterwards.
    """
    gc.disable()
    from trials.run.serving import serve  # noqa: PLC0415  # not before standard input is read

    gc.freeze()
    gc.enable()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return serve


def _lines_of_stdin() -> Iterator[Path]:
    """The request folders that the agent sends. A thread reads them, so that a closed pipe ends even a busy rank.

    Not through `sys.stdin`, whose lock the thread would hold: each process that the loader forks closes `sys.stdin`
    first, and would wait for that lock for ever.
    """
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    stdin = os.fdopen(sys.stdin.fileno(), closefd=False)

    def read() -> None:
        for line in stdin:
            lines.put(line.rstrip("\n"))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=read, daemon=True).start()
    return (Path(line) for line in iter(lines.get, None))


if __name__ == "__main__":
    main()

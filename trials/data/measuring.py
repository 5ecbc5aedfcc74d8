"""Measuring of many chunks, in other processes where that is faster, with the same result in the same order."""

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from types import ModuleType
from typing import TypeAlias

from trials.data.formats import AnnotationFile, Chunk
from trials.data.lengths import ChunkLengths, measure
from trials.data.records.sample import Measurer
from trials.errors import DataError
from trials.machine.control_groups import usable_cores

Task: TypeAlias = tuple[AnnotationFile, Chunk]

_START_SECONDS = 10.0
"""Seconds until processes have loaded a model's tokenizer; less work than that is done in this process."""
# A choice: each process holds Python, a tokenizer and an image processor, some hundred MB.
_MOST_WORKERS = 32
# A choice: processes find work while this one waits for the first chunk in order.
_AHEAD = 3
"""Chunks per process that are under way or waiting to be taken."""


def cores() -> int:
    """Return the number of processes that this machine can run at once."""
    return min(usable_cores(), _MOST_WORKERS)


def measured(
    tasks: Sequence[Task], measurer: Measurer | None, max_tokens: int | None, workers: int
) -> Generator[ChunkLengths, None, None]:
    """Yield the lengths of the chunks in order. Close the generator to end its processes early.

    Raise DataError when a file cannot be read, or a process ends by itself.
    """
    begun = time.monotonic()
    for number, task in enumerate(tasks):
        if number and workers > 1:
            # What is left is estimated from the chunks that were measured here.
            left = (time.monotonic() - begun) / number * (len(tasks) - number)
            if left * (1 - 1 / workers) > _START_SECONDS:
                yield from _in_pool(tasks[number:], measurer, max_tokens, workers)
                return
        yield measure(*task, measurer, max_tokens)


def _in_pool(
    tasks: Sequence[Task], measurer: Measurer | None, max_tokens: int | None, workers: int
) -> Iterator[ChunkLengths]:
    waiting = iter(tasks)
    under_way: deque[Future[ChunkLengths]] = deque()
    with _pool(pickle.dumps((measurer, max_tokens)), min(workers, len(tasks))) as pool:
        try:
            for task in islice(waiting, workers * _AHEAD):
                under_way.append(_submit(pool, task))
            while under_way:
                yield under_way.popleft().result()
                for task in islice(waiting, 1):
                    under_way.append(_submit(pool, task))
        except BrokenProcessPool as error:
            raise DataError(
                "a process that measures samples was killed, perhaps for lack of memory; free some memory and "
                "try again: what was measured is kept"
            ) from error


@contextmanager
def _pool(how: bytes, workers: int) -> Iterator[ProcessPoolExecutor]:
    others = set(multiprocessing.active_children())
    # Spawned, not forked: the tokenizer and torch have threads of their own here.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(how,))
    try:
        yield pool
    except BaseException:
        # Shutting down would wait for the chunks that are being measured.
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, task: Task) -> Future[ChunkLengths]:
    """Submit a chunk, for which the pool may start a process.

    Worker processes inherit the signal mask: only this process handles Ctrl-C, and ends them. They would run the script
    of this process again, which may be a user's without a guard, unless the main module has no file.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        return pool.submit(_measure, task)
    finally:
        sys.modules["__main__"] = script
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --- in a process of the pool ---

_how = b""
_loaded: list[tuple[Measurer | None, int | None]] = []


def _begin(how: bytes) -> None:
    global _how  # noqa: PLW0603 - the pool hands an initializer no other place
    _how = how
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _measure(task: Task) -> ChunkLengths:
    if not _loaded:  # here and not in `_begin`, so that what goes wrong comes back as an error
        _loaded.append(pickle.loads(_how))  # noqa: S301 - bytes of the parent process, through its own pipe
    return measure(*task, *_loaded[0])

"""Tables: Parquet and Arrow files, and folders that `save_to_disk` wrote; one row a record.

The `datasets` package reads them, and keeps a copy of the files in its cache, from which any row can be read at once.
Images come as they are stored: nothing is decoded.
"""

import errno
import glob
import hashlib
import importlib
import logging
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from trials.data.records.file_chunk import CHUNK_BYTES, CHUNK_RECORDS, Chunk, Place
from trials.data.records.record import Record, RecordError
from trials.errors import DataError
from trials.regular_file import check_regular

# A choice: columns may hold images of some MB each, and the rows of a batch are in memory together.
_BATCH_ROWS = 64
# A choice: of a message, which stays readable where the folder has the images.
_SHOWN_FILES = 3
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}


def chunks(path: Path) -> Iterator[Chunk]:
    """Yield ranges of rows; their number follows from the mean size of a row."""
    table = _table(path)
    mean = max(1, table.data.nbytes // max(1, len(table)))
    rows = max(1, min(CHUNK_RECORDS, CHUNK_BYTES // mean))
    for start in range(0, len(table), rows):
        yield Chunk(start=start, end=min(start + rows, len(table)), line=start + 1)


def digest(path: Path, chunk: Chunk) -> str:
    """Return the BLAKE2b of the rows as an Arrow stream."""
    arrow = _import("pyarrow")
    found = hashlib.blake2b(digest_size=16)
    for _, batch in _batches(path, chunk):
        sink = arrow.BufferOutputStream()
        with arrow.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_table(batch)
        found.update(sink.getvalue())
    return found.hexdigest()


def records(path: Path, chunk: Chunk) -> Iterator[tuple[Place, Record | RecordError]]:
    """Yield every row; columns without a value are left out."""
    for start, batch in _batches(path, chunk):
        for number in range(len(batch)):
            yield (start + number, start + number + 1), _row(batch.slice(number, 1))


def read(path: Path, place: Place) -> Record:
    """Return the row at this place. Raise RecordError."""
    rows = _table(path)
    if place[0] >= len(rows):
        raise RecordError(f"the table has {len(rows)} rows")
    found = _row(rows[place[0] : place[0] + 1])
    if isinstance(found, RecordError):
        raise found
    return found


def _batches(path: Path, chunk: Chunk) -> Iterator[tuple[int, Any]]:
    """Yield Arrow tables of a few rows each, with the number of the first."""
    rows = _table(path)
    for start in range(chunk.start, min(chunk.end, len(rows)), _BATCH_ROWS):
        yield start, rows[start : min(start + _BATCH_ROWS, chunk.end)]


def _row(row: Any) -> Record | RecordError:
    try:
        return {key: value for key, value in row.to_pylist()[0].items() if value is not None}
    except (ValueError, LookupError, OverflowError, NotImplementedError) as error:  # among them text that is not UTF-8
        return RecordError(f"the row cannot be read: {error}")


def _table(path: Path) -> Any:
    """Return the table, opened again when its file has changed."""
    try:
        found = (path / "state.json" if path.is_dir() else path).stat()
    except (OSError, ValueError) as error:
        if not path.is_dir():
            raise DataError(f"annotation file {path} does not exist; correct its path") from error
        if (path / "dataset_dict.json").exists():
            splits = ", ".join(sorted(part.name for part in path.iterdir() if part.is_dir()))
            raise DataError(f"{path} holds several splits; name the folder of one of them: {splits}") from error
        names = sorted(file.name for file in path.iterdir() if file.is_file())
        shown = ", ".join([*names[:_SHOWN_FILES], *(["more"] if len(names) > _SHOWN_FILES else [])])
        raise DataError(
            f"{path} is a folder that `save_to_disk` did not write; name a file of records, or several as separate "
            f"sources (files in it: {shown or 'none'})"
        ) from error
    return _opened(path, f"{found.st_size}-{found.st_mtime_ns}-{found.st_ctime_ns}")


@lru_cache(maxsize=16)
def _opened(path: Path, state: str) -> Any:
    """Return the table; `state` differs once its file has changed."""
    datasets = _import("datasets")
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)  # DataError reports what goes wrong
    try:
        for file in path.iterdir() if path.is_dir() else ():
            check_regular(file)
        table = datasets.load_from_disk(str(path)) if path.is_dir() else _loaded(datasets, path, state)
    except Exception as error:  # the package lets through what its own readers raise, of any kind
        if fault := _fault_of_cache(error, path):
            folder = fault.filename or datasets.config.HF_DATASETS_CACHE
            raise DataError(
                f"annotation file {path} cannot be read: the package `datasets` copies tables to its cache, and "
                f"cannot write {folder} ({fault.strerror}); make it writable, free some space, or set HF_HOME to "
                "another folder"
            ) from error
        reason = " ".join(str(error.__cause__ or error).split())
        raise DataError(f"annotation file {path} cannot be read as a table: {reason}; write it again") from error
    return table.with_format("arrow")


def _fault_of_cache(error: BaseException | None, path: Path) -> OSError | None:
    """Return the error of the system, among an error and its causes, that is not one of the table's own files."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            # A write, unlike an opening, does not say where it failed.
            elsewhere = error.filename and not Path(os.fsdecode(error.filename)).is_relative_to(path)
            if elsewhere or (error.filename is None and error.errno in _NO_ROOM):
                return error
        error = error.__cause__ or error.__context__
    return None


def _loaded(datasets: ModuleType, path: Path, state: str) -> Any:
    builder = "arrow" if path.suffix.lower() == ".arrow" else "parquet"
    # The package knows a copy again by path and time, but `cp -p` and `rsync -a` put another file there with its time.
    return datasets.load_dataset(builder, state, data_files=glob.escape(str(path)), split="train")


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(
            f"tables need the package `datasets`, which cannot be imported ({error}); run pip install datasets"
        ) from error

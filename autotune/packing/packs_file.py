"""An epoch's packs as a file that other trainers can read: JSON Lines or Parquet.

A line is `{"samples": [...], "vision_units": n, "text_tokens": n, "step": i, "rank": r, "micro_batch": m}`. Samples are
positions in the input, counted from 0 over all its records; units and tokens are sums over them, without padding and
stand-ins. Each pack is written once, ordered by step, then data rank, then micro-batch.
"""

import importlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autotune.errors import PackError
from autotune.output_file import check_output_file, whole
from trials.arrays import Ints
from trials.data.epoch import Epoch

_JSONL, _PARQUET = ".jsonl", ".parquet"
# The first line begins with it; the schema behind the columns has it.
_MARKS = {_JSONL: b'{"samples": [', _PARQUET: b"micro_batch"}
# A choice: an epoch of a million packs is never in memory as Python's lists.
_BATCH = 8192
"""Packs that are written at a time."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Batch:
    """Some packs in the order of the file."""

    samples: Ints
    """Record numbers of the samples, pack after pack."""
    starts: Ints
    """[packs + 1]"""
    columns: Mapping[str, Ints]
    """The other values of a line, [packs] each."""


def check_pack_file(path: Path) -> None:
    """Check, before any work is done, that `write_packs` can write this file. Raise PackError."""
    check_output_file(path, _MARKS, _MARKS.get(path.suffix, b""))
    if path.suffix == _PARQUET:
        _parquet()


def write_packs(path: Path, epoch: Epoch) -> None:
    """Write the packs, replacing older ones. Raise PackError when it cannot be written."""
    with whole(path) as partial:
        if path.suffix == _PARQUET:
            _write_parquet(partial, _batches(epoch))
            return
        with partial.open("w", encoding="ascii") as stream:
            for batch in _batches(epoch):
                samples, starts = batch.samples.tolist(), batch.starts.tolist()
                columns = [column.tolist() for column in batch.columns.values()]
                for number, values in enumerate(zip(*columns, strict=True)):
                    members = samples[starts[number] : starts[number + 1]]
                    line = {"samples": members, **dict(zip(batch.columns, values, strict=True))}
                    stream.write(f"{json.dumps(line)}\n")


def _batches(epoch: Epoch) -> Iterator[_Batch]:
    rows, ranks = np.indices(epoch.assignment.shape)
    steps, micro_batches = np.divmod(rows, epoch.micro_batches)
    packs = epoch.assignment.ravel()
    # The last key of `lexsort` counts most.
    order = np.lexsort([part.ravel() for part in (micro_batches, ranks, steps)])
    # A pack that several ranks share is written once, for the first of its ranks.
    order = order[(ranks.ravel() % epoch.degrees[packs] == 0)[order]]
    columns = {
        "vision_units": epoch.packs.sums(epoch.index.vision_units)[packs],
        "text_tokens": epoch.packs.sums(epoch.index.text_tokens)[packs],
        "step": steps.ravel(),
        "rank": ranks.ravel(),
        "micro_batch": micro_batches.ravel(),
    }
    for first in range(0, len(order), _BATCH):
        some = order[first : first + _BATCH]
        counts = epoch.packs.counts[packs[some]]
        starts = np.concatenate([[0], np.cumsum(counts)])
        places = np.arange(starts[-1]) + np.repeat(epoch.packs.starts[packs[some]] - starts[:-1], counts)
        samples = epoch.index.record[epoch.packs.samples[places]]
        yield _Batch(samples=samples, starts=starts, columns={name: values[some] for name, values in columns.items()})


def _write_parquet(path: Path, batches: Iterable[_Batch]) -> None:
    arrow = importlib.import_module("pyarrow")
    lists = arrow.list_(arrow.int64())
    names = ("vision_units", "text_tokens", "step", "rank", "micro_batch")
    schema = arrow.schema([("samples", lists), *((name, arrow.int64()) for name in names)])
    with _parquet().ParquetWriter(path, schema) as writer:
        for batch in batches:
            # Offsets of an Arrow list have 32 bits, enough for the samples of a batch.
            samples = arrow.ListArray.from_arrays(arrow.array(batch.starts, arrow.int32()), arrow.array(batch.samples))
            writer.write_table(arrow.table([samples, *batch.columns.values()], schema=schema))


def _parquet() -> Any:
    """Import the library. Raise PackError with the remedy where it is not installed."""
    try:
        return importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise PackError("Parquet needs pyarrow; pip install pyarrow, or write .jsonl") from error

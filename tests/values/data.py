"""Small datasets for tests: indexes made of lengths alone, and record files with what is read from them."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from trials.data import containers
from trials.data.epoch import CostWeights, Epoch, EpochSettings, build_epoch
from trials.data.formats import AnnotationFile
from trials.data.index import DatasetIndex
from trials.data.records.file_chunk import Place
from trials.data.records.record import Record, RecordError
from trials.plan import Packing

Found = tuple[Place, Record | RecordError]

WEIGHTS = CostWeights(unit=100.0, token=1.0, square=0.01)

lengths = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 300)), min_size=1, max_size=60)
"""(vision units, text tokens) of some samples."""


def index_of(rows: Sequence[tuple[int, int]], repeats: Sequence[float] = (1.0,)) -> DatasetIndex:
    """An index of samples with these lengths, dealt in order to one file per repeat."""
    units, tokens = np.array(rows, dtype=np.int32).reshape(-1, 2).T
    numbers = np.arange(len(rows))
    return DatasetIndex(
        files=tuple(
            AnnotationFile(path=Path(f"/data/{number}.jsonl"), images=Path("/data"), format="internvl", repeat=repeat)
            for number, repeat in enumerate(repeats)
        ),
        file=np.sort(numbers % len(repeats)).astype(np.int32),
        offset=numbers.astype(np.int64),
        line=(numbers + 1).astype(np.int32),
        record=numbers.astype(np.int64),
        kind=np.zeros(len(rows), dtype=np.int8),
        vision_units=units,
        text_tokens=tokens,
        target_tokens=(tokens + 1) // 2,
    )


def build(
    index: DatasetIndex,
    packing: Packing,
    *,
    ranks: int = 2,
    batch: int = 8,
    seed: int = 0,
    epoch: int = 0,
) -> Epoch:
    """Return an epoch in which samples above the capacities are packs of their own."""
    return build_epoch(
        index,
        packing,
        EpochSettings(global_batch_samples=batch, weights=WEIGHTS, seed=seed),
        data_parallel=ranks,
        number=epoch,
    )


def record(*texts: str, **others: Any) -> dict[str, Any]:
    """A record whose turns say these texts, human and gpt in turn."""
    sides = ("human", "gpt")
    return {**others, "conversations": [{"from": sides[n % 2], "value": text} for n, text in enumerate(texts)]}


def write_records(path: Path, *records: object) -> Path:
    """A JSON Lines file; a record of bytes is written as it is."""
    parts = (part if isinstance(part, bytes) else json.dumps(part).encode() for part in records)
    path.write_bytes(b"".join(part + b"\n" for part in parts))
    return path


def file_of(path: Path, **changes: Any) -> AnnotationFile:
    """Return the file's description for the InternVL reader."""
    return AnnotationFile(**{"path": path, "images": path.parent, "format": "internvl", "repeat": 1.0, **changes})


def read_all(path: Path) -> list[Found]:
    """Every record, chunk by chunk, after a look at the chunks."""
    container = containers.load(containers.recognise(path))
    parts = list(container.chunks(path))
    assert all(before.end == after.start for before, after in pairwise(parts))
    return [found for part in parts for found in container.records(path, part)]


def values(found: list[Found]) -> list[Any]:
    """The records, with the message in place of a faulty one."""
    return [str(value) if isinstance(value, RecordError) else value for _, value in found]


def lines(found: list[Found]) -> list[int]:
    """Where the records stand, counted from 1."""
    return [place[1] for place, _ in found]


def write_lengths(path: Path, rows: Sequence[tuple[int, int]]) -> Path:
    """A file of lengths, as OmniBal caches them."""
    path.write_text(json.dumps([{"vit_num": v, "token_num": t, "image_flags": v} for v, t in rows]))
    return path

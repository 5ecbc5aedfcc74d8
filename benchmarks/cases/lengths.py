"""Generated lengths of five kinds of data, in which samples differ as those of real ones do."""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from trials.arrays import Ints
from trials.data.formats import AnnotationFile
from trials.data.index import DatasetIndex

CAPACITIES: Mapping[str, tuple[int, int]] = {
    "zero-inflated images": (24, 8192),
    "log-normal text": (1, 8192),
    "long-tailed": (24, 16384),
    "tiles": (26, 8192),
    "mixture": (24, 8192),
}
"""(Qv, Qt) of the kinds of data that `generated` knows."""
_TOKENS = 256
"""Of a vision unit."""


def add_lengths(parser: argparse.ArgumentParser) -> None:
    """Add the option for a folder of length caches, which `AUTOTUNE_TEST_LENGTHS` names by default."""
    named = os.environ.get("AUTOTUNE_TEST_LENGTHS")
    parser.add_argument(
        "--lengths",
        type=Path,
        default=named and Path(named),
        required=named is None,
        help="folder of length caches (*.json); default: that of AUTOTUNE_TEST_LENGTHS",
    )


def generated(kind: str, count: int) -> DatasetIndex:
    """Return `count` samples of a kind of `CAPACITIES`, the same in each call."""
    random = np.random.default_rng(0)
    source = np.zeros(count, dtype=np.int64)
    match kind:
        case "zero-inflated images":
            units = np.where(random.random(count) < 0.6, random.integers(1, 13, count), 0)
            text = np.maximum(8, random.lognormal(5, 0.8, count))
            targets = random.integers(1, np.maximum(2, text.astype(int)))
        case "log-normal text":
            units = np.zeros(count, dtype=np.int64)
            text = np.clip(random.lognormal(5.5, 1.2, count), 5, 8000)
            targets = text / 2
        case "long-tailed":
            units = np.minimum(random.geometric(0.4, count) - 1, 12)
            text = np.minimum(random.pareto(1.2, count) * 60 + 30, 16000 - _TOKENS * units)
            targets = text / 2
        case "tiles":
            units = random.choice([1, 3, 4, 5, 7, 13], count, p=[0.36, 0.25, 0.1, 0.15, 0.08, 0.06])
            text, targets = random.integers(20, 600, count), random.integers(5, 200, count)
        case _:
            source = np.sort(random.choice(4, count, p=[0.6, 0.25, 0.1, 0.05]))
            several, many = random.integers(1, 5, count), random.integers(6, 13, count)
            units = np.choose(source, [several, 0 * several, many, np.ones_like(several)])
            long = np.clip(random.lognormal(6, 1, count), 20, 8000).astype(int)
            short, middle, least = (random.integers(*bounds, count) for bounds in ((30, 200), (100, 900), (10, 40)))
            text = np.choose(source, [short, long, middle, least])
            targets = np.choose(source, [short // 4, long // 2, middle // 2, 0 * least + 3])
    return index_of(units, text.astype(np.int64) + _TOKENS * units, targets.astype(np.int64), source)


def index_of(units: Ints, tokens: Ints, targets: Ints | None = None, source: Ints | None = None) -> DatasetIndex:
    """Return an index of lengths alone, by default with a target for each token, in ascending `source` files."""
    rows = np.arange(len(units), dtype=np.int64)
    file = np.zeros(len(rows), dtype=np.int32) if source is None else source.astype(np.int32)
    return DatasetIndex(
        files=tuple(
            AnnotationFile(path=Path(f"lengths-{number}"), images=Path(), format="lengths", repeat=1.0)
            for number in range(int(file.max(initial=0)) + 1)
        ),
        file=file,
        offset=rows,
        line=rows.astype(np.int32),
        record=rows,
        kind=np.zeros(len(rows), dtype=np.int8),
        vision_units=units.astype(np.int32),
        text_tokens=tokens.astype(np.int32),
        target_tokens=np.maximum(1, tokens if targets is None else targets).astype(np.int32),
    )

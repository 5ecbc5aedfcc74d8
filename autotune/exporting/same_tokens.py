"""Samples whose tokens a trainer counts, next to those that an export was planned with."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from autotune.errors import ExportError
from autotune.exporting.counting.counted import Counted
from autotune.exporting.trainers import ROOM, Export, Exporter
from trials.data.epoch import Epoch
from trials.data.records.sample import Kind, Sample
from trials.units import number_of

# Choices: templates differ in most samples or in all of a kind, and each image takes some tenths of a second.
_SAMPLES = 32
_LONGEST, _KINDS, _READ = 6, 12, 200
"""Longest samples and those of most vision units, those of a kind of their own, and records read to find kinds."""
_LARGER = 1 / 32
"""Share by which the largest micro-batch may be larger there: less than times and memory are predicted to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How many tokens more a trainer may count for each sample."""

    fewer: int
    """At most 0."""
    more: int
    what: str
    """What holds within them."""

    def __str__(self) -> str:
        if not self.fewer and not self.more:
            return f"{self.what} only with the same tokens in each"
        return f"{self.what} with {self.fewer:+d} to {self.more:+d} tokens more in each"


def compare_tokens(exporter: Exporter, export: Export) -> Iterator[str]:
    """Yield what the comparison on some samples has found, and whether the exported lengths hold there.

    Raise ExportError where they do not, or where the trainer does not take a sample.
    """
    rows = _chosen(export.epoch)
    with TemporaryDirectory() as folder:
        counted = exporter.count(export, rows, Path(folder))
    room, more = _room(export), _differences(exporter, export, rows, counted)
    _check(exporter, export, more, counted, room)
    if more:
        least, most = min(more.values()), max(more.values())
        found = f"from {least:+d} to {most:+d} tokens more" if least or most else "the same tokens"
        yield f"{counted.by} counts {found} in {number_of(len(more), 'sample')}; {room}"
    if counted.why_not is not None:
        what = "the model's own processor did, and" if more else "tokens were not compared, and"
        yield f"{exporter.TITLE} did not count itself ({counted.why_not}): {what} its template may count otherwise"
    missed = [row for row, tokens in zip(rows, counted.tokens, strict=True) if tokens is None]
    if export.videos and any(export.epoch.index.kind[row] & Kind.VIDEO for row in missed):
        yield (
            f"WARNING: {export.filmed} have videos, whose tokens were not compared; {exporter.TITLE} leaves out or "
            f"cuts samples of more than {export.cut_length} tokens, so compare some of them there first"
        )
    elif missed and more:
        yield f"{number_of(len(missed), 'further sample was', 'further samples were')} not compared"


def _chosen(epoch: Epoch) -> list[int]:
    """Return rows of the longest samples, those of most vision units, some of each kind, and others of the whole data.

    Kinds are numbers of images, videos and turns, and a system prompt.
    """
    index, rows = epoch.index, np.unique(epoch.packs.samples)
    extremes = [
        rows[np.argsort(-column[rows], kind="stable")[:_LONGEST]] for column in (index.text_tokens, index.vision_units)
    ]
    spread = rows[np.unique(np.linspace(0, len(rows) - 1, _READ).astype(np.int64))]
    kinds: dict[tuple[int, ...], int] = {}
    for row in spread.tolist():
        kinds.setdefault(_kind(index.sample(row)), row)
    rest = spread[:: max(1, len(spread) // _SAMPLES)]
    some = [kinds[kind] for kind in sorted(kinds, reverse=True)[:_KINDS]]
    return list(dict.fromkeys([*np.concatenate(extremes).tolist(), *some, *rest.tolist()]))[:_SAMPLES]


def _kind(sample: Sample) -> tuple[int, ...]:
    turns = [turn.role for turn in sample.turns]
    return (min(len(sample.images), 3), min(len(sample.videos), 2), min(len(turns), 6), "system" in turns)


def _room(export: Export) -> Room:
    if (order := export.held.order) is not None:
        fewer, more = order.spare
        return Room(fewer=max(fewer, -ROOM), more=min(more, ROOM), what="packs are rebuilt")
    packs, tokens = export.epoch.packs, export.epoch.index.text_tokens
    sizes = packs.counts * packs.largest(tokens) if packs.padded else packs.sums(tokens)
    filled = packs.counts > 0
    most = (sizes.max() * (1 + _LARGER) - sizes[filled]) // packs.counts[filled]
    return Room(fewer=-ROOM, more=min(int(most.min()), ROOM), what="micro-batches fit")


def _differences(exporter: Exporter, export: Export, rows: list[int], counted: Counted) -> dict[int, int]:
    """Return how many tokens more the trainer counts, by row. Raise ExportError for a sample that it does not take."""
    index, found = export.epoch.index, {}
    for row, tokens in zip(rows, counted.tokens, strict=True):
        if isinstance(tokens, str):
            raise ExportError(
                f"{index.where(row)}: {counted.by} does not take the sample ({tokens}); {exporter.REMEDY}, or take it "
                "out of the data"
            )
        if tokens is not None:
            # Where the job cuts samples, the trainer cuts them at the same length.
            there = tokens if export.cuts_at is None else min(tokens, export.cuts_at)
            found[row] = there - int(index.text_tokens[row])
    return found


def _check(exporter: Exporter, export: Export, more: dict[int, int], counted: Counted, room: Room) -> None:
    """Raise ExportError where a sample has fewer or more tokens than there is room for."""
    outside = [row for row, tokens in more.items() if not room.fewer <= tokens <= room.more]
    if not outside:
        return
    index, row = export.epoch.index, max(outside, key=lambda row: abs(more[row]))
    here, others = int(index.text_tokens[row]), sum(map(bool, more.values()))
    of_images = ", all with images" if all(index.vision_units[each] for each, tokens in more.items() if tokens) else ""
    raise ExportError(
        f"{index.where(row)}: {counted.by} counts {here + more[row]} tokens but the plan is for {here}; of {len(more)} "
        f"samples compared {others} differ{of_images}, by {min(more.values()):+d} to {max(more.values()):+d} tokens, "
        f"and {room}; {exporter.REMEDY}, or train with `autotune launch JOB`"
    )

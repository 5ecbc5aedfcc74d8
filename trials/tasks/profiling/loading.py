"""Timing of loading: a rank reads and encodes a pack before its forward pass."""

import time

import numpy as np
import torch
from numpy.typing import NDArray

from trials.arrays import Ints
from trials.data.epoch import PackPart
from trials.data.index import DatasetIndex
from trials.data.loader import PackDataset
from trials.model.inputs.encoders import load_encoder
from trials.tasks.answer import LoadTiming
from trials.tasks.profiling.caches import Caches
from trials.tasks.request import Request

# A choice: different sizes, so that the fit separates the time of a pack from that of its samples.
_PACK_SAMPLES = (1, 2, 4)


def time_loading(request: Request, repeats: int) -> tuple[LoadTiming, ...]:
    """Time packs of some of the job's samples, with and without pixels, in turns; their files are cached before."""
    index = DatasetIndex.load(request.index)
    packs = drawn_packs(index.vision_units, request.job.training.seed)
    encoder = load_encoder(request.job.model, request.job.data)
    parts = [PackPart(rows=rows) for rows in packs]
    caches = Caches(torch.device("cpu"))
    timings = []
    for pixels in (True, False):
        dataset = PackDataset(index, parts, encoder, pixels=pixels, padded=False)
        rounds = [[_seconds(dataset, number, caches) for number in range(len(packs))] for _ in range(1 + repeats)]
        timings += [
            LoadTiming(
                pixels=pixels,
                units=int(index.vision_units[rows].sum()),
                tokens=int(index.text_tokens[rows].sum()),
                seconds=min(seconds),
            )
            for rows, seconds in zip(packs, zip(*rounds[1:], strict=True), strict=True)
        ]
    return tuple(timings)


def drawn_packs(vision_units: NDArray[np.integer], seed: int) -> tuple[Ints, ...]:
    """Return rows of packs, of each size one of any samples, and one of samples with vision units where there are any.

    Of data with few images none might be drawn by chance, and an image would seem to load in no time.
    """
    chance = np.random.default_rng(seed)
    every, with_images = np.arange(len(vision_units)), np.flatnonzero(vision_units)
    of_kinds = (every, with_images if len(with_images) else every)
    return tuple(chance.choice(rows, size=count) for count in _PACK_SAMPLES for rows in of_kinds)


def _seconds(dataset: PackDataset, number: int, caches: Caches) -> float:
    caches.empty()
    start = time.perf_counter()
    dataset[number]
    return time.perf_counter() - start

"""Timing of loading: a rank reads and encodes a pack before its forward pass."""

import time

import numpy as np

from trials.data.epoch import PackPart
from trials.data.index import DatasetIndex
from trials.data.loader import PackDataset
from trials.model.inputs.encoders import load_encoder
from trials.tasks.answer import LoadTiming
from trials.tasks.request import Request

# Choices: different sizes, so that the fit separates the time of a pack from that of its samples; two of each.
_PACK_SAMPLES = (1, 1, 2, 2, 4, 4)


def time_loading(request: Request, repeats: int) -> tuple[LoadTiming, ...]:
    """Time packs of some of the job's samples, with and without pixels; files are cached after the first read."""
    index = DatasetIndex.load(request.index)
    chance = np.random.default_rng(request.job.training.seed)
    packs = [chance.integers(len(index), size=count) for count in _PACK_SAMPLES]
    encoder = load_encoder(request.job.model, request.job.data)
    timings = []
    for pixels in (True, False):
        dataset = PackDataset(index, [PackPart(rows=rows) for rows in packs], encoder, pixels=pixels, padded=False)
        for number, rows in enumerate(packs):
            timings.append(
                LoadTiming(
                    pixels=pixels,
                    units=int(index.vision_units[rows].sum()),
                    tokens=int(index.text_tokens[rows].sum()),
                    seconds=min(_seconds(dataset, number) for _ in range(repeats)),
                )
            )
    return tuple(timings)


def _seconds(dataset: PackDataset, number: int) -> float:
    start = time.perf_counter()
    dataset[number]
    return time.perf_counter() - start

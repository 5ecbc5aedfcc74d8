"""Decoding of samples, which workers hide up to their rate, or which ranks do themselves before their passes."""

from dataclasses import dataclass

import numpy as np

from trials.arrays import Floats, Ints
from trials.data.index import DatasetIndex

_WORKERS = (0, 1, 2, 4)
_HIDDEN_SHARES, _OWN_SHARES = (0.25, 0.9), (0.05, 0.3)
"""Time of decoding an epoch on all devices over that of computing it, with workers and without them."""
_PHOTO_WIDTH = 0.5
"""Standard deviation of the logarithm of a picture's seconds for each of its units: files differ in size."""
_IMAGE, _TEXT = 2.0, 1 / 400
"""Seconds for each picture, and for each token, over those for a unit."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decoding:
    """Seconds of one process for each sample of the index."""

    samples: Floats
    """[samples]"""
    workers: int
    """Processes of each rank that decode ahead; 0 where the rank decodes itself."""
    is_buffered: bool
    """Whether workers go on while a rank has packs left: else they load each pack during the passes of the one before.
    """
    is_profiled: bool
    """Whether a profile sees it: one of small or cached files does not."""

    def packs_seconds(self, samples: Ints, pack_of_sample: Ints, packs: int) -> Floats:
        """Return the seconds of a rank for packs of these samples, by the rate of its processes, [packs]."""
        return np.bincount(pack_of_sample, self.samples[samples], minlength=packs) / max(self.workers, 1)


def drawn_decoding(seed: int, index: DatasetIndex, epoch_seconds: float, dial: float) -> Decoding:
    """Draw the decoding times of a machine on which all devices compute an epoch in `epoch_seconds`, by the seed.

    A layout decodes on the first and the last stage of each data rank, so that pipelines have fewer ranks for it.
    """
    random = np.random.default_rng([seed, 7])
    workers = _WORKERS[seed % len(_WORKERS)]
    share = dial * float(random.uniform(*(_HIDDEN_SHARES if workers else _OWN_SHARES)))
    photos = np.exp(_PHOTO_WIDTH * random.standard_normal(len(index)))
    of_units = photos * (index.vision_units + _IMAGE * (index.vision_units > 0)) + _TEXT * index.text_tokens
    samples: Floats = share * max(workers, 1) * epoch_seconds / of_units.sum() * of_units
    return Decoding(
        samples=samples, workers=workers, is_buffered=seed % 3 > 0, is_profiled=seed // len(_WORKERS) % 2 == 0
    )

"""Packs of a trainer that fills them from a stream of samples, as InternVL's packer does.

Source: internvl_chat/internvl/train/dataset_packed.py of its repository.
"""

from bisect import insort
from dataclasses import dataclass

import numpy as np

from trials.data.epoch import Epoch

BUFFER = 20
"""Packs among which the scripts of the repository look for one with room for a sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackStream:
    """Limits of the packs, and about how many an epoch has there."""

    images: int
    """Most images of a pack."""
    tokens: int
    """Most tokens of a pack."""
    packs: int
    """Packs of an epoch."""
    micro_batches: int
    """Packs of a rank in a step, with which a step has about as many samples as in the plan."""
    batch_samples: float
    """Mean number of samples in a step."""
    steps: int
    """Steps of an epoch, the last of which may go on with samples of the next."""


def stream_of(epoch: Epoch, most_tokens: int) -> PackStream:
    """Return the packs that the trainer makes of an epoch's samples, each of at most `most_tokens` tokens.

    A pack has at most as many images as the fullest one of the epoch. The trainer leaves out or cuts a sample above
    either limit, so `most_tokens` must be at least the length of the longest.
    """
    # A sample of text alone has an empty image there.
    images = np.maximum(epoch.index.vision_units, 1)
    most_images = int(epoch.packs.sums(images).max())
    rows = np.sort(epoch.packs.samples)
    sizes = list(zip(images[rows].tolist(), epoch.index.text_tokens[rows].tolist(), strict=True))
    packs = _count(sizes, most_images, most_tokens)
    micro_batches = max(1, round(epoch.micro_batches * packs / np.count_nonzero(epoch.packs.counts)))
    return PackStream(
        images=most_images,
        tokens=most_tokens,
        packs=packs,
        micro_batches=micro_batches,
        batch_samples=len(rows) / packs * micro_batches * epoch.data_parallel,
        steps=-(-packs // (micro_batches * epoch.data_parallel)),
    )


def _count(sizes: list[tuple[int, int]], most_images: int, most_tokens: int) -> int:
    """Return the number of packs of samples with these (images, tokens).

    A sample goes into the first open pack with room for it. That of most images is the first, and is closed when more
    than BUFFER are open.
    """
    closed, packs = 0, list[tuple[int, int]]()
    for images, tokens in sizes:
        fitting = (
            number
            for number, (held, length) in enumerate(packs)
            if held + images <= most_images and length + tokens <= most_tokens
        )
        place = next(fitting, None)
        held, length = (0, 0) if place is None else packs.pop(place)
        insort(packs, (held + images, length + tokens), key=lambda pack: -pack[0])
        if len(packs) > BUFFER:
            del packs[0]
            closed += 1
    return closed + len(packs)

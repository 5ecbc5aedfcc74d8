"""The sizes of packs for which the layers are profiled."""

import math

from trials.costs.profiled_sizes import ProfiledSizes
from trials.workload import DataProfile, ModelShape

_LEAST_UNITS, _LEAST_TOKENS = 24, 1024
# A choice: twice the samples of OmniBal's micro-batch. The cost of larger packs is extrapolated by the fit.
_SAMPLES = 8
"""Mean samples of the largest profiled pack, about."""


def largest_sizes(data: DataProfile, model: ModelShape) -> ProfiledSizes:
    """Return the largest pack for which the layers of a model are profiled, and the images of all packs.

    The usual image has the mean units of the samples with images, rounded to those of a square one. Samples with
    several images count as one: how many they have is not known.
    """
    tokens = max(_LEAST_TOKENS, data.longest_text_tokens, math.ceil(_SAMPLES * data.text_tokens / data.samples))
    if not model.vision_layers:
        return ProfiledSizes(units=0, image_units=0, tokens=tokens)
    with_images = data.samples - data.text_only_samples
    of_image = max(1, round(math.sqrt(data.vision_units / with_images))) ** 2 if with_images > 0 else 0
    units = max(_LEAST_UNITS, data.most_vision_units, math.ceil(_SAMPLES * data.vision_units / data.samples))
    return ProfiledSizes(units=whole_images(units, of_image), image_units=of_image, tokens=tokens)


def whole_images(units: float, of_image: int) -> int:
    """Return the units of as many whole images as hold at least `units`; without images, `units` rounded up."""
    return math.ceil(units / of_image) * of_image if of_image else math.ceil(units)

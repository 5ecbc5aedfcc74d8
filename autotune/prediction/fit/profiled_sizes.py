"""The sizes of packs for which the layers are profiled, and whether those of other data are near enough."""

import math

from trials.costs.profiled_sizes import ProfiledSizes
from trials.workload import DataProfile, ModelShape

_LEAST_UNITS, _LEAST_TOKENS = 24, 1024
# A choice: twice the samples of OmniBal's micro-batch. The cost of larger packs is extrapolated by the fit.
_SAMPLES = 8
"""Mean samples of the largest profiled pack, about."""
# A choice: the fit continues its lines that far, as the search needs for packs of twice as many samples.
_NEAR = 2
"""Most times by which sizes of the data may differ from those that were profiled."""
# A choice: attention within such an image is 3 % of a layer of 1,280 features with 4 patches in a unit. Tiles, of which
# an image has fewer, do not attend to each other.
_SMALL_IMAGE = 64
"""Units up to which the size of an image hardly changes what a unit costs."""


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


def beyond_profile(profiled: ProfiledSizes | None, data: DataProfile, model: ModelShape) -> str | None:
    """Say for which sizes a profile was made if these data have others, as a clause; None where it serves.

    Smaller packs were profiled too. It also serves where its sizes are not known.
    """
    if profiled is None:
        return None
    wanted = largest_sizes(data, model)
    if wanted.image_units and not profiled.image_units:
        return "the profile is of data without images, of which these data have some"
    differing = [
        f"{what.format(there)}, but these data have {here}"
        for what, there, here, is_near in (
            (
                "images of about {} vision units",
                profiled.image_units,
                wanted.image_units,
                _cost_alike(profiled.image_units, wanted.image_units),
            ),
            ("packs of up to {} vision units", profiled.units, wanted.units, wanted.units <= _NEAR * profiled.units),
            ("packs of up to {} tokens", profiled.tokens, wanted.tokens, wanted.tokens <= _NEAR * profiled.tokens),
        )
        if not is_near
    ]
    return f"the profile is of {' and of '.join(differing)}" if differing else None


def serving_both(wanted: ProfiledSizes, other: ProfiledSizes) -> ProfiledSizes:
    """Return sizes of one profile for two jobs, so that they do not replace each other's in turns.

    They are the wanted ones where the images of the two are too different for one profile.
    """
    if not _cost_alike(wanted.image_units, other.image_units):
        return wanted
    of_image = wanted.image_units or other.image_units
    return ProfiledSizes(
        units=whole_images(max(wanted.units, other.units), of_image),
        image_units=of_image,
        tokens=max(wanted.tokens, other.tokens),
    )


def _cost_alike(of_image: int, of_other: int) -> bool:
    """Return whether units of images of these sizes cost about the same; 0 for data without images, where they do."""
    smaller, larger = sorted((max(of_image, _SMALL_IMAGE), max(of_other, _SMALL_IMAGE)))
    return 0 in (of_image, of_other) or larger <= _NEAR * smaller

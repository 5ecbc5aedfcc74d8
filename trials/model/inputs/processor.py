"""A model's own Hugging Face processor: what it makes of an image, from the image's size alone.

`_get_num_multimodal_tokens` is a private name of transformers, which other engines build on too. It is used here alone.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PROCESSOR_MAPPING, LlavaProcessor, PretrainedConfig
from transformers.image_processing_utils import select_best_resolution
from transformers.utils.import_utils import DummyObject

from trials.data.records.images import MOST_PIXELS
from trials.data.records.sample import ImageOptions
from trials.errors import DataError, ModelError
from trials.model.inputs.corrected import CORRECTED
from trials.model.inputs.pixtral import LightOnProcessor, PixtralProcessor
from trials.model.inputs.preprocessing import load_image_processor, load_tokenizer, preparing
from trials.model.inputs.resized_images import resized_size, unit_side
from trials.model.refusals.refusal import INSTALL, refusing

_COUNT = "_get_num_multimodal_tokens"
# Height and width of any image: different, so that a processor that swaps them fails here.
_PROBE = (336, 448)
_OF_PIXTRAL = {
    "PixtralProcessor": PixtralProcessor, "LlavaProcessor": PixtralProcessor, "LightOnOcrProcessor": LightOnProcessor,
}  # fmt: skip
"""Processors of models with a Pixtral tower, by the name of those that transformers gives for their type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCount:
    """Tokens and units of one image."""

    tokens: int
    """Positions in the language model: start, end and newline tokens included."""
    units: int
    """Tiles or crops; merged patches where the vision tower takes images in their own resolution."""
    resized: tuple[int, int] | None = None
    """(height, width) to which options of the record resize it; None where the processor's settings do."""


class Loader(Protocol):
    """What loads the processor of a model folder."""

    def __call__(self, path: str, config: PretrainedConfig, *, trust_remote_code: bool) -> Any:
        """Return the processor. Raise ModelError for a folder that lacks a part."""


def load_processor(path: str, config: PretrainedConfig, *, trust_remote_code: bool) -> Any:
    """Load the processor of a model folder, with its tokenizer and image processor, and without one for videos.

    Raise ModelError for a folder that lacks a part, and for a processor that cannot count an image's tokens.
    """
    kind = _kind(config)
    parts = {
        "tokenizer": load_tokenizer(path, trust_remote_code=trust_remote_code),
        "image_processor": load_image_processor(path, trust_remote_code=trust_remote_code),
    }
    with refusing(f"the processor of model {path} cannot be loaded and asked", "save it there with save_pretrained"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # it leaves files of further templates open
            settings, _ = kind.get_processor_dict(path)
        processor = kind.from_args_and_dict([parts.get(name) for name in kind.get_attributes()], settings)
        _check_stated(processor, path, config)
        if hasattr(processor, "complete"):
            processor.complete(config)
    with preparing(processor.image_processor):
        count_images(processor, (_PROBE,))
    return processor


def show_by_token(processor: Any, token: str) -> None:
    """Let chat templates write the `token` that takes features, where published ones write a text that is no token."""
    for part in (processor, processor.tokenizer):
        if isinstance(part.chat_template, str):
            part.chat_template = part.chat_template.replace(processor.image_token, token)
    processor.image_token, processor.image_token_id = token, processor.tokenizer.convert_tokens_to_ids(token)


def _check_stated(processor: Any, path: str, config: PretrainedConfig) -> None:
    """Raise ModelError where the folder does not state what the processor counts tokens by."""
    of_model = {
        "patch_size": getattr(getattr(config, "vision_config", None), "patch_size", None),
        "vision_feature_select_strategy": getattr(config, "vision_feature_select_strategy", None),
        "num_image_tokens": None,
    }
    if missing := [name for name in of_model if getattr(processor, name, "") is None]:
        known = ", ".join(f"{name} is {of_model[name]}" for name in missing if of_model[name] is not None)
        raise ModelError(
            f"model {path} does not say how many tokens an image has: processor_config.json is not there, or lacks "
            f"{', '.join(missing)}; take that of the published model, or write it"
            + (f": by config.json, {known}" if known else "")
        )


def _kind(config: PretrainedConfig) -> Any:
    """Return the processor class of a kind of model, without the parts that are not for text and images.

    A processor for videos needs torchvision, and is of no use here.
    """
    found: Any = CORRECTED.get(config.model_type) or PROCESSOR_MAPPING.get(type(config), None)
    if getattr(getattr(config, "vision_config", None), "model_type", None) == "pixtral":
        found = _OF_PIXTRAL.get(getattr(found, "__name__", ""), found)
    if isinstance(found, DummyObject):  # what transformers shows in place of a class whose packages are missing
        packages = " and ".join(sorted(found._backends))
        raise ModelError(
            f"the processor of model type {config.model_type!r}, {found.__name__}, needs the package {packages}, which "
            f"is not installed; {INSTALL}"
        )
    if not hasattr(found, _COUNT):
        what = f"a {found.__name__}" if found else "no processor"
        raise ModelError(
            f"model type {config.model_type!r} has {what} in transformers, which cannot tell an image's tokens from "
            "its size; use a model whose processor has _get_num_multimodal_tokens, such as LLaVA or Qwen2.5-VL"
        )

    class WithoutVideos(found):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)

    WithoutVideos.__name__ = found.__name__
    return WithoutVideos


def placeholder(processor: Any) -> str:
    """Return the text that stands for an image: the image token, with the white space that the processor adds to it.

    White space is tokenised with the text around it.
    """
    written = getattr(processor, "full_image_sequence", processor.image_token)
    start, end = (len(written) - len(stripped) for stripped in (written.lstrip(), written.rstrip()))
    return f"{written[:start]}{processor.image_token}{written[len(written) - end :]}"


def count_images(
    processor: Any, sizes: tuple[tuple[int, int], ...], options: Sequence[ImageOptions | None] = ()
) -> tuple[ImageCount, ...]:
    """Return the counts of a sample's images, from their (height, width) and what the record says of each.

    Raise DataError for one that is refused or whose preparation would go through too large an image, and for options
    that the processor cannot follow.
    """
    if any(options):
        pairs = zip(sizes, options, strict=True)
        return tuple(
            _resized(processor, size, wanted) if wanted else _count(processor, size, {}) for size, wanted in pairs
        )
    # LLaVA-OneVision cuts an image into crops only where a sample has no other image.
    if len(sizes) > 1 and "batch_num_images" in processor.image_processor.model_input_names:
        for size in sizes:  # each is padded to a square
            _check_prepared(size, max(size) ** 2)
        text = processor.replace_image_token({"batch_num_images": [len(sizes)]}, 0)
        return (ImageCount(tokens=text.count(processor.image_token), units=1),) * len(sizes)
    shared = processor.tile_options(len(sizes)) if hasattr(processor, "tile_options") else {}
    return tuple(_count(processor, size, shared) for size in sizes)


def check_counts(processor: Any, features: Mapping[tuple[int, int], int]) -> None:
    """Raise ModelError where the tokens of an image of (height, width) are not its `features` in the model."""
    for (height, width), expected in features.items():
        (count,) = count_images(processor, ((height, width),))
        if count.tokens != expected:
            raise ModelError(
                f"the processor shows an image of {width} x {height} pixels as {count.tokens} tokens but the model "
                f"makes {expected} features of it; correct processor_config.json, where sizes and "
                "vision_feature_select_strategy must be those of config.json, and num_additional_image_tokens 1 for a "
                "tower with a class token, such as CLIP's, else 0"
            )


def _count(processor: Any, size: tuple[int, int], options: Mapping[str, Any]) -> ImageCount:
    images, options = processor.image_processor, dict(options)
    if isinstance(processor, LlavaProcessor):
        if images.size.shortest_edge:  # the other side is cropped after the image was resized
            _check_prepared(size, images.size.shortest_edge**2 * max(size) / min(size))
        if not images.crop_size:
            # It counts by the size of crops, which the image processors of SigLIP do not have.
            options["crop_size"] = {"height": images.size.height, "width": images.size.width}
    try:
        found = getattr(processor, _COUNT)(image_sizes=[size], **options)
    except (ValueError, ArithmeticError) as error:
        height, width = size
        raise DataError(f"the model's processor refuses an image of {width} x {height} pixels: {error}") from error
    (tokens,), (patches,) = found.num_image_tokens, found.num_image_patches
    return ImageCount(tokens=int(tokens), units=_units(images, size, int(patches)))


def _check_prepared(size: tuple[int, int], pixels: float) -> None:
    """Raise DataError for an image of (height, width) whose preparation goes through one of too many pixels."""
    if pixels > MOST_PIXELS:
        raise DataError(
            f"an image of {size[1]} x {size[0]} pixels would be prepared as one of {pixels:.0f} pixels, more than the "
            f"{MOST_PIXELS} that are taken; cut it or leave it out"
        )


def _resized(processor: Any, size: tuple[int, int], options: ImageOptions) -> ImageCount:
    height, width = resized_size(processor.image_processor, size, options)
    units = height * width // unit_side(processor.image_processor) ** 2
    return ImageCount(tokens=units, units=units, resized=(height, width))


def _units(images: Any, size: tuple[int, int], patches: int) -> int:
    pinpoints = _declared(images, "image_grid_pinpoints")
    if pinpoints:  # these processors pad to the most crops of a batch, so they say 1 for every image
        crop, whole = images.crop_size, images.size
        side = int((crop and crop.height) or whole.height or whole.shortest_edge)
        height, width = select_best_resolution(size, pinpoints)
        crops: int = -(-height // side) * -(-width // side)
        return 1 + crops
    merge: int = _declared(images, "merge_size") or 1
    return patches // (merge * merge)


def _declared(images: Any, name: str) -> Any:
    """Return a setting of a processor whose class knows it; a file may hold others, which say nothing."""
    return getattr(images, name, None) if hasattr(type(images), name) else None

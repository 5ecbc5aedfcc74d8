"""A model folder's tokenizer and image processor."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import transformers
from transformers import AutoImageProcessor, AutoTokenizer
from transformers.image_processing_base import ImageProcessingMixin

from trials.errors import ModelError
from trials.model.inputs.cohere_tiles import Cohere2VisionImageProcessorPil
from trials.model.inputs.image_settings import FILE, check_image_settings, shown_setting
from trials.model.refusals.refusal import refusing

_KIND = "image_processor_type"
# A choice: names come from a file and may be of any length.
_SHOWN = 60
_SAVE = "save it there with save_pretrained"
_WITHOUT_TORCHVISION = {"Cohere2VisionImageProcessor": Cohere2VisionImageProcessorPil}
"""Replacements of image processors that transformers has for torchvision alone."""


def load_tokenizer(path: str, *, trust_remote_code: bool) -> Any:
    """Return the tokenizer of a model folder. Raise ModelError where it is missing or damaged."""
    with refusing(f"the tokenizer of model {path} cannot be loaded", _SAVE):
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)


def load_image_processor(path: str, *, trust_remote_code: bool) -> Any:
    """Return the image processor of a model folder.

    Raise ModelError where it is missing or damaged, or has settings that cannot be followed.
    """
    with refusing(f"the image processor of model {path} cannot be loaded", f"correct {FILE}, or {_SAVE}"):
        settings, _ = ImageProcessingMixin.get_image_processor_dict(path)
        _check_kind(settings, path)
        own = _WITHOUT_TORCHVISION.get(str(settings.get(_KIND)).removesuffix("Fast"))
        # The other backend resizes differently, and which one is there would depend on the machine.
        options = {"backend": "pil", "trust_remote_code": trust_remote_code}
        images = own.from_pretrained(path) if own else AutoImageProcessor.from_pretrained(path, **options)
    check_image_settings(images)
    return images


def _check_kind(settings: Mapping[str, Any], path: str) -> None:
    """Raise ModelError for a class of which transformers says only that the file had to name one."""
    kind = settings.get(_KIND)
    # `hasattr` would import the class, and tell of backends that are not there. `dir` takes a tenth of a second.
    known: list[str] = transformers.__all__  # type: ignore[attr-defined]
    if isinstance(kind, str) and "auto_map" not in settings and kind.removesuffix("Fast") not in known:
        raise ModelError(
            f"{_KIND} of model {path} is {kind[:_SHOWN]}, which transformers {transformers.__version__} does not have; "
            f"remove it from {FILE}, or from the image_processor of processor_config.json: the class is then that of "
            "the model_type in config.json"
        )


def preparing(images: Any) -> AbstractContextManager[None]:
    """Raise ModelError for what an image processor raises of images that it is tried with."""
    what = f"no image can be prepared with size {shown_setting(getattr(images, 'size', None))} and the other settings"
    return refusing(what, "correct them in preprocessor_config.json and processor_config.json")


def check_vocabulary(config: Any, tokenizer: Any) -> None:
    """Raise ModelError for a tokenizer with tokens that the model does not have."""
    size, largest = config.get_text_config().vocab_size, max(tokenizer.get_vocab().values())
    if largest >= size:
        raise ModelError(
            f"the tokenizer has the token {largest} but the model's vocab_size is {size}; take the tokenizer that the "
            "model was saved with"
        )

"""Processors of transformers whose own counts are not those of the images that they process."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import Gemma3Processor, Idefics3Processor, InternVLProcessor, PretrainedConfig
from transformers.models.aya_vision.processing_aya_vision import AyaVisionProcessor
from transformers.models.deepseek_vl.processing_deepseek_vl import DeepseekVLProcessor
from transformers.models.got_ocr2.processing_got_ocr2 import GotOcr2Processor
from transformers.models.ovis2.image_processing_pil_ovis2 import get_min_tile_covering_grid, get_optimal_tiled_canvas
from transformers.models.ovis2.processing_ovis2 import Ovis2Processor
from transformers.models.paddleocr_vl.processing_paddleocr_vl import PaddleOCRVLProcessor
from transformers.models.paligemma.processing_paligemma import PaliGemmaProcessor
from transformers.processing_utils import MultiModalData, ProcessorMixin

from trials.errors import ModelError
from trials.model.inputs.chat_template import default_template
from trials.model.inputs.split_images import OVIS_ATOM, OVIS_MARKS, TILE, ovis_layout, split_images

_GOT_CHAT = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>SYSTEM<|im_end|>{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<img><imgpad></img>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The prompt that the processor of GOT-OCR2 writes where it gets no text."""
_PALIGEMMA_CHAT = (
    "{% if messages | map(attribute='role') | list not in [['user'], ['user', 'assistant']] %}"
    "{{ raise_exception('it has ' ~ messages | length ~ ' turns, the first of the ' ~ messages[0]['role'] ~ ', but '"
    " 'PaliGemma takes one question and one answer; make a record of each answer, with the system prompt in its '"
    " 'question, or save a chat template that writes the conversation') }}{% endif %}"
    "{% set pieces = messages[0]['content'].split('IMAGE') %}{% for piece in pieces[:-1] %}{{ piece }}IMAGE{% endfor %}"
    "{{ bos_token }}{{ pieces[-1] }}\n{% if messages[1:] %}{{ messages[1]['content'] }}{{ eos_token }}{% endif %}"
)
"""The prompt that the processor of PaliGemma writes, and the answer behind it."""


class AyaVision(AyaVisionProcessor):  # type: ignore[misc]
    """Processor that names the tokens of images that its tokenizer has."""

    @property
    def image_token_ids(self) -> list[int]:
        known: dict[str, int] = self.tokenizer.get_vocab()
        named = (self.img_patch_token, self.tile_global_token, self.start_of_img_token, self.end_of_img_token)
        return [known[each] for each in named if each in known]


class DeepseekVL(DeepseekVLProcessor):  # type: ignore[misc]
    """Processor that counts the tokens of an image."""

    def _get_num_multimodal_tokens(self, image_sizes: Any = None, **_: Any) -> MultiModalData:
        images = len(image_sizes)
        return MultiModalData(num_image_tokens=[self.num_image_tokens] * images, num_image_patches=[1] * images)


class Gemma3(Gemma3Processor):
    """Processor that counts the tokens before and behind an image, too."""

    def _get_num_multimodal_tokens(self, image_sizes: Any = None, **_: Any) -> MultiModalData:
        images = len(image_sizes)
        return MultiModalData(num_image_tokens=[self.image_seq_length + 2] * images, num_image_patches=[1] * images)


def convolved_features(config: PretrainedConfig) -> int:
    """Return the features of one tile of GOT-OCR2: two convolutions halve its rows and columns, rounded up."""
    side = config.vision_config.image_size // config.vision_config.patch_size
    return int((-(-side // 4)) ** 2)


class GotOcr2(GotOcr2Processor):
    """Processor that counts the tokens of an image, and takes images of samples and text alone, as others do."""

    def complete(self, config: PretrainedConfig) -> None:
        """Set what published folders leave out: the tokens of an image, and the chat template."""
        self.num_image_tokens = convolved_features(config)
        # As the processor itself calls it, whatever the settings say.
        self.image_processor.crop_to_patches = False
        if default_template(self.chat_template, self.tokenizer.chat_template) is None:
            self.chat_template = _GOT_CHAT.replace("SYSTEM", self.system_query)

    def _get_num_multimodal_tokens(self, image_sizes: Any = None, **_: Any) -> MultiModalData:
        images = len(image_sizes)
        return MultiModalData(num_image_tokens=[self.num_image_tokens] * images, num_image_patches=[1] * images)

    def prepare_inputs_layout(self, images: Any = None, text: Any = None, *others: Any, **options: Any) -> Any:
        if images is None and text is not None:
            return ProcessorMixin.prepare_inputs_layout(self, text=text)
        if images and isinstance(images[0], list | tuple) and not options.get("multi_page"):
            images = [each for sample in images for each in sample]
        return super().prepare_inputs_layout(images, text, *others, **options)  # type: ignore[no-untyped-call]


class Idefics3(Idefics3Processor):
    """Processor with the tiles and tokens an image really gets: the original rounds sides that are rounded again."""

    def _get_num_multimodal_tokens(self, image_sizes: Any = None, **_: Any) -> MultiModalData:
        sizes: Sequence[tuple[int, int]] = [tuple(size) for size in image_sizes]
        images = split_images(self)
        return MultiModalData(
            num_image_tokens=[len(images.tokens(size, self.image_seq_len)) for size in sizes],
            num_image_patches=[images.units(size) for size in sizes],
        )


def shared_tiles(image_processor: Any, images: int) -> dict[str, Any]:
    """Return the options of InternVL's image processor for each of `images` (`max_dynamic_patch // n`)."""
    return {"crop_to_patches": True, "max_patches": max(1, image_processor.max_patches // max(1, images))}


class InternVL(InternVLProcessor):
    """Processor that shares the most tiles of an image among the images of a sample, as InternVL's training does."""

    def __init__(  # the names are those of the original, by which transformers finds the parts
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        video_processor: Any = None,
        image_seq_length: int = 256,
        chat_template: str | None = None,
    ) -> None:
        """Raise ModelError for parts of another model."""
        for name in ("start_image_token", "context_image_token", "end_image_token"):
            if getattr(tokenizer, name, None) not in tokenizer.get_vocab():
                raise ModelError(f"the tokenizer has no {name}; use a model folder in InternVL's Hugging Face form")
        if not hasattr(image_processor, "get_number_of_image_patches"):
            kind = type(image_processor).__name__
            raise ModelError(f"{kind} does not cut images into tiles; InternVL uses GotOcr2ImageProcessor")
        super().__init__(image_processor, tokenizer, video_processor, image_seq_length, chat_template)

    def tile_options(self, images: int) -> dict[str, Any]:
        """Return the options by which each of a sample's `images` is cut into tiles."""
        return shared_tiles(self.image_processor, images)


class Ovis2(Ovis2Processor):  # type: ignore[misc]
    """Processor that counts the tokens of an image, and names those that take features."""

    @property
    def image_token_ids(self) -> list[int]:
        known: dict[str, int] = self.tokenizer.get_vocab()
        return [known[each] for each in (OVIS_ATOM, *OVIS_MARKS) if each in known]

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the (rows, columns) of tiles of an image of (height, width)."""
        images = self.image_processor
        tile, most = (images.size.height, images.size.width), images.max_patches
        if not images.crop_to_patches or most == 1:
            return 1, 1
        if images.use_covering_area_grid:
            columns, rows = get_min_tile_covering_grid(size, target_patch_size=tile[0], max_image_tiles=most)
        else:
            columns, rows = get_optimal_tiled_canvas(size, tile, images.min_patches, most)
        return rows, columns

    def replace_image_token(self, image_inputs: Any, image_idx: int, **options: Any) -> str:
        # The original takes grids as tensors alone, which they are where tensors are asked for.
        grids = [np.asarray(grid) for grid in image_inputs["grids"]]
        text: str = super().replace_image_token({"grids": grids}, image_idx, **options)
        return text

    def _get_num_multimodal_tokens(self, image_sizes: Any = None, **_: Any) -> MultiModalData:
        layouts = [ovis_layout(*self.grid(tuple(size))) for size in image_sizes]
        tiles = [layout.count(TILE) for layout in layouts]
        tokens = [
            len(layout) + units * (self.image_seq_length - 1) for layout, units in zip(layouts, tiles, strict=True)
        ]
        return MultiModalData(num_image_tokens=tokens, num_image_patches=tiles)


class PaddleOcrVL(PaddleOCRVLProcessor):  # type: ignore[misc]
    """Processor that counts the tokens of an image."""

    def _get_num_multimodal_tokens(self, image_sizes: Any = None, **_: Any) -> MultiModalData:
        patches = [self.image_processor.get_number_of_image_patches(*size) for size in image_sizes]
        merged = self.image_processor.merge_size**2
        return MultiModalData(num_image_tokens=[each // merged for each in patches], num_image_patches=patches)


class PaliGemma(PaliGemmaProcessor):  # type: ignore[misc]
    """Processor that takes text alone, and conversations by a chat template, as others do."""

    chat_template: str | None
    takes_suffix = True
    """Whether an answer is another text for the tokenizer than the prompt before it."""

    def complete(self, config: PretrainedConfig) -> None:
        """Set the chat template, which published folders do not have. One that is there writes the whole text."""
        self.takes_suffix = default_template(self.chat_template, self.tokenizer.chat_template) is None
        if self.takes_suffix:
            self.chat_template = _PALIGEMMA_CHAT.replace("IMAGE", self.image_token)

    def prepare_inputs_layout(self, images: Any = None, text: Any = None, **options: Any) -> Any:
        if self.takes_suffix and images is not None:
            return super().prepare_inputs_layout(images, text, **options)
        images, text, *others = ProcessorMixin.prepare_inputs_layout(self, images=images, text=text)
        if self.takes_suffix:
            text = [f"{self.tokenizer.bos_token}{each}\n" for each in text]
        return images, text, *others

    def validate_inputs(self, images: Any = None, text: Any = None, **_: Any) -> None:
        ProcessorMixin.validate_inputs(self, images=images, text=text)


# SmolVLM's own processor differs in videos alone, cannot count, and needs a package that spells numbers in words.
CORRECTED = {
    "aya_vision": AyaVision, "deepseek_vl": DeepseekVL, "gemma3": Gemma3, "got_ocr2": GotOcr2,
    "internvl": InternVL, "idefics3": Idefics3, "ovis2": Ovis2, "paddleocr_vl": PaddleOcrVL,
    "paligemma": PaliGemma, "smolvlm": Idefics3,
}  # fmt: skip
"""By model type."""

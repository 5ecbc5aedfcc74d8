"""What families share whose vision units are merged patches of images in their own resolution: Qwen2-VL and later.

A grid is (frames, height, width) in patches. The projector merges squares of `spatial_merge_size` x
`spatial_merge_size` patches into one token each; such a square is one vision unit.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids

from trials.arrays import Ints
from trials.data.records.sample import Encoder
from trials.data.tokens import PackTokens
from trials.errors import ModelError
from trials.model.attention.packed import PACKED_ATTENTION
from trials.model.attention.samples import PackedSamples
from trials.model.family import Images, LayerRunner, VisionModules
from trials.model.inputs.chat_encoder import Positions, chat_encoder
from trials.model.inputs.patched_videos import VideoRules
from trials.model.inputs.resized_images import resized_pixels
from trials.model.refusals.heads import check_heads
from trials.model.shrunk import VOCABULARY
from trials.model.towers.patch_videos import PatchVideos

_FRAMES = "temporal_patch_size"
# A choice: published patches have 14 or 16 pixels, and the memory of a unit grows with the square.
_LARGEST_PATCH = 1_024
_LEARNED_SIDE = 4
"""Learned positions in a row of a shrunk model: a square that is smaller than some images and larger than others."""

# --- data ---------------------------------------------------------------------------------------------------------


def patch_encoder(
    model_path: str,
    trust_remote_code: bool = False,
    max_tokens: int | None = None,
    *,
    positions: Positions,
    rules: VideoRules | None,
) -> Encoder:
    """Implement `Family.encoder`, with `rules` for videos. Without them, samples with videos are refused."""
    videos = functools.partial(PatchVideos, rules=rules) if rules else None
    return chat_encoder(
        model_path, trust_remote_code, max_tokens, inputs=PatchInputs, positions=positions, videos=videos
    )


class PatchInputs:
    """Implementation of `ImageInputs` (trials/model/inputs/chat_encoder.py) for processors that flatten patches."""

    def __init__(self, config: PretrainedConfig, processor: Any) -> None:
        """Raise ModelError for a processor whose patches differ from the model's."""
        self._merge = config.vision_config.spatial_merge_size
        self._processor = processor.image_processor
        self._image_token: int = config.image_token_id
        self.unit_shape = unit_shape(config)
        # That of PaddleOCR-VL makes patches of one frame, and may not say so.
        made = self._processor.patch_size, getattr(self._processor, _FRAMES, 1), self._processor.merge_size
        taken = _sizes(config.vision_config)
        if made != taken:
            raise ModelError(
                f"the image processor makes patches of (size, frames, merged) {made} but the model takes {taken}; "
                "correct preprocessor_config.json, or the vision_config of config.json"
            )

    def tokens(self, size: tuple[int, int], count: int) -> list[int]:
        """Return one image token for each of `count` merged patches."""
        return [self._image_token] * count

    def pixels(
        self, images: Sequence[NDArray[np.uint8]], resized: Sequence[tuple[int, int] | None] = ()
    ) -> tuple[NDArray[np.float32], Ints]:
        """Return (pixels [units, *unit_shape], grids [images, 3])."""
        if not any(resized):
            return self._processed(images)
        made = [
            self._processed([resized_pixels(self._processor, image, size)], do_resize=False)
            if size
            else self._processed([image])
            for image, size in zip(images, resized, strict=True)
        ]
        pixels, grids = zip(*made, strict=True)
        return np.concatenate(pixels), np.concatenate(grids)

    def _processed(self, images: Sequence[NDArray[np.uint8]], **options: bool) -> tuple[NDArray[np.float32], Ints]:
        made = self._processor(list(images), input_data_format="channels_last", return_tensors="np", **options)
        pixels = np.asarray(made["pixel_values"], dtype=np.float32).reshape(-1, *self.unit_shape)
        return pixels, np.asarray(made["image_grid_thw"], dtype=np.int64)

    def blank(self, units: int) -> tuple[list[int], Ints]:
        """Return the tokens and the grid of one image of `units` merged patches in a row."""
        return [self._image_token] * units, np.array([[1, self._merge, self._merge * units]], dtype=np.int64)

    def pieces(self, units: int, grids: Ints) -> Ints:
        """Return the merged patches of each image or video."""
        pieces: Ints = grids.prod(axis=1) // self._merge**2
        return pieces


# --- the configuration --------------------------------------------------------------------------------------------


def unit_shape(config: PretrainedConfig) -> tuple[int, int]:
    """Return (patches, channels x frames x height x width of a patch)."""
    side, frames, merged = _sizes(config.vision_config)
    return merged**2, 3 * frames * side**2


def _sizes(vision: PretrainedConfig) -> tuple[int, int, int]:
    """Return the patches of the model as (size, frames, merged)."""
    # PaddleOCR-VL takes no videos; the number of frames in its file is no setting of its class, and nothing reads it.
    frames = vision.temporal_patch_size if hasattr(type(vision), _FRAMES) else 1
    return vision.patch_size, frames, vision.spatial_merge_size


def check_patches(config: PretrainedConfig) -> None:
    """Raise ModelError for sizes of patches that make no sense, and for tokens outside the vocabulary."""
    vision = config.vision_config
    for name, size in zip(("patch_size", _FRAMES, "spatial_merge_size"), _sizes(vision), strict=True):
        if not 1 <= size <= _LARGEST_PATCH:
            raise ModelError(
                f"{name} is {size}; correct it in the vision_config of config.json to a number from 1 to "
                f"{_LARGEST_PATCH}"
            )
    name = "in_channels" if hasattr(vision, "in_channels") else "num_channels"
    if getattr(vision, name) != 3:
        raise ModelError(f"{name} is {getattr(vision, name)}, but images have 3; correct it in config.json")
    vocabulary = config.get_text_config().vocab_size
    for name in ("image_token_id", *_marks(config)):
        if not 0 <= getattr(config, name) < vocabulary:
            raise ModelError(
                f"{name} is {getattr(config, name)} but the language model has {vocabulary} tokens; correct {name} or "
                "vocab_size in config.json"
            )


def check_towers(
    config: PretrainedConfig,
    *,
    width: str = "hidden_size",
    output: str | None = "out_hidden_size",
) -> None:
    """Raise ModelError for heads that do not divide their tower, and for features that the language model cannot take.

    `width` and `output` name the settings of the vision tower's width and of that of its features, None where these
    have the width of the language model.
    """
    vision, text = config.vision_config, config.get_text_config()
    check_heads(text, "language")
    # Settings of the usual names are checked where the file is read.
    heads = "num_heads" if hasattr(vision, "num_heads") else "num_attention_heads"
    for name in ("depth", "num_heads"):
        if getattr(vision, name, 1) < 1:
            raise ModelError(f"{name} is {getattr(vision, name)}; correct it in the vision_config of config.json")
    # Rotary embeddings cut a head in four: cosine and sine, of rows and of columns.
    if getattr(vision, width) % (4 * getattr(vision, heads)):
        raise ModelError(
            f"the vision model has {getattr(vision, heads)} heads for a {width} of {getattr(vision, width)}, which "
            f"must be a multiple of four times the heads; correct {heads} or {width} in config.json"
        )
    if output and getattr(vision, output) != text.hidden_size:
        raise ModelError(
            f"{output} of the vision model is {getattr(vision, output)} but the language model's hidden_size is "
            f"{text.hidden_size}; correct one of them in config.json"
        )


def check_sections(config: PretrainedConfig, *, share: float = 1.0, usual: list[int] | None = None) -> None:
    """Raise ModelError where time, height and width together do not have the frequencies of a head.

    `share` is the part of a head's width that has positions; `usual` are the sections where a configuration has none.
    """
    text = config.get_text_config()
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    half = (int(width * share) + 1) // 2
    sections = text.rope_parameters.get("mrope_section", usual)
    if sections is not None and (not isinstance(sections, list) or sum(sections) != half):
        of_part = "" if share == 1 else f" times the partial_rotary_factor of {share}"
        raise ModelError(
            f"mrope_section is {sections}, which must be a list of numbers that add up to {half}, half the width of a "
            f"head{of_part}; correct it in config.json"
        )


def check_square(config: PretrainedConfig) -> None:
    """Raise ModelError for a tower without a square of learned positions."""
    vision = config.vision_config
    if not isinstance(vision.image_size, int) or vision.image_size < vision.patch_size:
        raise ModelError(
            f"image_size is {vision.image_size}, of which the square of learned positions is made; correct it in the "
            f"vision_config of config.json to a number from {vision.patch_size}, the patch_size"
        )


def _marks(config: PretrainedConfig) -> tuple[str, str]:
    """Return the settings that name the tokens before and behind an image."""
    first = "image" if hasattr(config, "image_start_token_id") else "vision"
    return f"{first}_start_token_id", f"{first}_end_token_id"


def unit_flops(config: PretrainedConfig, *, tower: int, projector: int) -> float:
    """Count 2 operations for each parameter and patch; attention, which depends on the size of images, is left out."""
    return float(2 * tower * config.vision_config.spatial_merge_size**2 + 2 * projector)


def random_images(config: PretrainedConfig, units: int) -> Images:
    """Return a square image with as many of the units as it can hold, and the rest in a row, between their marks."""
    merge, side = config.vision_config.spatial_merge_size, math.isqrt(units)
    shapes = [(side, side), (1, units - side**2)]
    grids = [(1, merge * height, merge * width) for height, width in shapes if width]
    ids: list[int] = []
    start, end = (getattr(config, name) for name in _marks(config))
    for _, height, width in grids:
        shown = [config.image_token_id] * (height * width // merge**2)
        ids += [start, *shown, end]
    return Images(
        pixels=torch.randn(units, *unit_shape(config)), grids=torch.tensor(grids), input_ids=torch.tensor(ids)
    )


def placed(config: PretrainedConfig, input_ids: Ints, grids: Ints, steps: Sequence[float]) -> Ints:
    """Return positions [3, tokens] in time, height and width (M-RoPE, Qwen2-VL paper, section 2.1).

    Text advances all three by 1. The tokens of an image or video count rows and columns from the position of the text
    before, and layers of frames in their entry of `steps` [grids], rounded down. The text after it continues from the
    last row or column, whichever is larger.
    """
    merge = config.vision_config.spatial_merge_size
    images = np.flatnonzero(np.isin(input_ids, (config.image_token_id, config.video_token_id)))
    pieces, done, start, shown = [np.zeros((3, 0), dtype=np.int64)], 0, 0, 0
    for (frames, height, width), step in zip(grids.tolist(), steps, strict=True):
        if shown == len(images):  # the unit of a pack without images has no token
            break
        text = int(images[shown]) - done
        pieces.append(np.tile(np.arange(start, start + text), (3, 1)))
        start += text
        shape = frames, height // merge, width // merge
        places = np.indices(shape).reshape(3, -1)
        # In float32, as transformers multiplies.
        places[0] = places[0].astype(np.float32) * np.float32(step)
        pieces.append(places + start)
        start += max(shape[1:])
        shown += math.prod(shape)
        done += text + math.prod(shape)
    pieces.append(np.tile(np.arange(start, start + len(input_ids) - done), (3, 1)))
    return np.concatenate(pieces, axis=1)


def placed_by_layer(
    config: PretrainedConfig, input_ids: Ints, grids: Ints, seconds: Sequence[float] | None = None
) -> Ints:
    """Implement `Family.positions` where the text between them says the time of the layers of frames."""
    # Each layer of frames is placed as an image of its own.
    layers = np.repeat(grids, grids[:, 0], axis=0) if len(grids) else grids
    if len(layers):
        layers[:, 0] = 1
    return placed(config, input_ids, layers, [1.0] * len(layers))


def model_inputs(config: PretrainedConfig, input_ids: torch.Tensor, images: Images | None) -> dict[str, Any]:
    """Implement `Family.model_inputs` for models that take grids and where their images are."""
    inputs: dict[str, Any] = {"input_ids": input_ids[None]}
    if images:
        inputs |= {
            "pixel_values": images.pixels.flatten(0, 1),
            "image_grid_thw": images.grids,
            "mm_token_type_ids": (input_ids == config.image_token_id).long()[None],
        }
    return inputs


def shrink_patches(
    settings: dict[str, Any], layers: int, *, width: str = "hidden_size", output: str = "out_hidden_size"
) -> None:
    """Leave `layers` layers and two heads, and give the tokens around images ids of a small vocabulary, in place.

    `width` and `output` are those of `check_towers`.
    """
    vision = settings["vision_config"]
    before = vision["num_heads"]
    heads = min(2, before)
    vision.update({"depth": layers, "num_heads": heads, width: heads * (vision[width] // before)})
    vision[output] = settings["text_config"]["hidden_size"]
    if "intermediate_size" in vision:
        vision["intermediate_size"] = min(128, vision["intermediate_size"])
    shrink_marks(settings)


def shrink_marks(settings: dict[str, Any]) -> None:
    """Give the tokens around images ids of a small vocabulary, in place."""
    names = [name for name in settings if name.endswith("_token_id") and name.startswith(("image", "video", "vision"))]
    settings.update({name: VOCABULARY - 1 - number for number, name in enumerate(names)})


def shrink_square(settings: dict[str, Any]) -> None:
    """Leave a small square of learned positions, in place."""
    vision = settings["vision_config"]
    vision["image_size"] = min(vision["image_size"], _LEARNED_SIDE * vision["patch_size"])


# --- the model ----------------------------------------------------------------------------------------------------


def vision_modules(model: PreTrainedModel) -> VisionModules:
    """Return the tower in parts."""
    tower = model.model.visual
    return VisionModules(embedding=(tower.patch_embed,), layers=tuple(tower.blocks), projector=(tower.merger,))


def embed_patches(model: PreTrainedModel, pixels: torch.Tensor) -> torch.Tensor:
    """Return states [patches, hidden] of pixels [units, merged patches, values]."""
    states: torch.Tensor = model.model.visual.patch_embed(pixels.flatten(0, 1).to(model.dtype))
    return states


def vision_runner(model: PreTrainedModel, states: torch.Tensor, tokens: PackTokens) -> LayerRunner:
    """Implement `Family.vision_runner` for towers in which the patches of an image attend to each other."""
    tower = model.model.visual
    rotary, images = rotary_embeddings(tower, states, tokens), frames(tokens)
    attend = block_runner(tower, len(states))

    def run(layer: nn.Module, number: int, states: torch.Tensor) -> torch.Tensor:
        return attend(layer, states, images, rotary)

    return run


def rotary_embeddings(tower: Any, states: torch.Tensor, tokens: PackTokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (cosine, sine) [patches, d] of the places of patches in their images."""
    places = get_vision_position_ids(tokens.grids, tower.spatial_merge_size)
    cosine, sine = tower.rotary_pos_emb(states, places.to(states.device, non_blocking=True))
    return cosine, sine


def frames(tokens: PackTokens) -> PackedSamples:
    """Return the patches of each image, and of each frame of a video, which attend to each other."""
    return between(get_vision_cu_seqlens(tokens.grids))


def between(ends: torch.Tensor) -> PackedSamples:
    """Return patches that attend to each other between two neighbours of the ascending `ends`, on the CPU."""
    return PackedSamples(tuple(ends.diff().tolist()), causal=False)


def block_runner(
    tower: Any, patches: int
) -> Callable[[nn.Module, torch.Tensor, PackedSamples, tuple[torch.Tensor, ...]], torch.Tensor]:
    """Return what runs a block of the tower on states [patches, hidden]: (block, states, samples, rotary embeddings).

    Patches attend to their sample.
    """
    tower.config._attn_implementation = PACKED_ATTENTION
    # The blocks split their states themselves, unless all are one image: the attention takes the samples.
    whole = torch.tensor([0, patches])

    def run(
        layer: nn.Module, states: torch.Tensor, samples: PackedSamples, rotary: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        result: torch.Tensor = layer(states, cu_seqlens=whole, position_embeddings=rotary, samples=samples)
        return result

    return run

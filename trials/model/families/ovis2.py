"""Ovis2: a tile's features are rows of a table, mixed by a softmax, and so are the marks between the tiles."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad, softmax
from transformers import AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel
from transformers.models.ovis2.modeling_ovis2 import hard_softmax

from trials.arrays import Ints
from trials.data.tokens import PackTokens
from trials.errors import ModelError
from trials.model import decoder
from trials.model.family import Images, VisionModules
from trials.model.inputs.chat_encoder import chat_encoder
from trials.model.inputs.positions import counted_positions
from trials.model.inputs.processor import load_processor, show_by_token
from trials.model.inputs.split_images import OVIS_ATOM, OVIS_MARKS, TILE, ovis_layout
from trials.model.refusals.heads import check_heads
from trials.model.shrunk import VOCABULARY
from trials.model.towers import siglip, tiles
from trials.model.towers.tiles import check_tile_numbers

AUTO_MODEL = AutoModelForImageTextToText
language_runner = decoder.language_runner
model_inputs = tiles.model_inputs
positions = counted_positions
vision_runner = tiles.vision_runner
OTHER_FORMS = {
    "ovis": "it is Ovis in the form of its own code; give the Hugging Face form of Ovis2, of model_type 'ovis2', such "
    "as thisisiron/Ovis2-1B-hf"
}
_MIXED = {"softmax": softmax, "st_argmax": hard_softmax}
"""Functions that make shares of the rows of the table of logits, by `tokenize_function`."""
_SHRUNK_TABLE = 32


def takes(config: PretrainedConfig) -> bool:
    """Return whether this is Ovis2."""
    return bool(config.model_type == "ovis2")


def check(config: PretrainedConfig) -> None:
    """Raise ModelError for a way to choose rows of the table that draws noise, and for sizes that make no sense."""
    vision, text = config.vision_config, config.get_text_config()
    siglip.check_tower(config)
    check_heads(text, "language")
    if vision.tokenize_function not in _MIXED:
        raise ModelError(
            f"tokenize_function is {vision.tokenize_function[:40]!r}, which draws noise that a recomputation would "
            "draw again, or is unknown; set it to 'softmax' in the vision_config of config.json, as published models do"
        )
    for name in ("hidden_size", "vocab_size"):
        if getattr(config, name) != getattr(text, name):
            raise ModelError(
                f"{name} is {getattr(config, name)} but {getattr(text, name)} in the text_config; correct config.json"
            )
    marks, rows = list(config.visual_indicator_token_ids), vision.num_visual_indicator_tokens
    different = {token for token in (config.image_token_id, *marks) if 0 <= token < text.vocab_size}
    if not len(marks) == len(OVIS_MARKS) == len(different) - 1:
        raise ModelError(
            f"image_token_id is {config.image_token_id} and visual_indicator_token_ids are {marks}; correct them in "
            f"config.json to {1 + len(OVIS_MARKS)} different ones of the language model's {text.vocab_size} tokens"
        )
    if not len(marks) <= rows < vision.vocab_size:
        raise ModelError(
            f"num_visual_indicator_tokens is {rows}, but {len(marks)} of the {vision.vocab_size} rows of the visual "
            "table are for marks between tiles; correct it in the vision_config of config.json"
        )
    side = siglip.patches_in_a_row(config)
    if vision.hidden_stride < 1 or side % vision.hidden_stride:
        raise ModelError(
            f"{side} x {side} patches of a tile cannot be merged in squares of hidden_stride {vision.hidden_stride}; "
            "correct it, or image_size or patch_size, in the vision_config of config.json"
        )


def _tile_tokens(config: PretrainedConfig) -> int:
    """Return the features of one tile."""
    return (siglip.patches_in_a_row(config) // int(config.vision_config.hidden_stride)) ** 2


def unit_flops(config: PretrainedConfig, *, tower: int, projector: int) -> float:
    """Return the operations of one tile."""
    return siglip.unit_flops(config, _tile_tokens(config), tower=tower, projector=projector)


def random_images(config: PretrainedConfig, units: int) -> Images:
    """Return one image of `units` tiles, or two of one."""
    grids = [[1, 1, 1]] * units if units < 3 else [[units, *_squarest(units - 1)]]
    tokens = [each for _, *grid in grids for each in _tokens(config, *grid)]
    return Images(
        pixels=torch.randn(units, *siglip.unit_shape(config)),
        grids=torch.tensor(grids),
        input_ids=torch.tensor(tokens),
    )


def _squarest(count: int) -> tuple[int, int]:
    rows = max(number for number in range(1, math.isqrt(count) + 1) if not count % number)
    return rows, count // rows


def _tokens(config: PretrainedConfig, rows: int, columns: int) -> list[int]:
    """Return the tokens of an image of a grid of tiles."""
    shown = {number: [token] for number, token in enumerate(config.visual_indicator_token_ids)}
    shown[TILE] = [config.image_token_id] * _tile_tokens(config)
    return [token for each in ovis_layout(rows, columns) for token in shown[each]]


def shrink_vision(settings: dict[str, Any], layers: int) -> None:
    """Leave the tower `layers` layers with at most two heads, tiles of two features in a row, and a short table."""
    vision, text = settings["vision_config"], settings["text_config"]
    siglip.shrink_tower(vision, layers, 2 * vision["hidden_stride"])
    vision["vocab_size"] = min(vision["vocab_size"], max(_SHRUNK_TABLE, vision["num_visual_indicator_tokens"] + 1))
    settings.update(hidden_size=text["hidden_size"], vocab_size=VOCABULARY, image_token_id=VOCABULARY - 1)
    settings["visual_indicator_token_ids"] = list(range(VOCABULARY - 1 - len(OVIS_MARKS), VOCABULARY - 1))


def _load(path: str, config: PretrainedConfig, *, trust_remote_code: bool) -> Any:
    """Implement `Loader` (trials/model/inputs/processor.py)."""
    processor = load_processor(path, config, trust_remote_code=trust_remote_code)
    show_by_token(processor, OVIS_ATOM)
    return processor


class _MarkedTiles(siglip.TileInputs):
    """Implementation of `ImageInputs` (trials/model/inputs/chat_encoder.py).

    A grid is (units, rows, columns): the whole image, and its tiles where there are several. A grid (units, 0, 0)
    stands for units that no token shows.
    """

    def __init__(self, config: PretrainedConfig, processor: Any) -> None:
        """Raise ModelError for a processor whose tiles or tokens differ from the model's."""
        self._config, self._grid = config, processor.grid
        images, features = processor.image_processor, _tile_tokens(config)
        made, taken = processor.image_token_ids, [config.image_token_id, *config.visual_indicator_token_ids]
        if made != taken:
            raise ModelError(
                f"the tokens {OVIS_ATOM}, {', '.join(OVIS_MARKS)} of the tokenizer are {made}, those of the model "
                f"{taken}; correct image_token_id and visual_indicator_token_ids in config.json, or take the model's "
                "own tokenizer"
            )
        if processor.image_seq_length != features:
            raise ModelError(
                f"image_seq_length is {processor.image_seq_length} in processor_config.json but the model makes "
                f"{features} features of a tile; correct it"
            )
        check_tile_numbers(images)
        super().__init__(config, images, (images.size.height, images.size.width))

    def tokens(self, size: tuple[int, int], count: int) -> list[int]:
        """Return the image tokens of the whole image and its tiles, with the marks around them."""
        return _tokens(self._config, *self._grid(size))

    def pixels(
        self,
        images: Sequence[NDArray[np.uint8]],
        resized: Sequence[tuple[int, int] | None] = (),
    ) -> tuple[NDArray[np.float32], Ints]:
        """Return (tiles [tiles, 3, height, width], each whole image before its tiles, grids [images, 3])."""
        made, _ = super().pixels(images, resized)
        layouts = [self._grid(image.shape[:2]) for image in images]
        grids = [[ovis_layout(*layout).count(TILE), *layout] for layout in layouts]
        return made, np.array(grids, dtype=np.int64)

    def blank(self, units: int) -> tuple[list[int], Ints]:
        """Return the grid of units that no token shows."""
        return [], np.array([[units, 0, 0]], dtype=np.int64)

    def pieces(self, units: int, grids: Ints) -> Ints:
        """Return the units of each image."""
        return grids[:, 0]


encoder = functools.partial(chat_encoder, inputs=_MarkedTiles, positions=positions, load=_load)


def vision_modules(model: PreTrainedModel) -> VisionModules:
    """Return the tower in parts, and the table of its words as the projector."""
    tower = model.model.vision_tower
    return VisionModules(
        embedding=(tower.transformer.embeddings,),
        layers=tuple(tower.transformer.encoder.layers),
        behind=(tower.transformer.rms_norm, tower.head_linear, tower.head_norm),
        projector=(model.model.visual_embeddings_table,),
    )


def embed_vision(model: PreTrainedModel, pixels: torch.Tensor, tokens: PackTokens) -> torch.Tensor:
    """Return vision states [tiles, patches, hidden] of pixels [tiles, 3, height, width]."""
    states: torch.Tensor = model.model.vision_tower.transformer.embeddings(pixels.to(model.dtype))
    return states


def image_features(
    model: PreTrainedModel, states: Sequence[torch.Tensor], tokens: PackTokens
) -> Sequence[torch.Tensor]:
    """Return the features [features, hidden] of tiles, and the rows of the table for the marks around them.

    Tiles that no token shows stay in the graph, so that each rank has every gradient.
    """
    vision, table = model.config.vision_config, model.model.visual_embeddings_table
    rows = vision.num_visual_indicator_tokens
    first = vision.vocab_size - rows
    features = table(pad(_shares(model, states[0]), (0, rows)))
    marks = table(torch.arange(first, first + len(OVIS_MARKS), device=features.device)).split(1)
    shown = [features[:0].flatten(0, 1)]
    grids: list[list[int]] = tokens.grids.tolist()
    for of_image, (_, *grid) in zip(features.split([units for units, _, _ in grids]), grids, strict=True):
        left = iter(of_image)
        shown += [next(left) if each == TILE else marks[each] for each in ovis_layout(*grid)]
    return (torch.cat([*shown, marks[0][:0]]),)


def _shares(model: PreTrainedModel, states: torch.Tensor) -> torch.Tensor:
    """Return the shares [tiles, features, rows] of the rows of the table in each feature (`Ovis2VisionModel`)."""
    tower, stride = model.model.vision_tower, model.config.vision_config.hidden_stride
    last = tower.transformer.rms_norm(states)
    side = math.isqrt(last.shape[1]) // stride
    # [tiles, rows, in a square, columns, in a square, hidden]
    squares = last.unflatten(1, (side, stride, side, stride))
    merged = squares.transpose(2, 3).flatten(3).flatten(1, 2)
    mixed = _MIXED[model.config.vision_config.tokenize_function]
    shares: torch.Tensor = mixed(tower.head_norm(tower.head_linear(merged)), dim=-1)
    return shares

"""The samples of an annotation file as inputs of the plain packed loop. Imports nothing from autotune."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer

IGNORED = -100
ROLES = {"human": "user", "gpt": "assistant", "system": "system"}
Batch = dict[str, Any]
"""The inputs of a pack by their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A conversation as tokens, and its images as names."""

    ids: list[int]
    labels: list[int]
    """Shifted: that of a token is the next one where it is a target."""
    images: tuple[Path, ...]
    units: int
    """Tiles, or merged patches."""
    grids: torch.Tensor | None


class Data:
    """All samples of an annotation file, tokenised once. Images are decoded when a pack is used."""

    def __init__(self, model: str, data: str) -> None:
        self.config = AutoConfig.from_pretrained(model)
        self.is_tiled = self.config.model_type == "internvl"
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._images = AutoImageProcessor.from_pretrained(model, backend="pil")
        self._folder = Path(data).parent
        records = [json.loads(line) for line in Path(data).read_text().splitlines()]
        self.samples = [self._sample(record) for record in records]

    def pixels(self, images: Sequence[Path]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the pixels of a sample's images, and the grids of images in their own resolution."""
        pictures = []
        for path in images:
            with Image.open(path) as image:
                pictures.append(image.convert("RGB"))
        options: dict[str, Any] = {}
        if self.is_tiled:
            options = {"crop_to_patches": True, "max_patches": max(1, self._images.max_patches // len(images))}
        found = [self._images([picture], return_tensors="pt", **options) for picture in pictures]
        grids = None if self.is_tiled else torch.cat([each["image_grid_thw"] for each in found])
        return torch.cat([each["pixel_values"] for each in found]), grids

    def blank(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the pixels and grids of an image that stands in a pack without one, so that all ranks train alike."""
        vision = self.config.vision_config
        if self.is_tiled:
            return torch.zeros(1, 3, *vision.image_size), None
        merge = vision.spatial_merge_size
        values = 3 * vision.temporal_patch_size * vision.patch_size**2
        return torch.zeros(merge * merge, values), torch.tensor([[1, merge, merge]])

    def _sample(self, record: dict[str, Any]) -> Sample:
        named = record.get("image", [])
        images = tuple(self._folder / name for name in ([named] if isinstance(named, str) else named))
        grids, counts = None, list[int]()
        if images:
            sizes = []
            for path in images:
                with Image.open(path) as image:
                    sizes.append((image.height, image.width))
            counts, grids = self._counts(sizes)
        ids, labels = self._turns(record["conversations"], counts)
        return Sample(ids=ids, labels=[*labels[1:], IGNORED], images=images, units=sum(counts), grids=grids)

    def _counts(self, sizes: Sequence[tuple[int, int]]) -> tuple[list[int], torch.Tensor | None]:
        """Return the tiles or merged patches of each image of (height, width)."""
        if self.is_tiled:
            options = {"crop_to_patches": True, "max_patches": max(1, self._images.max_patches // len(sizes))}
            return [self._images.get_number_of_image_patches(*size, options) for size in sizes], None
        merge = self.config.vision_config.spatial_merge_size
        grids = [self._images([Image.new("RGB", (width, height))])["image_grid_thw"][0] for height, width in sizes]
        table = torch.tensor([list(map(int, grid)) for grid in grids])
        return [int(grid.prod()) // merge**2 for grid in table], table

    def _turns(self, turns: Sequence[dict[str, str]], counts: Sequence[int]) -> tuple[list[int], list[int]]:
        shown = iter(counts)
        ids, labels = list[int](), list[int]()
        for turn in turns:
            role, text = ROLES[turn["from"]], turn["value"]
            while "<image>" in text:
                text = text.replace("<image>", self._image(next(shown)), 1)
            for piece, is_target in ((f"<|im_start|>{role}\n", False), (f"{text}<|im_end|>\n", role == "assistant")):
                found = self._tokenizer(piece, add_special_tokens=False)["input_ids"]
                ids += found
                labels += found if is_target else [IGNORED] * len(found)
        return ids, labels

    def _image(self, count: int) -> str:
        if self.is_tiled:
            return f"<img>{'<IMG_CONTEXT>' * (self.config.image_seq_length * count)}</img>"
        return f"<|vision_start|>{'<|image_pad|>' * count}<|vision_end|>"


class Packs(Dataset[Batch]):
    """The inputs of packs, in an order."""

    def __init__(
        self, data: Data, positions: Callable[..., Any] | None, packs: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> None:
        """`positions` computes those of a sample with images; pixels have this type."""
        self._data, self._positions_of, self._packs, self._dtype = data, positions, packs, dtype

    def __len__(self) -> int:
        return len(self._packs)

    def __getitem__(self, number: int) -> Batch:
        samples = [self._data.samples[one] for one in self._packs[number]]
        shown = [self._data.pixels(sample.images) for sample in samples if sample.images]
        pixels, grids = zip(*(shown or [self._data.blank()]), strict=True)
        ends = [0, *accumulate(len(sample.ids) for sample in samples)]
        labels = torch.tensor([label for sample in samples for label in sample.labels])
        return {
            "ids": torch.tensor([token for sample in samples for token in sample.ids])[None],
            "labels": labels,
            "targets": (labels != IGNORED).nonzero().squeeze(1),  # here, since a GPU would keep the host waiting
            "positions": torch.cat([self._positions(each) for each in samples], dim=-1),
            "pixels": torch.cat(pixels).to(self._dtype),
            "grids": None if grids[0] is None else torch.cat(grids),
            "shows": bool(shown),
            "lengths": [len(sample.ids) for sample in samples],
            "ends": torch.tensor(ends, dtype=torch.int32),
        }

    def _positions(self, sample: Sample) -> torch.Tensor:
        """Return the positions of one sample, [1, tokens], or [3, 1, tokens] in time, height and width."""
        if self._data.is_tiled:
            return torch.arange(len(sample.ids))[None]
        if sample.grids is None:
            return torch.arange(len(sample.ids)).expand(3, 1, -1)
        ids = torch.tensor(sample.ids)[None]
        kinds = (ids == self._data.config.image_token_id).int()
        assert self._positions_of is not None
        positions: torch.Tensor = self._positions_of(ids, kinds, image_grid_thw=sample.grids)[0]
        return positions

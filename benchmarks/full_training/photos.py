"""Photos of ordinary size with conversations about them, and small models of three families that train on them."""

import json
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from PIL import Image, ImageDraw
from transformers import CLIPImageProcessorPil, Qwen2VLImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from tests.tiny_models import CHATML, TEXT, save
from tests.tiny_models.qwen2_5_vl import CHAT as QWEN_CHAT
from tests.tiny_models.qwen2_5_vl import SPECIAL as QWEN_SPECIAL
from tests.tiny_models.qwen2_5_vl import patch_tokens
from tests.tiny_models.tiles.llava import CHAT as LLAVA_CHAT
from tests.tiny_models.tiles.llava import SPECIAL as LLAVA_SPECIAL

_PHOTOS = 200
_LONG, _SHORT = 640, 480
_WORDS = ("a", "red", "green", "large", "small", "circle", "square", "tree", "house", "stands", "left", "of", "the")
_LANGUAGE = {**TEXT, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6}
_VISION = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4}
_INTERNVL_SPECIAL = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}


def make_data(folder: Path, samples: int) -> Path:
    """Write photos and an annotation file in LLaVA's format; return the file. One sample in ten has no image."""
    (folder / "images").mkdir(parents=True)
    random = Random(0)
    names = [_make_photo(folder / "images", number, random) for number in range(min(_PHOTOS, samples))]
    records = [_record(number, random.choice(names), random) for number in range(samples)]
    file = folder / "train.jsonl"
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return file


def _make_photo(folder: Path, number: int, random: Random) -> str:
    """Write coarse colours, shapes and the noise of a sensor: nine JPEG files to a PNG, a third of them upright."""
    width, height = (_SHORT, _LONG) if random.random() < 1 / 3 else (_LONG, _SHORT)
    drawn = np.random.default_rng(number)
    coarse = Image.fromarray(drawn.integers(0, 256, (8, 10, 3), dtype=np.uint8))
    image = coarse.resize((width, height), Image.Resampling.BICUBIC)
    canvas = ImageDraw.Draw(image)
    for _ in range(random.randint(2, 9)):
        left, top, size = random.randrange(width), random.randrange(height), random.randint(20, 200)
        color = (random.randrange(256), random.randrange(256), random.randrange(256))
        draw = random.choice((canvas.ellipse, canvas.rectangle))
        draw((left, top, left + size, top + size), fill=color)
    noisy = np.asarray(image, dtype=np.float32) + drawn.normal(0, 4, (height, width, 3))
    name = f"{number:04}.{'png' if number % 10 == 9 else 'jpg'}"
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(folder / name, quality=88, compress_level=1)
    return f"images/{name}"


def _record(number: int, image: str, random: Random) -> Mapping[str, Any]:
    shown = random.random() < 0.9
    answer = " ".join(random.choices(_WORDS, k=round(min(random.lognormvariate(3.0, 0.9), 150)) + 1))
    turns = [
        {"from": "human", "value": f"{'<image>' * shown}{chr(10) * shown}What is in the picture?"},
        {"from": "gpt", "value": f"{answer}."},
    ]
    return {"id": number} | ({"image": image} if shown else {}) | {"conversations": turns}


# --- models: as people use them, with fewer and narrower layers ---


def internvl(folder: Path) -> None:
    """Write a model of five tiles of 56 pixels to a photo, 16 tokens each: the example with half its layers."""
    images = GotOcr2ImageProcessorPil(
        crop_to_patches=True, min_patches=1, max_patches=4, size={"height": 56, "width": 56}
    )
    vision = {**_VISION, "num_hidden_layers": 6, "image_size": [56, 56], "patch_size": [7, 7]}

    def config(ids: Mapping[str, int]) -> Mapping[str, Any]:
        return {
            "model_type": "internvl",
            "vision_config": vision,
            "text_config": {**_LANGUAGE, "model_type": "qwen2", "num_hidden_layers": 4, "vocab_size": len(ids)},
            "image_token_id": ids["<IMG_CONTEXT>"],
            "image_seq_length": 16,
            "downsample_ratio": 0.5,
            "tie_word_embeddings": False,
        }

    save(folder, config=config, images=images, special=_INTERNVL_SPECIAL, chat=CHATML.replace("SHOWN", "<IMG_CONTEXT>"))


def qwen2_5_vl(folder: Path) -> None:
    """Write a model of at most 48 merged patches of 28 x 28 pixels to a photo, in windows of 4 x 4."""
    images = Qwen2VLImageProcessorPil(
        patch_size=14, merge_size=2, size={"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 48}
    )
    vision = {
        "depth": 6, "hidden_size": 128, "num_heads": 4, "intermediate_size": 384, "patch_size": 14, "window_size": 112,
        "out_hidden_size": _LANGUAGE["hidden_size"], "fullatt_block_indexes": [2, 5],
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": [8, 8, 8]}

    def config(ids: Mapping[str, int]) -> Mapping[str, Any]:
        text = {**_LANGUAGE, "vocab_size": len(ids), "rope_parameters": rope}
        return {"model_type": "qwen2_5_vl", "vision_config": vision, "text_config": text, **patch_tokens(ids)}

    save(folder, config=config, images=images, special=QWEN_SPECIAL, chat=QWEN_CHAT)


def llava(folder: Path) -> None:
    """Return the middle square of a photo as 64 patches of a CLIP tower, whose last layer is not used."""
    images = CLIPImageProcessorPil(size={"shortest_edge": 112}, crop_size={"height": 112, "width": 112})
    settings = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    vision = {
        **_VISION, "model_type": "clip_vision_model", "num_hidden_layers": 8, "image_size": 112, "patch_size": 14,
        "projection_dim": 64,
    }  # fmt: skip

    def config(ids: Mapping[str, int]) -> Mapping[str, Any]:
        text = {**_LANGUAGE, "model_type": "llama", "vocab_size": len(ids)}
        image = ids["<image>"]
        return {"model_type": "llava", "vision_config": vision, "text_config": text, "image_token_index": image}

    save(folder, config=config, images=images, special=LLAVA_SPECIAL, chat=LLAVA_CHAT, settings=settings)


FAMILIES = {"internvl": internvl, "qwen2_5_vl": qwen2_5_vl, "llava": llava}

"""Models of the sizes of public ones, with generated data: InternVL3-2B and Qwen2.5-VL-3B."""

import json
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from PIL import Image

from benchmarks.cases import pages
from benchmarks.devices.models import Model, make_example, rewrite, with_model

_ENLARGED = 8
"""Size of a picture over that of the example's, whose tiles are 56 pixels wide."""
_PATCH = 28
_MOST_PATCHES = 1280


def internvl3_2b(folder: Path, samples: int) -> tuple[Path, Path]:
    """Write InternVL3-2B's configuration and the example's samples with large pictures; return both paths.

    Sizes are those of OpenGVLab/InternVL3-2B-hf: InternViT-300M with Qwen2.5-1.5B, and tiles of 448 pixels.
    """
    example = make_example(folder, samples)
    sizes = Model(vision=(24, 1024, 4096, 16), language=(28, 1536, 8960, 12), kv_heads=2, vocabulary=151_674)
    model = with_model(example, sizes, "internvl3-2b")
    rewrite(model / "preprocessor_config.json", lambda settings: settings.update(max_patches=12))
    data = example / "data" / "train.jsonl"
    records = [json.loads(line) for line in data.read_text().splitlines()]
    with ProcessPoolExecutor() as pool:
        list(pool.map(_enlarge, sorted((data.parent / "images").glob("*.png")), chunksize=16))
    for record in records:
        for name in ("width", "height"):
            if name in record:
                record[name] *= _ENLARGED
            if f"{name}_list" in record:
                record[f"{name}_list"] = [_ENLARGED * each for each in record[f"{name}_list"]]
    data.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return model, data


def _enlarge(path: Path) -> None:
    with Image.open(path) as image:
        image.resize((_ENLARGED * image.width, _ENLARGED * image.height)).save(path, compress_level=1)


def qwen2_5_vl_3b(folder: Path, samples: int) -> tuple[Path, Path]:
    """Write Qwen2.5-VL-3B's configuration, and pages of up to 1,280 merged patches; return both paths.

    Sizes are those of Qwen/Qwen2.5-VL-3B-Instruct.
    """
    vision = {
        "depth": 32, "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420, "out_hidden_size": 2048,
        "fullatt_block_indexes": [7, 15, 23, 31],
    }  # fmt: skip
    text = {
        "hidden_size": 2048, "intermediate_size": 11_008, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True, "max_position_embeddings": 32_768,
    }  # fmt: skip
    pages.save_model(folder / "qwen2.5-vl-3b", vision, text, section=[16, 24, 24], most_patches=_MOST_PATCHES)
    return folder / "qwen2.5-vl-3b", pages.make_data(folder / "data", samples, patches=350)


def small_pages(folder: Path, samples: int) -> tuple[Path, Path]:
    """Write a small Qwen2.5-VL and its pages; return both paths."""
    pages.make_job(folder, samples)
    return folder / "model", folder / "data" / "train.jsonl"

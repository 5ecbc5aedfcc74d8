"""Limits of images as the files of a model folder state them, by which a trainer has to prepare images alike."""

import json
from pathlib import Path
from typing import Any

from trials.model.hub import folder_of

_FILES = ("preprocessor_config.json", "processor_config.json")


def image_limits(model: str) -> dict[str, int]:
    """Return `min_pixels`, `max_pixels` and `max_tiles` of the model's image processor, those that it states.

    Pixels are of models that take images in their own resolution, tiles of those that cut them.
    """
    found: dict[str, int] = {}
    for name in _FILES:
        found |= _limits(_document(Path(folder_of(model)) / name))
    return found


def _document(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_bytes())
    except (OSError, ValueError):  # absent; a model that cannot be read is refused elsewhere
        return {}
    inner = document.get("image_processor", {}) if isinstance(document, dict) else {}
    return {**document, **inner} if isinstance(inner, dict) and isinstance(document, dict) else {}


def _limits(document: dict[str, Any]) -> dict[str, int]:
    size = document.get("size")
    edges = size if isinstance(size, dict) else {}
    # Of Qwen's processors the edges are numbers of pixels.
    is_area = "Qwen" in str(document.get("image_processor_type", ""))
    values = {
        "min_pixels": document.get("min_pixels") or (edges.get("shortest_edge") if is_area else None),
        "max_pixels": document.get("max_pixels") or (edges.get("longest_edge") if is_area else None),
        "max_tiles": document.get("max_patches"),
    }
    return {name: value for name, value in values.items() if isinstance(value, int)}

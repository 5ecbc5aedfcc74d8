"""Qwen-VL's registry of data sets, as JSON: `{"name": {"annotation_path": ..., "data_path": ...}}`.

Source: qwen-vl-finetune/README.md of QwenLM/Qwen3-VL, where it is a Python dictionary. No Python is run here.
"""

from typing import Any

from trials.data.mixtures import Entry, Listing

FORMAT = "qwen"


def listed(document: dict[str, Any]) -> dict[str, Any] | None:
    """Return a document with an entry that names an `annotation_path`."""
    found = any(isinstance(entry, dict) and "annotation_path" in entry for entry in document.values())
    return document if found else None


def entry(listing: Listing) -> Entry:
    """Return the entry; `data_path` is the folder of the images."""
    return listing.entry("annotation_path", "data_path")

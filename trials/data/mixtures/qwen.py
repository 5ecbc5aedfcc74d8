"""Qwen-VL's registry of data sets, as JSON: `{"name": {"annotation_path": ..., "data_path": ...}}`.

Source: qwen-vl-finetune/README.md of QwenLM/Qwen3-VL, where it is a Python dictionary. No Python is run here.
"""

from dataclasses import replace
from typing import Any

from trials.data.mixtures import Entry, Listing
from trials.errors import DataError

FORMAT = "qwen"
AROUND = ()
KEYS = ("annotation_path", "data_path", "sampling_rate")
IGNORED: dict[str, str] = {}


def listed(document: dict[str, Any]) -> dict[str, Any] | None:
    """Return a document with an entry that names an `annotation_path`."""
    found = any(isinstance(entry, dict) and "annotation_path" in entry for entry in document.values())
    return document if found else None


def entry(listing: Listing) -> Entry:
    """Return the entry; `data_path` is the folder of the images, `sampling_rate` the share of its samples."""
    found = listing.entry("annotation_path", "data_path")
    rate = listing.values.get("sampling_rate")
    if rate is None or (rate == 1 and not isinstance(rate, bool)):
        return found
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < 1:
        raise DataError(
            f"{listing.where}: `sampling_rate` is {repr(rate)[:40]}; write a share above 0 and at most 1, and "
            "`repeat_time` for more"
        )
    return replace(found, sampling=f"random:{f'{100 * rate:.6f}'.rstrip('0').rstrip('.')}%")

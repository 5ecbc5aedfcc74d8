"""InternVL's meta file: `{"name": {"root": ..., "annotation": ..., "repeat_time": ...}}`.

Source: internvl.readthedocs.io, "Chat Data Format", and InternVL's training code.
"""

from typing import Any

from trials.data.mixtures import Entry, Listing

FORMAT = "internvl"
AROUND = ()
KEYS = ("annotation", "root")
IGNORED = {
    "max_dynamic_patch": "the model's own processor sets the tiles",
    "data_augment": "images are trained on as they are",
    "token_lengths": "the lengths are measured with the model",
}


def listed(document: dict[str, Any]) -> dict[str, Any] | None:
    """Return a document with an entry that names an `annotation`."""
    found = any(isinstance(entry, dict) and "annotation" in entry for entry in document.values())
    return document if found else None


def entry(listing: Listing) -> Entry:
    """Return the entry; `root` is the folder of the images."""
    return listing.entry("annotation", "root")

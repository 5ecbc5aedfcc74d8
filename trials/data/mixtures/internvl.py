"""InternVL's meta file: `{"name": {"root": ..., "annotation": ..., "repeat_time": ...}}`.

Source: internvl.readthedocs.io, "Chat Data Format".
"""

import logging
from functools import cache
from pathlib import Path
from typing import Any

from trials.data.mixtures import Entry, Listing

FORMAT = "internvl"

logger = logging.getLogger(__name__)


def listed(document: dict[str, Any]) -> dict[str, Any] | None:
    """Return a document with an entry that names an `annotation`."""
    found = any(isinstance(entry, dict) and "annotation" in entry for entry in document.values())
    return document if found else None


def entry(listing: Listing) -> Entry:
    """Return the entry; `root` is the folder of the images."""
    if "max_dynamic_patch" in listing.values:
        _warn_of_tiles(listing.file)
    return listing.entry("annotation", "root")


@cache
def _warn_of_tiles(file: Path) -> None:
    """Warn once of a file, which commands read several times and whose entries may all say it."""
    logger.warning("%s: max_dynamic_patch is ignored; the model's own processor sets the tiles", file)

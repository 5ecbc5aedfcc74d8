"""LLaVA's YAML mixture: `datasets`, a list with `json_path` and `sampling_strategy`.

Source: LLaVA-NeXT's training scripts. An entry has no name of its own, so its `json_path` is one.
"""

from dataclasses import replace
from typing import Any

from trials.data.mixtures import Entry, Listing
from trials.errors import DataError

FORMAT = "llava"
AROUND = ("datasets",)
KEYS = ("json_path", "sampling_strategy")
IGNORED: dict[str, str] = {}


def listed(document: dict[str, Any]) -> dict[str, Any] | None:
    """Return the entries of a document whose `datasets` is a list with a `json_path`."""
    match document:
        case {"datasets": [*entries]} if any(isinstance(entry, dict) and "json_path" in entry for entry in entries):
            named: dict[str, Any] = {}
            for number, entry in enumerate(entries, 1):
                name = str(entry.get("json_path", number)) if isinstance(entry, dict) else str(number)
                if name in named:
                    raise DataError(f"{name} is listed twice in `datasets`; keep one, with the samples of both")
                named[name] = entry
            return named
    return None


def entry(listing: Listing) -> Entry:
    """Return the entry; a sampling such as `first:25%` is one of `trials.sampling`."""
    sampling = str(listing.values.get("sampling_strategy", "all"))
    return replace(listing.entry("json_path"), sampling=sampling)

"""OmniBal's meta file of length caches: `{"name": {"token_lengths": ...}}`."""

from typing import Any

from trials.data.mixtures import Entry, Listing

FORMAT = "lengths"
AROUND = ()
KEYS = ("token_lengths",)
IGNORED = {"root": "lengths alone need no images"}


def listed(document: dict[str, Any]) -> dict[str, Any] | None:
    """Return a document with an entry that names `token_lengths` and no annotation file."""
    entries = [entry for entry in document.values() if isinstance(entry, dict)]
    found = any("token_lengths" in entry for entry in entries) and not any("annotation" in entry for entry in entries)
    return document if found else None


def entry(listing: Listing) -> Entry:
    return listing.entry("token_lengths")

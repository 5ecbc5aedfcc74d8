"""LLaMA-Factory's dataset_info.json: files with the names of their columns and of the sides of a conversation.

Source: LLaMA-Factory's data/README.md and its parser.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from trials.data.mixtures import Entry, Listing
from trials.data.records.columns import ALPACA, SHAREGPT, UNSUPPORTED, Columns
from trials.errors import DataError

FORMAT = "llama-factory"
AROUND = ()
KEYS = ("file_name", "formatting", "columns", "tags", "num_samples", "ranking", "split")
IGNORED: dict[str, str] = {}

_ELSEWHERE = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
_PREFERENCES = ("chosen", "rejected", "kto_tag")
_SHARED = ("system", "tools", "images", "videos", "audios", *_PREFERENCES)
_COLUMNS = {
    "alpaca": ("prompt", "query", "response", "history", *_SHARED),
    "sharegpt": ("messages", *_SHARED),
    "openai": ("messages", *_SHARED),
}
_TAGS = tuple(f"{name}_tag" for name in ("role", "content", "user", "assistant", "observation", "function", "system"))
"""By the formatting, the names that an entry can give columns; and those of the tags of conversations."""


def listed(document: dict[str, Any]) -> dict[str, Any] | None:
    """Return a document with an entry that names its file, or a place on a hub."""
    keys = {"file_name", *_ELSEWHERE}
    return document if any(isinstance(entry, dict) and keys & entry.keys() for entry in document.values()) else None


def entry(listing: Listing) -> Entry:
    """Return the entry.

    Raise DataError for data that is not in a local file, is made by a script, or is not for supervised fine-tuning.
    """
    values = listing.values
    for key in _ELSEWHERE:
        if key in values:
            raise DataError(
                f"{listing.where}: `{key}` is not fetched or run; download the data and write `file_name`, or list the "
                "entries to use in `names` of the source"
            )
    formatting = _formatting(listing)
    columns = _section(listing, "columns", _COLUMNS[formatting])
    tags = _section(listing, "tags", () if formatting == "alpaca" else _TAGS)
    if values.get("split") not in (None, "train"):
        raise DataError(
            f"{listing.where}: `split` is {repr(values['split'])[:40]}, but a file is one split, which is trained on; "
            "remove it, or leave the entry out by `names` of the source"
        )
    if values.get("ranking") or set(_PREFERENCES) & columns.keys():
        raise DataError(
            f"{listing.where}: preference data is not supported; list other entries in `names` of the source"
        )
    count = values.get("num_samples")
    return replace(
        listing.entry("file_name"),
        sampling="all" if count is None else f"exactly:{count}",
        columns=_columns(listing, columns, tags),
    )


def _formatting(listing: Listing) -> str:
    value = listing.values.get("formatting")
    found = "alpaca" if value is None else value
    if not isinstance(found, str) or found not in _COLUMNS:
        raise DataError(f"{listing.where}: `formatting` is {repr(found)[:40]}; write alpaca, sharegpt or openai")
    return found


def _section(listing: Listing, key: str, known: Collection[str]) -> dict[str, str]:
    """Return an object of texts, without null entries. Raise DataError for any other value, and for an unknown name."""
    values = listing.values.get(key)
    values = {} if values is None else values
    if not isinstance(values, dict) or not all(value is None or isinstance(value, str) for value in values.values()):
        raise DataError(f"{listing.where}: `{key}` is {repr(values)[:80]}; write an object of names")
    found = {name: value for name, value in values.items() if value is not None}
    if other := next((name for name in found if name not in known), None):
        raise DataError(
            f"{listing.where}: {repr(other)[:40]} in `{key}` is not known with the formatting {_formatting(listing)}; "
            f"write {', '.join(known) or 'none'}"
        )
    return found


def _columns(listing: Listing, columns: dict[str, str], tags: dict[str, str]) -> Columns:
    """Return the columns: LLaMA-Factory's defaults without `columns`; with it, what it does not name is not there."""
    kept = tuple(key for key in UNSUPPORTED if key not in columns.values())
    named = tuple(columns[key] for key in ("audios", "tools") if key in columns)
    images, videos = ((columns[key],) if key in columns else () for key in ("images", "videos"))
    unnamed = tuple(key for key in ("image", "images", "video", "videos") if key not in columns.values())
    shared: dict[str, Any] = {
        "images": images,
        "videos": videos,
        "system": columns.get("system"),
        "unsupported": (*kept, *named, *unnamed),
    }
    if _formatting(listing) == "alpaca":
        query = columns.get("query") if columns else "input"
        questions = (columns.get("prompt", "instruction"), *([query] if query else []))
        answer = columns.get("response", "output")
        return replace(ALPACA, questions=questions, answer=answer, history=columns.get("history"), **shared)
    return replace(
        SHAREGPT,
        turns=columns.get("messages", SHAREGPT.turns),
        role=tags.get("role_tag", SHAREGPT.role),
        text=tags.get("content_tag", SHAREGPT.text),
        users=(tags.get("user_tag", "human"), tags.get("observation_tag", "observation")),
        assistants=(tags.get("assistant_tag", "gpt"), tags.get("function_tag", "function_call")),
        systems=(tags.get("system_tag", "system"),),
        **shared,
    )

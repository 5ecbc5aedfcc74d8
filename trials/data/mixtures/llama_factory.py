"""LLaMA-Factory's dataset_info.json: files with the names of their columns and of the sides of a conversation.

Source: LLaMA-Factory's data/README.md and its parser.
"""

from dataclasses import replace
from typing import Any

from trials.data.mixtures import Entry, Listing
from trials.data.records.columns import ALPACA, SHAREGPT, UNSUPPORTED, Columns
from trials.errors import DataError

FORMAT = "llama-factory"

_ELSEWHERE = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")


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
    columns, tags = _section(listing, "columns"), _section(listing, "tags")
    if values.get("ranking") or {"chosen", "rejected", "kto_tag"} & columns.keys():
        raise DataError(
            f"{listing.where}: preference data is not supported; list other entries in `names` of the source"
        )
    count = values.get("num_samples")
    return replace(
        listing.entry("file_name"),
        sampling="all" if count is None else f"random:{count}",
        columns=_columns(listing, columns, tags),
    )


def _section(listing: Listing, key: str) -> dict[str, str]:
    """Return an object of texts, without null entries. Raise DataError for any other value."""
    values = listing.values.get(key, {})
    if not isinstance(values, dict) or not all(value is None or isinstance(value, str) for value in values.values()):
        raise DataError(f"{listing.where}: `{key}` is {repr(values)[:80]}; write an object of names")
    return {name: value for name, value in values.items() if value is not None}


def _columns(listing: Listing, columns: dict[str, str], tags: dict[str, str]) -> Columns:
    """Return the columns: LLaMA-Factory's defaults without `columns`; with it, what it does not name is not there."""
    formatting = listing.values.get("formatting", "alpaca")
    kept = tuple(key for key in UNSUPPORTED if key not in columns.values())
    named = tuple(columns[key] for key in ("audios", "tools") if key in columns)
    images, videos = ((columns[key],) if key in columns else () for key in ("images", "videos"))
    unnamed = tuple(key for key in ("video", "videos") if key not in columns.values())
    shared: dict[str, Any] = {
        "images": images,
        "videos": videos,
        "system": columns.get("system"),
        "unsupported": (*kept, *named, *unnamed),
    }
    if formatting == "alpaca":
        query = columns.get("query") if columns else "input"
        questions = (columns.get("prompt", "instruction"), *([query] if query else []))
        answer = columns.get("response", "output")
        return replace(ALPACA, questions=questions, answer=answer, history=columns.get("history"), **shared)
    if formatting not in ("sharegpt", "openai"):
        raise DataError(f"{listing.where}: `formatting` is {formatting!r}; write alpaca, sharegpt or openai")
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

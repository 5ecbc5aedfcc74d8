"""Models that were downloaded from the Hugging Face hub to its cache on this machine."""

import re

import huggingface_hub

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_SNAPSHOT = re.compile(r"(?:.*/)?models--([^/]+)/snapshots/[^/]+/?")


def folder_of(model: str) -> str:
    """Return the folder in the cache of a hub id whose weights are there; other texts unchanged.

    Only such a folder is as good as any other: of other ids, the cache may lack what is still to be read.
    """
    try:
        found = (huggingface_hub.try_to_load_from_cache(model, name) for name in _WEIGHTS)
        return next((path.rpartition("/")[0] for path in found if isinstance(path, str)), model)
    except ValueError:  # no id can be like this
        return model


def may_be_id(model: str) -> bool:
    """Return whether a text has the form of a hub id with the name of its owner."""
    try:
        huggingface_hub.try_to_load_from_cache(model, _WEIGHTS[0])
    except ValueError:
        return False
    return "/" in model


def published_name(model: str) -> str:
    """Return the hub id of a folder in the cache, which is named by a commit; other texts unchanged."""
    found = _SNAPSHOT.fullmatch(model)
    return found[1].replace("--", "/") if found else model


def remedy(model: str) -> str:
    """Return what to do when a model is not on this machine, for a message."""
    download = f", as by `hf download {model}`" if may_be_id(model) else ""
    return f"correct model.path, or copy the model to this machine{download}"

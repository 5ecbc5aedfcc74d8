"""Models that were downloaded from the Hugging Face hub to its cache on this machine."""

import logging
import re
import ssl
from collections.abc import Sequence
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import huggingface_hub

_CONFIG = "config.json"
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_SNAPSHOT = re.compile(r"(?:.*/)?models--([^/]+)/snapshots/([^/]+)/?")
# A choice: nodes of a cluster often have no way to the hub, and should not wait long for it.
_SECONDS = 5.0
"""Timeout for the hub's first answer; its own client tries six times, for up to minutes."""
_log = logging.getLogger(__name__)


def folder_of(model: str) -> str:
    """Return the folder in the cache of a hub id whose weights are there; other texts unchanged.

    Only such a folder is as good as any other: of other ids, the cache may lack what is still to be read. Where the hub
    does not answer, nothing more can be read, so that the folder is enough if it has a configuration; a warning says
    so. The hub's client would say so for each file, and try for minutes.
    """
    try:
        if (weights := _cached(model, *_WEIGHTS)) is not None:
            return weights
        found = _cached(model, _CONFIG)
    except ValueError:  # no id can be like this
        return model
    server = huggingface_hub.constants.ENDPOINT
    if found is None or huggingface_hub.is_offline_mode() or answers(server):
        return model
    _log.warning("%s does not answer, so model %s is as the cache has it, in %s", server, model, found)
    return found


def local_folder(model: str, patterns: Sequence[str]) -> Path:
    """Return the folder of a model: of a hub id the one in the cache, with all files whose names match `patterns`."""
    if Path(model).is_dir():
        return Path(model)
    return Path(huggingface_hub.snapshot_download(model, allow_patterns=list(patterns)))


def _cached(model: str, *names: str) -> str | None:
    """Return the folder in the cache that has one of the files."""
    found = (huggingface_hub.try_to_load_from_cache(model, name) for name in names)
    return next((path.rpartition("/")[0] for path in found if isinstance(path, str)), None)


def answers(server: str) -> bool:
    """Return whether a server answers, even with an error status, which the hub's own client then explains."""
    try:
        urlopen(Request(server, method="HEAD"), timeout=_SECONDS).close()  # noqa: S310 - the hub that the user chose
    except HTTPError:
        return True
    except URLError as error:
        return isinstance(error.reason, ssl.SSLError)
    except OSError:
        return False
    return True


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


def published_commit(model: str) -> str | None:
    """Return the commit of a folder in the cache; None for other texts."""
    found = _SNAPSHOT.fullmatch(model)
    return found[2] if found else None


def remedy(model: str) -> str:
    """Return what to do when a model is not on this machine, for a message."""
    download = f", as by `hf download {model}`" if may_be_id(model) else ""
    return f"correct model.path, or copy the model to this machine{download}"

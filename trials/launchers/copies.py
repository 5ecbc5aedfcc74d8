"""Comparison of the copies of a model's folder that several nodes have."""

import hashlib
from functools import cache
from pathlib import Path

from trials.errors import ModelError
from trials.job import ModelSection
from trials.model.weights import weights_fingerprint

# A choice: the largest published tokenizers have about 35 MB.
_MOST_BYTES = 64 << 20
"""Of a file that is read whole: configurations, tokenizers, templates and code, but no weights."""


def check_copy(settings: ModelSection, digest: str) -> None:
    """Raise ModelError when the model's folder has another digest here than on the agent's node."""
    if copy_digest(settings) != digest:
        raise ModelError(
            f"model.path {settings.path} holds other files here than on the node of the agent; copy the folder from "
            "there"
        )


@cache  # until the process ends, since samples of large weights take seconds to read
def copy_digest(settings: ModelSection) -> str:
    """Return a digest of the model's folder: its small files, and samples of the weights where a job reads them."""
    folder, found = Path(settings.path), hashlib.sha256()
    if folder.is_dir():
        for file in sorted(each for each in folder.iterdir() if each.is_file() and each.suffix != ".safetensors"):
            if file.stat().st_size <= _MOST_BYTES:
                found.update(f"{file.name}\n".encode())
                found.update(file.read_bytes())
        if settings.weights == "pretrained":
            found.update(weights_fingerprint(folder).encode())
    return found.hexdigest()[:16]

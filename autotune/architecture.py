"""The check of a model's architecture, done once for each architecture and version of the libraries."""

import hashlib
import json
from contextlib import suppress
from pathlib import Path

import torch
import transformers

from autotune.events import Listener, Phase, PhaseBegan
from trials import model
from trials.job import ModelSection
from trials.model.plain import parity
from trials.whole_file import whole_file


def check_architecture(settings: ModelSection, config_digest: str, folder: Path, listener: Listener) -> None:
    """Compare the model's stages with transformers' own model, unless `folder` says that they were found equal.

    A model with code of its own is compared each time: that code may have changed. Raise what `check_parity` raises.
    """
    if settings.trust_remote_code:
        _begin(listener, "a model with its own code is compared each time")
        parity.check_parity(settings)
        return
    code = hashlib.sha256()
    for file in model_code():
        code.update(file.read_bytes())
    facts = [config_digest, torch.__version__, transformers.__version__, code.hexdigest()]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
    passed = folder / key
    if _text(passed) == key:
        return
    _begin(listener, "this is done once for each architecture")
    parity.check_parity(settings)
    with suppress(OSError):  # the next command compares again
        folder.mkdir(parents=True, exist_ok=True)
        with whole_file(passed) as stream:
            stream.write(key.encode())


def model_code() -> list[Path]:
    """Return the files of this project whose change requires another comparison."""
    return sorted(Path(model.__file__).parent.rglob("*.py"))


def _begin(listener: Listener, when: str) -> None:
    text = f"Comparing a small copy of the model with transformers; {when}"
    listener(PhaseBegan(phase=Phase.PROBE, text=text))


def _text(file: Path) -> str | None:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return None

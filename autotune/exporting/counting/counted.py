"""Tokens of samples by a trainer's own package, else by the model's own processor. Packages are never imported here."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from autotune.errors import ExportError
from trials.data.records.sample import Sample
from trials.job import ModelSection
from trials.model.hub import folder_of
from trials.model.plain.plain_inputs import PlainInputs
from trials.model.refusals.refusal import reason
from trials.model.skeleton import load_config

_FOLDER = Path(__file__).parent
# A choice: imports of a trainer take up to a minute, and each image some tenths of a second.
_SECONDS = 600.0
_SHOWN_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """How many tokens a trainer makes of some samples."""

    by: str
    """What counted, for messages."""
    tokens: tuple[int | str | None, ...]
    """Of each sample: its tokens, or why it is not taken; None where it was not counted."""
    why_not: str | None = None
    """Why the trainer's own code did not count; None where it did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A trainer as a package of the package index."""

    name: str
    """As pip knows it."""
    title: str
    script: str
    """Module of this folder that counts where the package is installed."""


def count_by_package(
    package: Package,
    samples: Sequence[Sample],
    model: ModelSection,
    request: Mapping[str, Any],
    python: Path | None = None,
) -> Counted:
    """Count samples with a trainer's package; where it is not installed here, with the model's own processor.

    `request` is what the script needs besides the model, with the samples as `records` of the trainer. `python` is that
    of an environment with the package. Raise ExportError where the package cannot count there.
    """
    if python is None:
        try:
            version(package.name)
        except PackageNotFoundError:
            return count_by_processor(samples, model, why_not=f"{package.name} is not installed here")
    found = _counted(package, {**request, "package": package.name, "model": folder_of(model.path)}, python)
    if isinstance(found, Counted):
        return found
    if python is not None:
        raise ExportError(
            f"--trainer-python {python}: {package.name} cannot count tokens there ({found}); install it there, or "
            "leave the option out"
        )
    return count_by_processor(samples, model, why_not=f"{package.name} fails here: {found}")


def _counted(package: Package, request: Mapping[str, Any], python: Path | None) -> Counted | str:
    """Return what the package counts in a process of its own, or why it cannot."""
    with TemporaryDirectory() as name:
        asked, answer = Path(name) / "request.json", Path(name) / "answer.json"
        asked.write_text(json.dumps(request), encoding="utf-8")
        script = _FOLDER / f"{package.script}.py"
        command = (python.absolute() if python else sys.executable, _FOLDER / "process.py", script, asked, answer)
        # The folder of the script has the trainers' names, and devices are for trainings.
        environment = {**os.environ, "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": ""}
        try:
            done = subprocess.run(
                command, env=environment, cwd=name, capture_output=True, text=True, timeout=_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return f"no answer in {_SECONDS:.0f} s"
        except OSError as error:
            return error.strerror or str(error)
        if done.returncode:
            return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:_SHOWN_CHARACTERS]
        found = json.loads(answer.read_text(encoding="utf-8"))
    return Counted(by=f"{package.title} {found['version']}", tokens=tuple(found["tokens"]))


def count_by_processor(samples: Sequence[Sample], model: ModelSection, *, why_not: str) -> Counted:
    """Count samples with the model's own processor and chat template. Those with videos are not counted."""
    try:
        config = load_config(model.path, trust_remote_code=model.trust_remote_code)
        plain = PlainInputs(model.path, config, trust_remote_code=model.trust_remote_code)
    except Exception as error:  # a model's own code raises what it likes
        return Counted(by="", tokens=(None,) * len(samples), why_not=f"{why_not}, and {reason(error)}")
    tokens = tuple(_by_processor(plain, sample) for sample in samples)
    return Counted(by="the model's own processor", tokens=tokens, why_not=why_not)


def _by_processor(plain: PlainInputs, sample: Sample) -> int | None:
    if sample.videos:
        return None
    try:
        return len(plain.token_ids(sample))
    except Exception:  # templates and processors raise what they like
        return None

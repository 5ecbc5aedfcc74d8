"""Commands that repeat a study and use its result."""

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import yaml

from autotune.report.source import StudySource
from autotune.search.study_settings import TRAINER, training_of
from trials import wire

_NOT_OF_THE_JOB = (
    *("fresh", "model", "training", "current_plan", "queue", "parallel", "workers", "trial_timeout", TRAINER),
)
"""Settings that a study adds, or that do not change its result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyableText:
    """Text to copy, and what it is for."""

    title: str
    text: str


def reproduction(source: StudySource, database: str | None) -> Iterator[CopyableText]:
    """Yield commands and files; `database` is the URL that the commands have to name, if any."""
    at = "" if database is None else f" --db {shlex.quote(database)}"
    study = shlex.quote(source.study.id[:12])
    again = (f"studies list {study}", f"report {study}", f"db export --study {study} --out study.jsonl")
    yield CopyableText(title="Look at the study again", text=_commands(again, at))
    settings = {name: value for name, value in source.study.settings.items() if name not in _NOT_OF_THE_JOB}
    if settings:
        training = training_of(source.study.settings).model_dump(exclude_unset=True)
        document = {"search": settings, "training": {"seed": source.study.seed} | training}
        yield CopyableText(title="Settings of the search, for the job file", text=_yaml(document))
    trainer = source.study.settings.get(TRAINER)
    anew = f"tune job.yaml --fresh{'' if trainer is None else f' --for {trainer}'}"
    yield CopyableText(title="Search again, and measure everything anew", text=_commands((anew,), at))
    if source.best is not None:
        launch = f"launch job.yaml --plan {source.best.id}"
        use = (f"show {source.best.id}", f"{launch} --dry-run", launch)
        yield CopyableText(title="Use the plan", text=_commands(use, at))
        title = "The plan as a file, for `autotune predict job.yaml --plan plan.yaml`"
        yield CopyableText(title=title, text=_yaml(wire.to_document(source.best)))


def _commands(commands: Iterable[str], at: str) -> str:
    return "\n".join(f"autotune {command}{at}" for command in commands)


def _yaml(document: Mapping[str, object]) -> str:
    # Through JSON, so that the values are plain.
    return yaml.safe_dump(json.loads(json.dumps(document)), sort_keys=False, allow_unicode=False).rstrip()

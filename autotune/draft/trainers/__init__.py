"""Trainers whose configurations become job files. One module each, found by name."""

from collections.abc import Mapping, Set
from typing import Any, Protocol

from autotune.draft.arguments import Arguments
from trials import plugins


class Trainer(Protocol):
    """What a module of this package offers."""

    TITLE: str
    """Name of the trainer, for messages."""
    KNOWN: Set[str]
    """Its own names of the arguments that become settings of a job; `autotune.draft.leftovers` has others."""

    def recognises(self, arguments: Arguments) -> bool:
        """Return whether these are arguments of this trainer."""

    def settings(self, arguments: Arguments) -> dict[str, Any]:
        """Return the value of every argument, with the trainer's defaults for those that are not given.

        Names are those of transformers' `TrainingArguments`, those in `autotune.draft.settings` and
        `autotune.draft.present` where it has none, and the trainer's own for all others. `auto` stands for what the
        configuration leaves to something else, and `remarks` are notes on what the trainer does otherwise than a job.
        Raise JobError for what is not supervised fine-tuning.
        """


TRAINERS: plugins.Plugins[Trainer] = plugins.Plugins(__name__)


def renamed(arguments: Arguments, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments by their common names; `names` has those that differ, by the trainer's own name."""
    return {names.get(name, name): value for name, value in arguments.values.items()}

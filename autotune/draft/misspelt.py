"""Arguments of a trainer that are probably misspelt."""

import re
from collections.abc import Collection, Iterator, Set
from difflib import get_close_matches

from autotune.draft import leftovers
from autotune.draft.given import Given
from autotune.draft.trainers import TRAINERS, Trainer
from trials import plugins

# A choice: a letter or two of a usual name may differ, and no two names of one trainer are as near.
_LIKE = 0.9
"""Least ratio of `difflib` between a name and the one that it was probably meant to be."""


def take_misspelt(given: Given, own: Collection[str], trainer: Trainer) -> Iterator[str]:
    """Yield the names that are nearly one that the trainer has, which are then left no more.

    `own` are all names of the configuration: of those that it has besides, none was meant.
    """
    for name in sorted(given.left.keys() & set(own)):
        if other := meant_by(name, trainer.KNOWN | leftovers.KNOWN, own):
            del given.left[name]
            yield f"{name} is not known, and so not taken over: did you mean {other}?"


def meant_by(name: str, known: Set[str], own: Collection[str] = ()) -> str | None:
    """Return the known name, none of `own`, that another name was probably meant to be; None for none."""
    if name in leftovers.KNOWN or any(name in trainer.KNOWN for _, trainer in plugins.each(TRAINERS)):
        return None
    # Names that differ in a number are different ones, such as adam_beta2 and adam_beta3.
    numbers = re.findall(r"\d+", name)
    likely = [other for other in known if other not in own and re.findall(r"\d+", other) == numbers]
    return next(iter(get_close_matches(name, likely, n=1, cutoff=_LIKE)), None)

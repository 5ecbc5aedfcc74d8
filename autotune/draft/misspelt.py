"""Arguments of a trainer that are probably misspelt."""

from collections.abc import Collection, Iterator, Set

from autotune.draft import leftovers
from autotune.draft.given import Given
from autotune.draft.nearest import nearest
from autotune.draft.trainers import TRAINERS, Trainer
from trials import plugins


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
    return nearest(name, known, own)

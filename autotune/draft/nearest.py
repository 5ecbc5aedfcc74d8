"""Names that were probably meant by misspelt ones."""

import re
from collections.abc import Collection, Set
from difflib import get_close_matches

# A choice: a letter or two of a usual name may differ, and no two names of one trainer are as near.
_LIKE = 0.9
"""Least ratio of `difflib` between a name and the one that it was probably meant to be."""


def nearest(name: str, known: Set[str], own: Collection[str] = ()) -> str | None:
    """Return the known name, none of `own`, that another name was probably meant to be; None for none."""
    # Names that differ in a number are different ones, such as adam_beta2 and adam_beta3.
    numbers = re.findall(r"\d+", name)
    likely = [other for other in known if other not in own and re.findall(r"\d+", other) == numbers]
    return next(iter(get_close_matches(name, likely, n=1, cutoff=_LIKE)), None)

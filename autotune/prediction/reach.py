"""The plans whose time and memory are not predicted."""

from trials.plan import Packing


def unpredicted(packing: Packing) -> str | None:
    """Return why plans with these packs are not predicted; None where they are."""
    if len(packing.degrees) > 1:
        return f"the packs of the plan have {len(packing.degrees)} levels, and plans with levels are not predicted"
    return None


def unsearched(packing: Packing) -> str | None:
    """Return why no search can run plans with these packs; None where one can."""
    if (degree := max(packing.degrees)) > 1:
        return f"the packs of the plan are shared by {degree} ranks, and a search does not compare such plans"
    return unpredicted(packing)

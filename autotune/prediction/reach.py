"""The plans whose time and memory are not predicted."""

from trials.plan import Packing


def unpredicted(packing: Packing) -> str | None:
    """Return why plans with these packs are not predicted; None where they are."""
    if len(packing.degrees) > 1:
        return f"the packs of the plan have {len(packing.degrees)} levels, and plans with levels are not predicted"
    if (degree := packing.degrees[0]) > 1:
        return f"the packs of the plan are shared by {degree} ranks, whose exchanges are not predicted"
    return None

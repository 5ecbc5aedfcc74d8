"""The plans that searches run."""

from trials.plan import Packing


def unsearched(packing: Packing) -> str | None:
    """Return why no search runs plans with these packs; None where one does."""
    if len(packing.degrees) > 1:
        return f"the packs of the plan have {len(packing.degrees)} levels, and a search does not compare such plans"
    if (degree := packing.degrees[0]) > 1:
        return f"the packs of the plan are shared by {degree} ranks, and a search does not compare such plans"
    return None

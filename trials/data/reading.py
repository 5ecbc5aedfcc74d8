"""Progress of reading data."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Progress of indexing."""

    records: int
    share: float | None
    """Share of all chunks; None until it is known what has to be measured."""

"""Drafts of job files, before they are written."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class Draft:
    """Values and notes of a job file before it is written."""

    values: dict[str, Any] = field(default_factory=dict)
    """Value by dotted key of the job."""
    notes: list[str] = field(default_factory=list)
    """What the user should know or decide."""

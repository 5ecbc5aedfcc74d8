"""Drafts of job files, before they are written."""

from dataclasses import dataclass, field
from typing import Any

from autotune.draft.present import Present, Unclear
from trials.plan import Packed


@dataclass(slots=True, kw_only=True)
class Draft:
    """Values and notes of a job file before it is written."""

    values: dict[str, Any] = field(default_factory=dict)
    """Value by dotted key of the job."""
    notes: list[str] = field(default_factory=list)
    """What the user should know or decide."""
    present: Present | Unclear | None = None
    """Settings of the plan that trainings use now; None without a configuration of another trainer."""
    packs: Packed | None = None
    """Packs that `training.global_batch_samples` counts until their samples are known; None where it counts samples."""

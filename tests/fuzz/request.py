"""What a worker is asked for. Nothing heavy is imported here: who asks runs no case itself."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

ANSWERS = "answers.jsonl"
"""In the folder of a worker: the verdict on each case."""
Kind: TypeAlias = Literal[
    "jobs", "plans", "lengths", "annotations", "results", "bundles", "profiles", "models", "progress"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one case."""

    seconds: float
    """By the clock."""
    cpu_seconds: float
    mebibytes: int
    """Beyond what the process held before the case."""

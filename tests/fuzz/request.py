"""Requests to a worker. The parent process imports this, so it imports nothing heavy."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

ANSWERS = "answers.jsonl"
"""File in a worker's folder with the result of each case."""
Kind: TypeAlias = Literal[
    "jobs", "plans", "lengths", "annotations", "results", "bundles", "profiles", "models", "progress"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one case."""

    seconds: float
    """Wall-clock seconds of a case; on a busy machine only one that waits for ever reaches them."""
    cpu_seconds: float
    mebibytes: int
    """Memory in addition to what the process held before the case."""

"""How a training tells what it does: a file with one line per optimizer step, written by rank 0."""

from dataclasses import dataclass

PROGRESS_FILE = "progress.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One optimizer step of the training: a line of the progress file."""

    step: int
    """Optimizer steps done in all, this one included."""
    of: int
    """Steps of the whole training."""
    loss: float
    seconds: float
    samples: int

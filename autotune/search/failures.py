"""What trials that failed have in common, in words."""

from collections import Counter
from collections.abc import Sequence

from storage.records import FinishedTrial
from trials.outcome import Cause, Failed, OutOfMemory

_MEBI = 1 << 20


def causes(trials: Sequence[FinishedTrial]) -> list[Cause]:
    """Of those that failed."""
    return [trial.result.outcome.cause for trial in trials if isinstance(trial.result.outcome, Failed)]


def common_cause(trials: Sequence[FinishedTrial]) -> str:
    """Of trials some of which failed: the commonest cause, or of too little memory the nearest miss, and what helps."""
    found = causes(trials)
    short = [cause for cause in found if isinstance(cause, OutOfMemory)]
    others = [str(cause) for cause in found if not isinstance(cause, OutOfMemory)]
    if len(short) > len(others):
        nearest = min(short, key=lambda cause: cause.needed_bytes / cause.limit_bytes)
        return (
            f"{len(short)} of {len(found)} ran out of memory, the nearest on stage {nearest.stage}, which needed "
            f"{nearest.needed_bytes / _MEBI:.0f} MiB where {nearest.limit_bytes / _MEBI:.0f} MiB are allowed; raise "
            "hardware.memory_limit, or give more devices"
        )
    cause, count = Counter(others).most_common(1)[0]
    return f"{count} of {len(found)} with: {cause}"

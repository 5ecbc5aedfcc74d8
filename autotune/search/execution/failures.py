"""When failures of trials end a search, and the error that states their commonest cause."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NoReturn

from autotune.errors import NoFeasiblePlan, TrialsKeepFailing
from storage.records import FinishedTrial
from trials.outcome import Cause, Failed, OutOfMemory, Timeout

_MEBI = 1 << 20
_IN_A_ROW, _FROM_THE_FIRST = 4, 8
"""Failures after which a search ends: of anything but memory in a row, and of any kind before one completed."""


def stop_if_all_fail(trials: Sequence[FinishedTrial], *, found_any: bool) -> None:
    """Raise NoFeasiblePlan or TrialsKeepFailing when the trials, in order, give no hope that a later one completes.

    That is after several failures in a row of anything but memory, or when all of several trials failed while no plan
    has completed (`found_any`).
    """
    last = _causes(trials[-_IN_A_ROW:])
    if len(last) == _IN_A_ROW and not any(isinstance(cause, OutOfMemory) for cause in last):
        give_up(f"{len(last)} trials in a row failed", trials[-_IN_A_ROW:])
    if len(_causes(trials)) == len(trials) >= _FROM_THE_FIRST and not found_any:
        give_up(f"all {len(trials)} trials failed", trials)


def give_up(what: str, trials: Iterable[FinishedTrial]) -> NoReturn:
    """Raise NoFeasiblePlan when all failed trials lacked memory or none was run, TrialsKeepFailing otherwise."""
    found = _causes(trials)
    if not found:
        raise NoFeasiblePlan(
            f"{what}: none was run; raise search.trials or hardware.memory_limit, or widen search.space"
        )
    short = [cause for cause in found if isinstance(cause, OutOfMemory)]
    others = [with_remedy(cause) for cause in found if not isinstance(cause, OutOfMemory)]
    if len(short) > len(others):
        # The trial that lacked least memory shows how far the limit has to be raised.
        nearest = min(short, key=lambda cause: cause.needed_bytes / cause.limit_bytes)
        why = (
            f"{len(short)} of {len(found)} ran out of memory, the nearest on stage {nearest.stage}, which needed "
            f"{nearest.needed_bytes / _MEBI:.0f} MiB where {nearest.limit_bytes / _MEBI:.0f} MiB are allowed; raise "
            "hardware.memory_limit"
        )
    else:
        cause, count = Counter(others).most_common(1)[0]
        why = f"{count} of {len(found)} with: {cause}"
    raise (TrialsKeepFailing if others else NoFeasiblePlan)(f"{what}, {why}")


def with_remedy(cause: Cause) -> str:
    """Return the cause in words, for a timeout with the setting that allows more time."""
    return f"{cause}; raise search.trial_timeout if that is too short" if isinstance(cause, Timeout) else str(cause)


def _causes(trials: Iterable[FinishedTrial]) -> list[Cause]:
    return [trial.result.outcome.cause for trial in trials if isinstance(trial.result.outcome, Failed)]

"""When the time of a search is paid back, in words, for a winner without an explanation."""

from autotune.results.headline import compared_first, is_sure, speed_of_baseline
from storage.baseline import Baseline
from storage.records import BestPlan
from trials.units import time_text


def payback_text(best: BestPlan) -> str:
    """Compare the time of the search with what its plan saves in an epoch; empty without a baseline."""
    saved = [_saved(best, other) for other in compared_first(best)]
    return "; ".join((f"The search's trials took {best.search_seconds:.0f} s", *saved)) if saved else ""


def _saved(best: BestPlan, other: Baseline) -> str:
    if speed := speed_of_baseline(other.gain, other.gain_error):
        return f"{other.role} is {speed}"
    if not is_sure(other.gain, other.gain_error):
        return f"the errors are too large to say when they are paid back compared with {other.role}"
    saved = (other.gain - 1) * best.epoch_seconds
    epochs = best.search_seconds / saved
    return f"an epoch is {time_text(saved)} shorter than with {other.role}: paid back in {epochs:.1f} epochs"

"""When the time of a search is paid back, in words."""

import math
from collections.abc import Sequence

from autotune.results.headline import compared_first, is_sure, named_role, speed_of_baseline
from storage.records import BestPlan


def paybacks(best: BestPlan) -> Sequence[str]:
    """Compare the time of the search with what its plan saves over each baseline that is compared first."""
    return [
        payback_text(best, each.role, (each.gain, each.gain_error), best.epoch_seconds) for each in compared_first(best)
    ]


def payback_text(
    best: BestPlan, role: str, gain: tuple[float, float], epoch_seconds: float, steps: int | None = None
) -> str:
    """Say after how many epochs of the best plan its search is paid back, compared with the plan of a role.

    `gain` is the best plan's speed divided by that plan's, with its standard error; `steps` are those of an epoch.
    """
    name, cost = named_role(role), f"the {best.search_seconds:,.0f} s of the search's trials"
    if speed := speed_of_baseline(*gain):
        return f"Compared with {name}, {cost} are not paid back: {name} is {speed}"
    if not is_sure(*gain):
        return f"The errors are too large to say when {cost} are paid back compared with {name}"
    epochs = best.search_seconds / ((gain[0] - 1) * epoch_seconds)
    count = math.ceil(epochs * (steps or 0))
    in_steps = f" ({count:,} step{'s' * (count != 1)})" if steps else ""
    return f"Compared with {name}, {cost} are paid back after {epochs:.1f} epochs{in_steps}"

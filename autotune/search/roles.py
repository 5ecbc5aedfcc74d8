"""Why a trial ran."""

from enum import StrEnum


class Role(StrEnum):
    """The reason for a trial. The values are stored with the trials and shown."""

    CURRENT_PLAN = "current-plan"
    """Baseline: the plan of `search.current_plan`."""
    PACKED = "packed"
    """Baseline: packs of one length in data parallelism alone, with all, vision or no layers recomputed."""
    DEFAULT = "default"
    """Baseline: unpacked micro-batches, equally many layers per stage, everything recomputed."""
    DEFAULT_NO_RECOMPUTE = "default-no-recompute"
    """Baseline: the default with nothing recomputed, where no plan is `packed`."""
    OMNIBAL = "omnibal"
    """Baseline: OmniBal's recipe and its neighbours."""
    HBP = "hbp"
    """Baseline: HBP's recipe of levels, where levels may help."""
    ZERO3 = "zero3"
    """Baseline: unpacked micro-batches with ZeRO 3 and one stage, where ZeRO 1 lacks the memory or a job names it."""
    QUEUED = "queued"
    """Given by hand in `search.queue`, and tried before all others."""
    INHERITED = "inherited"
    """Winner of an earlier search on a similar workload."""
    PREDICTED = "predicted"
    """Predicted to be fastest before any trial of the study."""
    SAMPLED = "sampled"
    """Proposed by the sampler."""
    REFERENCE = "reference"
    """Repeat during the search that tells drift of the machine from noise."""
    CONFIRM = "confirm"
    """Repeat of a finalist at the end."""
    FINAL = "final"
    """Longer measurement of the winner, after everything else."""


BASELINES = (
    Role.CURRENT_PLAN,
    Role.PACKED,
    Role.DEFAULT,
    Role.DEFAULT_NO_RECOMPUTE,
    Role.OMNIBAL,
    Role.HBP,
    Role.ZERO3,
)
CONFIRMATION = (Role.CONFIRM, Role.FINAL)
"""Roles of trials after the search, which do not count against `search.trials`."""
REPEATS = (Role.REFERENCE, *CONFIRMATION)
"""Roles of trials of a plan that was tried before."""

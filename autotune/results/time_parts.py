"""Names and meanings of the parts of an epoch's time."""

import math

from autotune.results.headline import SIGNIFICANT
from storage.explanation import IDEAL, PlanTime

NAMES = {
    "ideal": "useful work",
    "padding": "padding",
    "recompute": "recompute",
    "loading": "data wait",
    "stage_imbalance": "stage imbalance",
    "data_imbalance": "data imbalance",
    "bubble": "pipeline bubble",
    "communication": "communication",
    "optimizer": "update",
    "unexplained": "not explained",
}
MEANINGS = {
    "ideal": "the samples' own work, spread evenly over all ranks",
    "padding": "pad tokens up to the longest sample of a micro-batch, and zero images where it has none",
    "recompute": "layers that run forward a second time, or wait for copies, to save memory",
    "loading": "ranks that wait for data to be read and encoded",
    "stage_imbalance": "stages that wait for a stage with more work",
    "data_imbalance": "ranks that wait because packs differ in work, and work beyond equal parts of shared packs",
    "bubble": "stages that wait while the pipeline fills and drains",
    "communication": "sends between stages, sums over data ranks",
    "optimizer": "update of the weights",
    "unexplained": "measured time beyond the simulated steps",
}
BASES = {
    "measured": "measured",
    "divided": "measured work, divided by the profile",
    "simulated": "simulated with measured times",
    "predicted": "predicted",
    "rest": "measured, minus all other parts",
}
"""How a part is known."""


def useful_work_note(one: PlanTime, other: PlanTime) -> str:
    """Say why the useful work of two plans differs; empty where their errors explain it."""
    first, second = one.part(IDEAL), other.part(IDEAL)
    if abs(first.seconds - second.seconds) <= SIGNIFICANT * math.hypot(first.error, second.error):
        return ""
    return (
        "Useful work is that of the same samples under both plans, but its time is measured in their passes. It "
        "differs by more than its errors, because the speed of a pass depends on the sizes of packs, on cores that "
        "ranks share, and on other programs that run."
    )

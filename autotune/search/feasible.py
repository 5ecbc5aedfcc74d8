"""What may be searched at all for a workload: the layouts that fit its memory, with the capacities of its data."""

from autotune.errors import NoFeasiblePlan
from autotune.search.capacities import capacities
from autotune.search.layouts import layout_name, layouts
from autotune.search.solver import Solver
from autotune.search.space import Space
from trials.plan import Padded
from trials.workload import Workload

_MEBI = 1 << 20


def holds_all(workload: Workload) -> bool:
    """Whether a sample above a pack's capacity would be lost: no plan may win by training on less."""
    return workload.oversize in ("skip", "fail")


def feasible_space(workload: Workload, solver: Solver, *, remedy: str) -> Space:
    """Raises NoFeasiblePlan, which ends with the remedy, when no layout fits the memory."""
    limit = workload.memory_limit_bytes
    possible = layouts(workload.model, workload.hardware.devices)
    least = {layout: solver.least_bytes(Padded(samples=1), layout) for layout in possible}
    fitting = [layout for layout, needed in least.items() if needed <= limit]
    if not fitting:
        layout, needed = min(least.items(), key=lambda entry: entry[1])
        raise NoFeasiblePlan(
            f"no plan fits {limit / _MEBI:.0f} MiB per rank: the leanest layout, {layout_name(layout)} with everything "
            f"recomputed, needs about {needed / _MEBI:.0f} MiB; {remedy}"
        )
    found = capacities(workload.data, workload.global_batch_samples, hold_all=holds_all(workload))
    return Space(fitting, [(pair.qv, pair.qt) for pair in found], solver)

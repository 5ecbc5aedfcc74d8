"""The best known plan of a simulated machine, found on its true times."""

from collections.abc import Iterable

from autotune.search.solver.solver import Solver
from autotune.search.solver.splits import WantedSplits
from benchmarks.machines.jobs import MachineJob
from trials.plan import Plan

_AROUND = 8
"""Plans around which others are looked for."""
_SOLVED = 16
"""Plans for whose packing and layout further splits are solved."""
_SPLITS = WantedSplits(count=5, within=1.05)


def best_plan(job: MachineJob) -> Plan:
    """Return the fastest plan that local searches find with the machine's true times.

    They begin with the solver's plans of all layouts and capacities, by the profile of the job and by one that is not
    wrong, and with further splits of the fastest ones.
    """
    seconds = job.machine.epoch_seconds
    right = job.predictor.with_costs(job.right_costs)
    spaces = [job.space(job.predictor), job.space(right)]
    solver = Solver(right, job.limits(job.memory_limit_bytes))

    def fastest(plans: Iterable[Plan], count: int) -> list[Plan]:
        fitting = filter(job.fits, dict.fromkeys(plans))
        return sorted(fitting, key=lambda plan: (seconds(plan), plan.id))[:count]

    starts = fastest((plan for space in spaces for plan in space.starts), _SOLVED)
    split = (plan for start in starts for plan in solver.solutions(start.packing, start.layout, _SPLITS))
    best, looked_at = fastest((*starts, *split), _AROUND), set[Plan]()
    while around := [plan for plan in best if plan not in looked_at]:
        looked_at.update(around)
        best = fastest(
            (*best, *(other for plan in around for space in spaces for other in space.neighbours(plan))), _AROUND
        )
    return best[0]

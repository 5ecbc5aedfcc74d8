"""The parts of a search, built and connected for one study."""

import os
from collections.abc import Sequence
from functools import partial
from itertools import chain

from optuna.storages import BaseStorage

from autotune.dimensions.folds import unprofiled
from autotune.dimensions.sequence import knows_sequence
from autotune.errors import JobError
from autotune.events import Listener, Note, Phase, PhaseBegan
from autotune.machine.conditions import MachineWatch
from autotune.machine.device_problems import warn_of
from autotune.search.baselines import BaselinePlan, baselines
from autotune.search.execution.ledger import Ledger, busy_seconds
from autotune.search.execution.profiling import layer_costs
from autotune.search.execution.runner import Runner
from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.learning.warm_start import inherited_calibration, inherited_plans
from autotune.search.roles import Role
from autotune.search.sampling.advisor import Advisor
from autotune.search.sampling.attributes import study_attributes
from autotune.search.sampling.context import SamplerContext
from autotune.search.sampling.proposals import Proposals
from autotune.search.search import Search
from autotune.search.solver.limits import Limits
from autotune.search.solver.solver import Solver
from autotune.search.space.capacities import holds_all
from autotune.search.space.feasible import feasible_space
from autotune.search.space.held import Holding
from autotune.search.traps import trap_findings
from autotune.workbench import Workbench
from storage.records import StudyRecord
from trials.costs.layer_costs import LayerCosts
from trials.plan import Plan
from trials.run.pool import WarmPool
from trials.units import duration_text, number_of

_COMPILED = (
    "Layers are compiled. New ranks take longer for their first steps, {seconds:.0f} s in the profile: that counts in "
    "search.trial_timeout and search.time_limit, and is never timed. ZeRO 3, tensor degrees, layers that "
    "offload and deferred weight gradients are not searched, since they change what runs inside of a layer"
)


def assemble(
    bench: Workbench,
    study: StudyRecord,
    ledger: Ledger,
    pools: Sequence[WarmPool],
    optuna: BaseStorage,
    *,
    current_plan: Plan | None,
    queued: dict[str, Plan],
    held: Holding | None = None,
    warm_start: bool,
    listener: Listener,
) -> Search:
    """Build the search of a study; profile the layers first when no profile of them is stored.

    `warm_start` says whether to begin with what searches on similar workloads found. With `held` the plans alone are
    searched that a trainer can hold.

    Raise what `layer_costs`, `feasible_space` and `Proposals` raise, and JobError for a queued plan that cannot run.
    """
    prepared, store = bench.prepared, bench.store
    workload, settings = prepared.workload, prepared.job.search
    costs = layer_costs(prepared, store, pools[0], bench.folder / "ranks", listener)
    warn_of(trap_findings(workload, costs.slow_calls, costs, prepared.job.data.workers or 0, os.environ))
    for key, plan in (queued | ({} if current_plan is None else {"search.current_plan": current_plan})).items():
        _check_degrees(key, plan, costs)
    if costs.compile_seconds is not None:
        listener(Note(text=_COMPILED.format(seconds=costs.compile_seconds)))
    limit = duration_text(settings.time_limit)
    text = f"Searching with at most {number_of(settings.trials, 'trial')} in {limit}"
    listener(PhaseBegan(phase=Phase.SEARCH, text=text, epoch_samples=workload.data.samples))
    if begun := ledger.trials:
        done = f"{number_of(len(begun), 'trial is', 'trials are')} done, after {duration_text(busy_seconds(begun))}"
        listener(Note(text=f"Study {study.name} goes on: {done}"))
    calibrated = CalibratedPredictor.of_job(
        prepared.job,
        prepared.index,
        prepared.weights,
        # With workers, images are decoded ahead, and ranks hardly wait for them.
        costs=costs.with_workers(prepared.job.data.workers or 0),
        element_bytes=workload.model.element_bytes,
        state=inherited_calibration(store, workload) if warm_start else None,
    )
    limits = Limits.of(workload, prepared.job.search.parallel)
    solver = Solver(calibrated.profiled, limits)
    if held is not None:
        title = held.target.title
        listener(Note(text=f"Besides the baselines, plans are tried that {title} can hold; one of them wins"))
    space = feasible_space(
        workload,
        solver,
        remedy="raise hardware.memory_limit",
        wanted=settings.space,
        held=held,
        batch_tolerance=prepared.job.training.batch_tolerance,
        show=lambda reason: listener(Note(text=reason)),
    )
    runners = [
        Runner(prepared, calibrated, pool, partial(MachineWatch, group=group)) for group, pool in enumerate(pools)
    ]
    _check_queue(queued, ledger, runners[0])
    advisor = Advisor(space, calibrated, limits, settings)
    context = SamplerContext.of_agent(space, advisor, ledger, study.seed)
    proposals = Proposals(optuna, study.name, settings.sampler, context)
    proposals.describe(study_attributes(workload))
    return Search(
        settings=settings,
        ledger=ledger,
        proposals=proposals,
        space=space,
        predictor=calibrated,
        advisor=advisor,
        runners=runners,
        listener=listener,
        baselines=chain(
            [BaselinePlan(role=Role.CURRENT_PLAN, plan=current_plan)] if current_plan else [],
            baselines(
                workload,
                calibrated.profiled,
                solver,
                limits,
                hold_all=holds_all(workload),
                levels=space.has_ladders,
                named=settings.space.layouts or (),
            ),
        ),
        queued=tuple(queued.values()),
        baseline_wins=held is None,
        inherited=inherited_plans(store, workload, space) if warm_start else (),
    )


def _check_degrees(key: str, plan: Plan, costs: LayerCosts) -> None:
    """Raise JobError for a plan of the job whose ranks exchange what the profile has not timed."""
    if missing := unprofiled(costs, plan.layout):
        raise JobError(
            f"{key}: the stored profile has no times of {missing}; measure them with `autotune profile "
            "JOB --fresh`, or give a plan without"
        )
    of_packs = [degree * plan.layout.tensor for degree in plan.packing.degrees]
    if unknown := [degree for degree in of_packs if not knows_sequence(costs, degree)]:
        raise JobError(
            f"{key}: the stored profile has no times of what {unknown[0]} ranks exchange that share a "
            "pack; measure them with `autotune profile JOB --fresh`"
        )


def _check_queue(queued: dict[str, Plan], ledger: Ledger, runner: Runner) -> None:
    """Raise JobError for a plan of `search.queue` that would be rejected, such as one that needs more memory."""
    for key, plan in queued.items():
        if ledger.answer(plan) is None and (rejection := runner.rejection(plan, Role.QUEUED)):
            raise JobError(
                f"{key}: plan {plan.id} cannot run: {rejection.reason}; change it, or remove it from the queue"
            )

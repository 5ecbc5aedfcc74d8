"""Whole searches on a real database, on a simulated machine."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from autotune.events import Event, Note, TrialEnded
from autotune.machine.agent import Agent
from autotune.search.baselines import BaselinePlan, baselines
from autotune.search.execution.ledger import Ledger, StudyLedger
from autotune.search.execution.runner import Runner
from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.learning.surrogate import Posterior
from autotune.search.roles import Role
from autotune.search.sampling.advisor import Advisor
from autotune.search.sampling.context import SamplerContext
from autotune.search.sampling.proposals import Proposals, database
from autotune.search.search import Search
from autotune.search.solver.solver import Solver
from autotune.search.space.feasible import allows
from autotune.search.space.space import Axes, Space
from autotune.search.winner import Standings
from storage.records import FinishedTrial, StudyRecord, TrialResult
from storage.spool import Spool
from storage.store import Store
from tests.machines.simulated import SimulatedLauncher, Undisturbed
from tests.values.search import axes_of, limits_of, predictor_of, prepared_of
from trials.outcome import Completed, Outcome
from trials.plan import Layout, Plan

MEMORY = 1 << 40
PREDICTOR = predictor_of()
AXES = axes_of(packers=("isf", "best-fit"), qv_slacks=(0, 1), qt_slacks=(64, 0))
NOTHING = Posterior(mean=np.zeros(0), covariance=np.zeros((0, 0)))
ALWAYS = (Role.PACKED, Role.DEFAULT, Role.OMNIBAL)
"""Baselines of every search without a current plan and levels of packs."""
EMPTY = Standings(entries=(), posterior=NOTHING, measured=NOTHING)


ONE_PLAN = axes_of(
    layouts=(Layout(pipeline=2, data=1, zero=0),),
    packers=("isf",),
    capacities=((9, 480),),
    qv_slacks=(0,),
    qt_slacks=(64,),
    boundaries=(4, 9),
    recompute="none",
)
"""Axes of a single plan."""


@dataclass
class Bench:
    """Runs searches in one folder, like consecutive processes."""

    folder: Path
    store: Store
    reported: list[tuple[FinishedTrial, bool]] = dataclasses.field(default_factory=list)
    learnt: list[int] = dataclasses.field(default_factory=list)
    """Number of trials from which each search learned."""
    remembers: bool = True
    """Whether trials of other studies count."""
    current_plan: Plan | None = None
    queued: tuple[Plan, ...] = ()
    inherited: tuple[Plan, ...] = ()
    baseline_wins: bool = True
    on_end: Callable[[FinishedTrial], None] = lambda _: None
    """Called with each trial that has ended."""
    events: list[Event] = dataclasses.field(default_factory=list)
    said: list[str] = dataclasses.field(default_factory=list)
    """Why searches ended."""
    standings: Standings = EMPTY
    """After the last search."""

    def study(self) -> StudyRecord:
        return self.store.create_study(self.store.add_workload(prepared_of(self.folder, MEMORY).workload), {}, seed=0)

    def search(
        self,
        study: StudyRecord,
        *pools: SimulatedLauncher,
        memory: int = MEMORY,
        axes: Axes | None = None,
        **settings: object,
    ) -> Ledger:
        """Run a whole search, with a trial on each of `pools` at the same time, and return its ledger."""
        with self._begun(study, pools, memory, axes, settings) as search:
            self.standings = search.confirm()
            self.learnt.append(search.predictor.trials)
            return search.ledger

    def explore(self, study: StudyRecord, *pools: SimulatedLauncher, **settings: object) -> Ledger:
        """Run a search up to the repetitions."""
        with self._begun(study, pools, MEMORY, None, settings) as search:
            return search.ledger

    @contextmanager
    def _begun(
        self,
        study: StudyRecord,
        pools: Sequence[SimulatedLauncher],
        memory: int,
        axes: Axes | None,
        settings: Mapping[str, object],
    ) -> Iterator[Search]:
        prepared = prepared_of(
            self.folder, memory, **{"trials": 10, "time_limit": "60s", "step_error": 0.0, "final_steps": 0, **settings}
        )
        limits, calibrated, found = limits_of(memory), CalibratedPredictor(PREDICTOR), prepared.job.search
        solver = Solver(PREDICTOR, limits)
        space = Space(axes or AXES, Solver(PREDICTOR, limits_of(MEMORY)), partial(allows, found.space))
        advisor = Advisor(space, calibrated, limits, found)
        known = self.store.answers(study.workload_fingerprint) if self.remembers else ()
        with ExitStack() as stack:
            agent = stack.enter_context(Agent(self.store))
            optuna = stack.enter_context(database(self.store.optuna_url, self.store.exclusive()))
            ledger = StudyLedger(self.store, Spool(self.folder / "spool"), study, agent, known)
            context = SamplerContext.of_agent(space, advisor, ledger, study.seed)
            search = Search(
                settings=found,
                ledger=ledger,
                proposals=Proposals(optuna, study.name, found.sampler, context),
                space=space,
                predictor=calibrated,
                advisor=advisor,
                runners=[Runner(prepared, calibrated, pool, watch=Undisturbed) for pool in pools],
                queued=self.queued,
                inherited=self.inherited,
                baseline_wins=self.baseline_wins,
                listener=self._listen,
                baselines=chain(
                    [BaselinePlan(role=Role.CURRENT_PLAN, plan=self.current_plan)] if self.current_plan else [],
                    baselines(prepared.workload, PREDICTOR, solver, limits, hold_all=False),
                ),
            )
            search.explore()
            yield search

    def _listen(self, event: Event) -> None:
        self.events.append(event)
        match event:
            case TrialEnded(trial=trial, is_known=is_known):
                self.reported.append((trial, is_known))
                self.on_end(trial)
            case Note(text=text):
                self.said.append(text)
            case _:
                pass

    def record(self, study: StudyRecord, outcome: Outcome, seconds: float) -> TrialResult:
        """The default plan's trial in an earlier run, whose result is in the spool."""
        workload, limits = prepared_of(self.folder, MEMORY).workload, limits_of(MEMORY)
        found = baselines(workload, PREDICTOR, Solver(PREDICTOR, limits), limits, hold_all=False)
        default = next(each for each in found if each.role == Role.DEFAULT)
        running = self.store.start_trial(study.id, default.plan, default.role)
        result = TrialResult(
            trial_id=running.id,
            outcome=outcome,
            epoch_seconds=1000.0 if isinstance(outcome, Completed) else None,
            epoch_seconds_error=1.0 if isinstance(outcome, Completed) else None,
            finished=running.started + timedelta(seconds=seconds),
        )
        Spool(self.folder / "spool").put(result)
        return result

    def stored(self, study: StudyRecord) -> list[FinishedTrial]:
        return [trial for trial in self.store.trials(study.id) if isinstance(trial, FinishedTrial)]

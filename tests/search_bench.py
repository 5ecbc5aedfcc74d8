"""Whole searches on a real database, on a simulated machine."""

import dataclasses
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np

from autotune.search.advisor import Advisor
from autotune.search.baselines import baselines
from autotune.search.calibrated import CalibratedPredictor
from autotune.search.guide import Guide
from autotune.search.ledger import Ledger
from autotune.search.proposals import Proposals, database
from autotune.search.runner import Runner
from autotune.search.search import Search
from autotune.search.simulated import SimulatedLauncher, Undisturbed
from autotune.search.solver import Solver
from autotune.search.space import Axes, Space
from autotune.search.surrogate import Posterior
from autotune.search.winner import Field
from storage.records import FinishedTrial, StudyRecord, TrialResult
from storage.spool import Spool
from storage.store import Store
from tests.search_values import axes_of, limits_of, predictor_of, prepared_of
from trials.outcome import Completed, Outcome

MEMORY = 1 << 40
PREDICTOR = predictor_of()
AXES = axes_of(packers=("isf", "best-fit"), qv_slacks=(0, 1), qt_slacks=(64, 0))
EMPTY = Field(standings=(), posterior=Posterior(mean=np.zeros(0), covariance=np.zeros((0, 0))))


@dataclass
class Bench:
    """Runs searches in one folder, as one process after another would."""

    folder: Path
    store: Store
    told: list[tuple[FinishedTrial, bool]] = dataclasses.field(default_factory=list)
    learnt: list[int] = dataclasses.field(default_factory=list)
    """From how many trials each search learnt."""
    field: Field = EMPTY
    """After the last search."""

    def study(self) -> StudyRecord:
        return self.store.create_study(self.store.add_workload(prepared_of(self.folder, MEMORY).workload), {}, seed=0)

    def ledger(self, study: StudyRecord) -> Ledger:
        known = self.store.answers(study.workload_fingerprint)
        return Ledger(self.store, Spool(self.folder / "spool"), study, known)

    def search(
        self,
        study: StudyRecord,
        pool: SimulatedLauncher,
        *,
        memory: int = MEMORY,
        axes: Axes | None = None,
        **settings: object,
    ) -> Ledger:
        """One whole search; its ledger."""
        prepared = prepared_of(
            self.folder, memory, **{"trials": 10, "time_limit": "60s", "step_error": 0.0, **settings}
        )
        limits, calibrated, found = limits_of(memory), CalibratedPredictor(PREDICTOR), prepared.job.search
        solver = Solver(PREDICTOR, limits)
        space = Space(axes or AXES, Solver(PREDICTOR, limits_of(MEMORY)))
        advisor = Advisor(space, calibrated, limits, found)
        guide = Guide(space=space, advisor=advisor, seed=study.seed)
        ledger = self.ledger(study)
        self.field = Search(
            settings=found,
            ledger=ledger,
            proposals=Proposals(database(self.store.optuna_url), study.name, found.sampler, guide),
            space=space,
            predictor=calibrated,
            advisor=advisor,
            runner=Runner(prepared, calibrated, pool, watch=Undisturbed),
            listener=lambda trial, known: self.told.append((trial, known)),
        ).run(baselines(prepared.workload, PREDICTOR, solver, limits, hold_all=False))
        self.learnt.append(calibrated.trials)
        return ledger

    def record(self, study: StudyRecord, outcome: Outcome, seconds: float) -> TrialResult:
        """The default plan's trial in an earlier run, whose result is in the spool."""
        workload, limits = prepared_of(self.folder, MEMORY).workload, limits_of(MEMORY)
        first = next(baselines(workload, PREDICTOR, Solver(PREDICTOR, limits), limits, hold_all=False))
        running = self.store.start_trial(study.id, first.plan, first.role)
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

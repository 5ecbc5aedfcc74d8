"""Tunes a prepared job: from the store's last knowledge to a confirmed winner in it."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from itertools import chain

from optuna.storages import BaseStorage

from autotune.errors import JobError, NoFeasiblePlan
from autotune.machine.conditions import MachineWatch
from autotune.predict.predictor import Predictor
from autotune.search.baselines import Baseline, baselines
from autotune.search.execution.ledger import BASELINE_PRESENT, Ledger, Listener, StudyLedger, duration_seconds
from autotune.search.execution.profiling import layer_costs
from autotune.search.execution.runner import Runner
from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.learning.warm_start import inherited_lessons, inherited_plans
from autotune.search.pareto import pareto
from autotune.search.sampling.advisor import Advisor
from autotune.search.sampling.context import Guide
from autotune.search.sampling.proposals import SAMPLERS, Proposals, database
from autotune.search.search import Search
from autotune.search.solver.limits import Limits
from autotune.search.solver.solver import Solver
from autotune.search.space.current_plan import present_plan
from autotune.search.space.feasible import check_space, feasible_space, holds_all
from autotune.search.winner import Field
from autotune.workbench import Workbench
from storage.errors import Superseded
from storage.records import BestPlan, StudyRecord
from trials import plugins, wire
from trials.errors import UnknownName
from trials.launchers.local import LocalLauncher
from trials.run.pool import REQUESTS_PER_START, WarmPool

_FRESH = "fresh"
_OF_AN_AGENT = ("parallel", "workers", "trial_timeout")
"""Settings in which agents of one search may differ."""
_LOOK_SECONDS = 0.5
"""Between looks at how far the agent is that repeats the finalists."""


class Tuner:
    """Finds the best plan of one job, resuming what an earlier run began."""

    def __init__(self, bench: Workbench, listener: Listener, tell: Callable[[str], None]) -> None:
        """`tell` is told in words why no further plan is tried.

        Raises JobError for an unknown sampler, and for a present plan that is not one of this job.
        """
        self._prepared = bench.prepared
        self._workload = bench.prepared.workload
        self._store = bench.store
        self._agent = bench.agent
        self._spool = bench.spool
        self._folder = bench.folder
        self._listener, self._tell = listener, tell
        _check_sampler(self._prepared.job.search.sampler)
        check_space(self._workload, self._prepared.job.search.space)
        self._present = present_plan(self._prepared)
        self._fingerprint = self._store.add_workload(self._workload)

    def tune(self, *, fresh: bool = False) -> BestPlan:
        """The winner. A finished study with the same settings is answered from the store; `fresh` begins anew.

        An unfinished one is gone on with, beside other agents that work on it. Raises NoFeasiblePlan and
        TrialsKeepFailing; everything measured until then is kept.
        """
        study = self._begun() if fresh else self._joined()
        if study.finished is not None:
            return self._winner_of(study)
        known = () if study.settings[_FRESH] else self._store.answers(self._fingerprint)
        ledger = StudyLedger(self._store, self._spool, study, self._agent, known)
        inherits = not study.settings[_FRESH] and all(trial.study_id == study.id for trial in known)
        with self._lanes(study) as pools, self._optuna() as optuna:
            search = self._search(study, ledger, pools, optuna, inherits=inherits)
            if not self._leads(study):
                return self._winner_of(study)
            found = search.confirm()
        best = self._best(study, ledger, found)
        if self._store.conclude_study(best, wire.encode(search.predictor.lessons), self._agent.id):
            return best
        return self._winner_of(study)  # another agent took this one, which was silent, for gone

    @contextmanager
    def _optuna(self) -> Iterator[BaseStorage]:
        with ExitStack() as stack:
            with self._store.exclusive():
                storage = stack.enter_context(database(self._store.optuna_url))
            yield storage

    def _begun(self) -> StudyRecord:
        settings = {**self._settings(), _FRESH: True}
        return self._store.create_study(self._fingerprint, settings, self._prepared.job.training.seed)

    def _joined(self) -> StudyRecord:
        """The last study when it was given the same settings, or a new one."""
        settings = {**self._settings(), _FRESH: False}

        def is_same(study: StudyRecord) -> bool:
            differing = {key for key, value in settings.items() if study.settings.get(key) != value}
            return differing <= {_FRESH, *_OF_AN_AGENT}

        return self._store.join_study(self._fingerprint, settings, self._prepared.job.training.seed, is_same)

    def _leads(self, study: StudyRecord) -> bool:
        """Whether this agent is to repeat the finalists and to name the winner; waits while another does."""
        while (now := self._store.study(study.id)).finished is None:
            if now.leader_id is None or self._agent.is_gone(now.leader_id):
                self._store.lead_study(study.id, self._agent.id, instead_of=now.leader_id)
            elif now.leader_id == self._agent.id:
                return True
            else:
                time.sleep(_LOOK_SECONDS)
        return False

    @contextmanager
    def _lanes(self, study: StudyRecord) -> Iterator[list[WarmPool]]:
        """Groups of ranks, each on devices of its own."""
        search, hardware = self._prepared.job.search, self._workload.hardware
        with ExitStack() as stack:
            yield [
                stack.enter_context(
                    WarmPool(
                        LocalLauncher(
                            self._folder / "ranks" / study.id / str(group),
                            hardware.devices,
                            hardware.accelerator,
                            group=group,
                            groups=search.parallel,
                        ),
                        REQUESTS_PER_START[search.workers],
                    )
                )
                for group in range(search.parallel)
            ]

    def _settings(self) -> dict[str, object]:
        """What makes two studies of one workload the same search; the present plan is named by its id, not its file."""
        settings = self._prepared.job.search.model_dump(mode="json")
        return {**settings, "present": self._present and self._present.id}

    def _winner_of(self, study: StudyRecord) -> BestPlan:
        winner = self._store.winner(study.id)
        if winner is None:
            raise Superseded("another agent is finishing this search; run the command again to see its winner")
        return winner

    def _search(
        self,
        study: StudyRecord,
        ledger: Ledger,
        pools: Sequence[WarmPool],
        optuna: BaseStorage,
        *,
        inherits: bool,
    ) -> Search:
        """One that has spent its budget. `inherits` from other workloads: trials of this one teach more, and have
        taught those already.
        """
        settings = self._prepared.job.search
        costs = layer_costs(self._prepared, self._store, pools[0], self._folder / "ranks")
        predictor = Predictor(
            costs.with_workers(self._prepared.job.data.workers),
            self._prepared.epoch,
            self._workload.model.element_bytes,
        )
        lessons = inherited_lessons(self._store, self._workload) if inherits else None
        calibrated = CalibratedPredictor(predictor, lessons)
        limits = Limits(
            vision_layers=self._workload.model.vision_layers,
            language_layers=self._workload.model.language_layers,
            memory_bytes=self._workload.memory_limit_bytes,
        )
        solver = Solver(predictor, limits)
        space = feasible_space(self._workload, solver, remedy="raise hardware.memory_limit", wanted=settings.space)
        advisor = Advisor(space, calibrated, limits, settings)
        guide = Guide(space=space, advisor=advisor, seed=study.seed)
        search = Search(
            settings=settings,
            ledger=ledger,
            proposals=Proposals(optuna, study.name, settings.sampler, guide),
            space=space,
            predictor=calibrated,
            advisor=advisor,
            runners=[
                Runner(self._prepared, calibrated, pool, partial(MachineWatch, group=group))
                for group, pool in enumerate(pools)
            ],
            listener=self._listener,
            tell=self._tell,
        )
        search.explore(
            chain(
                [Baseline(role=BASELINE_PRESENT, plan=self._present)] if self._present else [],
                baselines(self._workload, predictor, solver, limits, hold_all=holds_all(self._workload)),
            ),
            inherited_plans(self._store, self._workload, space, solver) if inherits else (),
        )
        return search

    def _best(self, study: StudyRecord, ledger: Ledger, field: Field) -> BestPlan:
        if not field.repeated:
            raise NoFeasiblePlan("every plan ran out of memory when it was repeated; raise hardware.memory_limit")
        verdict = field.verdict()
        winner = field.standings[verdict.winner]
        samples = self._workload.data.samples
        speed = samples / winner.epoch_seconds
        return BestPlan(
            plan=winner.plan,
            workload=self._workload,
            study_id=study.id,
            epoch_seconds=winner.epoch_seconds,
            epoch_seconds_error=winner.epoch_seconds_error,
            samples_per_second=speed,
            samples_per_second_error=speed * winner.epoch_seconds_error / winner.epoch_seconds,
            baselines=field.compare(verdict.winner, samples),
            search_seconds=sum(map(duration_seconds, ledger.trials)),
            pareto=pareto(field, ledger.everything(), samples, self._prepared.job.search.objectives),
            confidence=verdict.confidence,
            ties=tuple(field.standings[number].plan.id for number in verdict.ties),
            created=datetime.now(UTC),
        )


def _check_sampler(name: str) -> None:
    try:
        plugins.load(SAMPLERS, name)
    except UnknownName as error:
        raise JobError(f"search.sampler: {error}") from error

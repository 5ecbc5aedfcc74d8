"""Tunes a prepared job: from what the store knows to a confirmed winner in it."""

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial

from autotune.dimensions.folds import check_named
from autotune.errors import JobError, NoFeasiblePlan
from autotune.events import Listener, Phase, PhaseBegan, start_events, unheard
from autotune.search.assembly import assemble
from autotune.search.execution.ledger import StudyLedger, duration_seconds
from autotune.search.executor import LOOK_SECONDS
from autotune.search.explanation.explainer import Explainer
from autotune.search.pareto import pareto
from autotune.search.sampling.attributes import winner_attributes
from autotune.search.sampling.proposals import database, load_sampler
from autotune.search.search import Search
from autotune.search.solver.limits import Limits
from autotune.search.space.abilities import Target
from autotune.search.space.feasible import check_space
from autotune.search.space.given_plans import current_plan, queued_plans, warn_of_batch
from autotune.search.space.held import Holding
from autotune.search.study_settings import FRESH, answers, goes_on, packs_of, study_settings
from autotune.search.winner import Standings
from autotune.workbench import Workbench
from autotune.workload import Prepared
from storage.errors import DatabaseUnavailable, StorageError, Superseded
from storage.records import BestPlan, StudyRecord
from trials import wire
from trials.errors import AutotuneError
from trials.model.hub import published_name
from trials.plan import Plan
from trials.run.pool import REQUESTS_PER_START, WarmPool

_log = logging.getLogger(__name__)


def check_search(prepared: Prepared, held: Holding | None = None) -> tuple[Plan | None, dict[str, Plan]]:
    """Check the settings of the search before the profile, which takes minutes; return (current plan, `queued_plans`).

    Raise JobError for an unknown sampler, a layout that cannot be searched, a plan of another job, and a queued plan
    that the trainer of the search cannot hold.
    """
    search = prepared.job.search
    load_sampler(search.sampler)
    check_space(prepared.workload, search.space)
    check_named(prepared.job, prepared.workload)
    queued = queued_plans(prepared)
    for key, plan in queued.items():
        if held is not None and (missing := held.missing(plan)):
            raise JobError(
                f"{key}: {held.target.title} cannot hold plan {plan.id}: {'; '.join(missing)}; change it, or remove it "
                "from the queue"
            )
    return current_plan(prepared), queued


class Tuner:
    """Search for the best plan of one job, resuming what an earlier run began."""

    def __init__(self, bench: Workbench, listener: Listener = unheard, target: Target | None = None) -> None:
        """Check the settings of the search and store the workload. Raise what `check_search` raises.

        With a `target` only plans are searched that this trainer can hold.
        """
        self._bench = bench
        self._job = bench.prepared.job
        self._workload = bench.prepared.workload
        self._store = bench.store
        self._agent = bench.agent
        self._listener = listener
        self._held = None if target is None else Holding(target, self._workload, bench.prepared.epoch)
        self._current_plan, self._queued = check_search(bench.prepared, self._held)
        if self._current_plan is not None:
            warn_of_batch(bench.prepared, self._current_plan)
        self._fingerprint = self._store.add_workload(self._workload)

    def tune(self, *, fresh: bool = False) -> BestPlan:
        """Return the winner: from the store if a study with the same settings is finished, unless `fresh`.

        An unfinished study is resumed, together with other agents that work on it.

        Raise NoFeasiblePlan and TrialsKeepFailing; everything measured until then is kept.
        """
        study = self._open_study(fresh)
        if study.finished is not None:
            return self._stored_winner(study)
        is_fresh = bool(study.settings[FRESH])
        known = () if is_fresh else self._store.answers(self._fingerprint, partial(answers, study))
        ledger = StudyLedger(self._store, self._bench.spool, study, self._agent, known)
        with self._rank_pools(study) as pools, database(self._store.optuna_url, self._store.exclusive()) as optuna:
            try:
                search = assemble(
                    self._bench,
                    study,
                    ledger,
                    pools,
                    optuna,
                    current_plan=self._current_plan,
                    queued=self._queued,
                    held=self._held,
                    # Earlier trials of this workload say more than similar workloads, from which they began themselves.
                    warm_start=not is_fresh and all(trial.study_id == study.id for trial in known),
                    listener=self._listener,
                )
            except AutotuneError:  # such as NoFeasiblePlan: with other settings it is another study
                with suppress(StorageError):  # the reason why it could not begin says more
                    self._store.withdraw_study(study.id, self._agent.id)
                raise
            search.explore()
            if not self._leads(study):
                return self._stored_winner(study)
            standings = search.confirm()
            best = self._best_plan(study, ledger, standings, search)
            if not self._store.conclude_study(best, wire.encode(search.predictor.state), self._agent.id):
                return self._stored_winner(study)  # another agent took this silent one for dead and concluded the study
            try:
                search.proposals.describe(winner_attributes(best))
            except DatabaseUnavailable as error:  # the winner is stored; only the dashboard lacks it
                _log.info("the winner is not shown in Optuna's dashboard: %s", error)
        return best

    def _open_study(self, fresh: bool) -> StudyRecord:
        """Create a study, or unless `fresh` join the last one when it was given the same settings."""
        settings = study_settings(
            self._job.search,
            self._job.training,
            self._current_plan,
            self._queued.values(),
            published_name(self._job.model.path),
            fresh=fresh,
            trainer=self._trainer,
            loading_workers=self._job.data.workers or 0,
            packs=packs_of(self._bench.prepared.index),
        )
        seed, agent, model = self._job.training.seed, self._agent.id, self._workload.model.name
        if fresh:
            return self._store.create_study(self._fingerprint, settings, seed, agent_id=agent, model_name=model)

        is_same = partial(goes_on, settings=settings, seed=seed)
        return self._store.join_study(self._fingerprint, settings, seed, is_same, agent_id=agent, model_name=model)

    @contextmanager
    def _rank_pools(self, study: StudyRecord) -> Iterator[list[WarmPool]]:
        """Open groups of ranks, each on devices of its own."""
        search, hardware = self._job.search, self._workload.hardware
        with ExitStack() as stack:
            yield [
                stack.enter_context(
                    WarmPool(
                        self._bench.site.launcher(
                            self._bench.folder / "ranks" / study.id / str(group),
                            hardware.devices,
                            group=group,
                        ),
                        REQUESTS_PER_START[search.workers],
                        start_events(self._listener, group),
                    )
                )
                for group in range(search.parallel)
            ]

    def _leads(self, study: StudyRecord) -> bool:
        """Return whether this agent repeats the finalists and names the winner; wait while another one does."""
        waits = False
        while (now := self._store.study(study.id)).finished is None:
            if now.leader_id is None or self._agent.is_gone(now.leader_id):
                self._store.lead_study(study.id, self._agent.id, instead_of=now.leader_id)
            elif now.leader_id == self._agent.id:
                return True
            else:
                if not waits:
                    text = "Waiting for another agent, which repeats the finalists"
                    self._listener(PhaseBegan(phase=Phase.REPEATS, text=text))
                waits = True
                time.sleep(LOOK_SECONDS)
        return False

    def _stored_winner(self, study: StudyRecord) -> BestPlan:
        winner = self._store.winner(study.id)
        if winner is None:
            raise Superseded("another agent is finishing this search; run the command again to see its winner")
        return winner

    @property
    def _trainer(self) -> str | None:
        return None if self._held is None else self._held.target.name

    def _missing(self, plan: Plan) -> str | None:
        """Return why the trainer of the search cannot hold a plan; None where it can, and without one."""
        if self._held is None or not (missing := self._held.missing(plan)):
            return None
        return f"{self._held.target.title} cannot hold {'; '.join(missing)}"

    def _best_plan(self, study: StudyRecord, ledger: StudyLedger, standings: Standings, search: Search) -> BestPlan:
        if not standings.repeated:
            raise NoFeasiblePlan("every plan ran out of memory when it was repeated; raise hardware.memory_limit")
        winner = standings.winner(lambda plan: self._missing(plan) is None)
        fastest = standings.entries[winner.number]
        samples = self._workload.data.samples
        speed = samples / fastest.epoch_seconds
        explainer = Explainer(
            predictor=search.predictor,
            surrogate=search.advisor.surrogate,
            limits=Limits.of(self._workload, self._job.search.parallel),
            trials=ledger.everything(),
            study_id=study.id,
            samples=samples,
            not_run=tuple(map(str, search.not_run)),
            roles=search.all_roles(),
            missing=self._missing,
        )
        return BestPlan(
            plan=fastest.plan,
            workload=self._workload,
            study_id=study.id,
            epoch_seconds=fastest.epoch_seconds,
            epoch_seconds_error=fastest.epoch_seconds_error,
            estimated_samples_per_second=speed,
            estimated_samples_per_second_error=speed * fastest.epoch_seconds_error / fastest.epoch_seconds,
            baselines=standings.compare(winner.number, samples, self._missing),
            search_seconds=sum(map(duration_seconds, ledger.trials)),
            pareto=pareto(standings, ledger.everything(), samples, self._job.search.objectives),
            confidence=winner.confidence,
            ties=tuple(standings.entries[number].plan.id for number in winner.ties),
            created=datetime.now(UTC),
            explanation=explainer.explain(standings, winner),
            trainer=self._trainer,
            parallel=self._job.search.parallel,
        )

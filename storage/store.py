"""The store: the public interface to the database of all studies."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Self

from storage.database import url
from storage.database.engine import LOCK_TIMEOUT_SECONDS, Database
from storage.housekeeping import Housekeeping
from storage.nearness import Fields
from storage.queries import agents, plans, studies, tried, workloads
from storage.queries.plans import NearPlan, WantedPlans
from storage.records import (
    AbandonedTrial,
    AgentRecord,
    BestPlan,
    CompileDecision,
    FinishedTrial,
    LayerProfile,
    RunningTrial,
    StudyRecord,
    TrialResult,
    TrialSummary,
    TriedPlan,
)
from storage.trainings import Trainings
from storage.upkeep import schema
from trials.plan import Plan
from trials.workload import Software, Workload

NO_PARAMETERS: Mapping[str, object] = MappingProxyType({})


def open_store(database_url: str | None = None, *, lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS) -> "Store":
    """Open the store at a `sqlite:///` or `postgresql://` URL, and create or upgrade its tables if necessary.

    Without a URL, open the user's own SQLite file. Any number of processes may open the same new database at once.
    Wait up to `lock_timeout_seconds` for a lock that another program holds.
    Raise BadUrl, DatabaseUnavailable, or OtherVersion with the database untouched.
    """
    database = Database(url.parse(url.default_url() if database_url is None else database_url), lock_timeout_seconds)
    try:
        schema.prepare(database)
    # Also for Ctrl-C: no caller has the connections yet.
    except BaseException:
        database.close()
        raise
    return Store(database)


class Store(Trainings, Housekeeping):
    """Results of all studies in one database.

    Thread safety: threads may share a store, and processes its database; a forked child must open its own store.
    Each method is one transaction, which is committed and on disk when the method returns. Returned values are
    immutable and belong to the caller. Any method may raise DatabaseUnavailable, and UnknownRecord for an unknown id.
    """

    def __repr__(self) -> str:
        return f"Store({self.masked_url!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._database.close()

    @property
    def optuna_url(self) -> str:
        """The URL for Optuna's `RDBStorage`, with the password: never show it."""
        return self._database.url.render_as_string(hide_password=False)

    @property
    def masked_url(self) -> str:
        """The URL without its password, for messages."""
        return url.masked(self._database.url)

    @property
    def name(self) -> str:
        """The name of the file or of the server's database, for messages."""
        return Path(self._database.url.database or "").name

    @property
    def revision(self) -> str | None:
        """The revision of the tables, such as `0100`."""
        return schema.revision(self._database)

    def add_workload(self, workload: Workload) -> str:
        """Store the workload unless it is stored already, and return its fingerprint."""
        with self._database.transaction(write=True) as connection:
            return workloads.add(connection, workload)

    def workload(self, fingerprint: str) -> Workload:
        with self._database.transaction() as connection:
            return workloads.get(connection, fingerprint)

    def layer_profile(
        self, hardware_fingerprint: str, model_fingerprint: str, software: Software
    ) -> LayerProfile | None:
        """Return the profile of exactly this hardware, model and software, or None."""
        with self._database.transaction() as connection:
            return workloads.layer_profile(connection, hardware_fingerprint, model_fingerprint, software)

    def layer_profiles(self, *, hardware_name: str | None = None) -> tuple[LayerProfile, ...]:
        """Return the profiles, newest first, optionally only those whose device name contains `hardware_name`."""
        with self._database.transaction() as connection:
            return workloads.layer_profiles(connection, hardware_name)

    def save_layer_profile(
        self, hardware_fingerprint: str, model_fingerprint: str, software: Software, document: str
    ) -> None:
        """Store a JSON text, replacing an earlier one. Hardware and model must belong to a stored workload."""
        with self._database.transaction(write=True) as connection:
            workloads.save_layer_profile(connection, hardware_fingerprint, model_fingerprint, software, document)

    def compile_decisions(self, workload_fingerprint: str) -> tuple[CompileDecision, ...]:
        """Return the decisions for trainings on a workload with layers as they are, newest first."""
        with self._database.transaction() as connection:
            return workloads.compile_decisions(connection, workload_fingerprint)

    def keep_compile_decision(self, decision: CompileDecision, *, anew: bool = False) -> CompileDecision:
        """Store the decision, and return it. Where one is stored for this length, that stays, unless `anew`."""
        with self._database.transaction(write=True) as connection:
            return workloads.keep_compile_decision(connection, decision, anew=anew)

    def add_agent(self, machine: str, process: str) -> AgentRecord:
        """Register a process that will run trials; `AgentRecord` describes the arguments."""
        with self._database.transaction(write=True) as connection:
            return agents.add(connection, machine, process)

    def beat(self, agent_id: str) -> Mapping[str, AgentRecord]:
        """Record a heartbeat of the agent, and return all agents that have not ended, by id, including itself."""
        with self._database.transaction(write=True) as connection:
            return agents.beat(connection, agent_id)

    def agents(self) -> Mapping[str, AgentRecord]:
        """Return all agents that have not ended, by id."""
        with self._database.transaction() as connection:
            return agents.present(connection)

    def take_resources(self, agent_id: str, resources: Collection[str], gone: Collection[str] = ()) -> None:
        """Lease all resources to the agent until it ends, or none of them. End holders whose ids are in `gone`.

        Raise ResourceHeld if another agent holds one, and Superseded if the agent itself was ended.
        """
        with self._database.transaction(write=True) as connection:
            agents.take(connection, agent_id, resources, gone)

    def end_agent(self, agent_id: str) -> None:
        """End the agent and release its leases. Later calls have no effect."""
        with self._database.transaction(write=True) as connection:
            agents.end(connection, agent_id)

    def create_study(
        self,
        workload_fingerprint: str,
        settings: Mapping[str, object],
        seed: int,
        agent_id: str | None = None,
        *,
        model_name: str | None = None,
    ) -> StudyRecord:
        """Create a study that starts now, on which the agent works; `settings` are JSON values.

        It is named by `model_name`: the model that is stored may have been of another folder of the same architecture.
        """
        with self._database.transaction(write=True) as connection:
            return studies.create(
                connection, workload_fingerprint, settings, seed, agent_id=agent_id, model_name=model_name
            )

    def join_study(
        self,
        workload_fingerprint: str,
        settings: Mapping[str, object],
        seed: int,
        same: Callable[[StudyRecord], bool],
        agent_id: str | None = None,
        *,
        model_name: str | None = None,
    ) -> StudyRecord:
        """Return the newest study, or an unfinished one, that `same` accepts, else create one; the agent works on it.

        If several processes call this at once, one of them creates the study and all return it. Archived studies do
        not count, here and in all methods but those that name a study or plan, and those with `archived`.
        """
        with self._database.transaction(write=True) as connection:
            return studies.join(
                connection, workload_fingerprint, settings, seed, same, agent_id=agent_id, model_name=model_name
            )

    def study(self, study_id: str) -> StudyRecord:
        with self._database.transaction() as connection:
            return studies.get(connection, study_id)

    def lead_study(self, study_id: str, agent_id: str, instead_of: str | None = None) -> None:
        """Make the agent the leader, which concludes the study, if there is none or it is `instead_of`."""
        with self._database.transaction(write=True) as connection:
            agents.lead(connection, study_id, agent_id, instead_of)

    def conclude_study(self, best: BestPlan, calibration_state: str, agent_id: str) -> bool:
        """Finish a study with its winner and calibration state (JSON), if it is unfinished and led by the agent.

        Otherwise return False and store nothing.
        """
        with self._database.transaction(write=True) as connection:
            if not studies.conclude(connection, best.study_id, calibration_state, agent_id):
                return False
            plans.save(connection, best)
            return True

    def studies(
        self,
        *,
        model_name: str | None = None,
        tag: str | None = None,
        archived: bool = False,
        limit: int | None = None,
    ) -> tuple[StudyRecord, ...]:
        """Return the studies that meet all given conditions, newest first; `archived` adds the archived ones.

        `model_name` matches any part of the stored one, in any case.
        """
        with self._database.transaction() as connection:
            return studies.listed(connection, model_name, tag, limit, archived=archived)

    def find_study(self, name: str) -> StudyRecord:
        """Return the study whose name or id begins with `name`. Raise UnknownRecord and AmbiguousId."""
        with self._database.transaction() as connection:
            return studies.find(connection, name)

    def calibration_state(self, workload: Workload) -> str | None:
        """Return the calibration state of the last finished study with this model family, dtype and kind of device."""
        with self._database.transaction() as connection:
            return studies.calibration_state(connection, workload)

    def start_trial(
        self,
        study_id: str,
        plan: Plan,
        role: str,
        parameters: Mapping[str, object] = NO_PARAMETERS,
        agent_id: str | None = None,
    ) -> RunningTrial:
        """Start a trial with the next number of the study, also while other processes start trials of it.

        Raise Superseded if the agent has ended.
        """
        with self._database.transaction(write=True) as connection:
            return studies.start_trial(connection, study_id, plan, role, parameters, agent_id=agent_id)

    def claim_trial(
        self,
        study_id: str,
        plan: Plan,
        role: str,
        parameters: Mapping[str, object],
        agent_id: str,
        *,
        finished: int = 0,
    ) -> RunningTrial | None:
        """Start a trial, unless one of the plan runs in the study or more than `finished` of them are finished."""
        with self._database.transaction(write=True) as connection:
            if studies.is_taken(connection, study_id, plan, finished):
                return None
            return studies.start_trial(connection, study_id, plan, role, parameters, agent_id=agent_id)

    def finish_trial(self, result: TrialResult) -> None:
        """Store a result, also of an abandoned trial. It never changes; storing the same one again has no effect.

        Raise AlreadyFinished if the trial has a different result.
        """
        with self._database.transaction(write=True) as connection:
            studies.finish_trial(connection, result)

    def abandon_trial(self, trial_id: str) -> None:
        """Mark a running trial, whose process is gone, as abandoned; a finished trial stays finished."""
        with self._database.transaction(write=True) as connection:
            studies.abandon_trial(connection, trial_id)

    def running_trials(self) -> tuple[RunningTrial, ...]:
        """Return the running trials of all studies, in order of start."""
        with self._database.transaction() as connection:
            return studies.running(connection)

    def trials(
        self, study_id: str, *, known: Collection[str] = ()
    ) -> tuple[RunningTrial | AbandonedTrial | FinishedTrial, ...]:
        """Return the trials of the study but those whose ids are `known`, in order of number.

        Empty for an unknown study.
        """
        with self._database.transaction() as connection:
            return studies.trials(connection, study_id, known)

    def summaries(self, *study_ids: str) -> tuple[TrialSummary, ...]:
        """Return summaries of the finished trials of all these studies, oldest first."""
        with self._database.transaction() as connection:
            return studies.summaries(connection, study_ids)

    def answers(self, workload_fingerprint: str) -> tuple[FinishedTrial, ...]:
        """Return the finished trials of all studies on exactly this workload, oldest first: they need no second run.

        Those of studies that were imported or archived are left out.
        """
        with self._database.transaction() as connection:
            return studies.answers(connection, workload_fingerprint)

    def comparable_trials(self, workload: Workload) -> tuple[FinishedTrial, ...]:
        """Return the finished trials, oldest first, whose measurements are informative for this workload.

        Only the name of the model, the number of devices, the rest of the machine and the memory limit may differ.
        """
        with self._database.transaction() as connection:
            return studies.comparable(connection, workload)

    def best_plans(
        self,
        *,
        hardware_fingerprint: str | None = None,
        hardware_name: str | None = None,
        model_name: str | None = None,
        workload_fingerprint: str | None = None,
        tag: str | None = None,
        archived: bool = False,
        limit: int | None = None,
    ) -> tuple[BestPlan, ...]:
        """Return the winners that meet all given conditions; `archived` adds those of archived studies.

        Names match any part of the stored one, in any case; `tag` is one of the plan.

        The workload that was searched last comes first, and within a workload the fastest plan.
        """
        wanted = WantedPlans(
            hardware_fingerprint=hardware_fingerprint,
            hardware_name=hardware_name,
            model_name=model_name,
            workload_fingerprint=workload_fingerprint,
            tag=tag,
            archived=archived,
        )
        with self._database.transaction() as connection:
            return plans.listed(connection, wanted, limit)

    def count_best_plans(self) -> int:
        """Return the number of all winners, without reading them."""
        with self._database.transaction() as connection:
            return plans.count(connection)

    def nearest_plans(
        self,
        now: Fields,
        *,
        hardware_name: str | None = None,
        model_name: str | None = None,
        tag: str | None = None,
        archived: bool = False,
        limit: int = 10,
    ) -> tuple[NearPlan, ...]:
        """Return the winners whose workloads are nearest to `now`, which may lack fields.

        At equal distance the fastest comes first. `storage.nearness` defines the distance.
        """
        wanted = WantedPlans(hardware_name=hardware_name, model_name=model_name, tag=tag, archived=archived)
        with self._database.transaction() as connection:
            return plans.nearest(connection, now, wanted, limit)

    def last_winner(self, workload_fingerprint: str) -> BestPlan | None:
        """Return the winner of the newest study on exactly this workload, without imported ones, or None."""
        with self._database.transaction() as connection:
            return plans.last(connection, workload_fingerprint)

    def winner(self, study_id: str) -> BestPlan | None:
        """Return the winner of the study, or None while there is none."""
        with self._database.transaction() as connection:
            return plans.of_study(connection, study_id)

    def find_plan(self, id_prefix: str, now: Workload | None = None, *, study_id: str | None = None) -> TriedPlan:
        """Return the tried plan whose id begins with `id_prefix`, with its record in one study: `study_id` if given.

        Of several studies, prefer the most valid one for the workload `now`, then one that the plan won, then local
        studies to imported ones, then the newest. Raise UnknownPlan, with the nearest ids, and AmbiguousId.
        """
        with self._database.transaction() as connection:
            return tried.find(connection, id_prefix, now, study_id)

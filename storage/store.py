"""The store: everything that is remembered, behind one object."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from storage import bundles
from storage.bundles import Imported
from storage.database import url
from storage.database.engine import LOCK_TIMEOUT_SECONDS, Database
from storage.nearness import Fields
from storage.queries import agents, launches, plans, studies, tried, workloads
from storage.queries.plans import NearPlan, Wanted
from storage.records import (
    AbandonedTrial,
    AgentRecord,
    BestPlan,
    FinishedTrial,
    LaunchRecord,
    LaunchResult,
    LayerProfile,
    RunningTrial,
    StudyRecord,
    TrialResult,
    TriedPlan,
)
from storage.upkeep import health, schema
from storage.upkeep.health import Problem
from trials.plan import Plan
from trials.workload import ModelShape, Software, Workload

NO_PARAMETERS: Mapping[str, object] = MappingProxyType({})


def open_store(database_url: str | None = None, *, lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS) -> "Store":
    """The store at a `sqlite:///` or `postgresql://` URL, created or upgraded when it needs to be.

    Without a URL it is the user's own SQLite file. Any number of processes may open the same new database at once.
    A lock that another program holds is waited for as long as `lock_timeout_seconds`.
    Raises BadUrl, DatabaseUnavailable, or DatabaseTooNew with the database untouched.
    """
    database = Database(url.parse(url.default_url() if database_url is None else database_url), lock_timeout_seconds)
    try:
        schema.prepare(database)
    except BaseException:
        database.close()
        raise
    return Store(database)


class Store:
    """Results of all studies in one database.

    Threads may share a store and processes may share its database; a forked child opens its own store. Each method is
    one transaction, committed and on disk when it returns. What it returns belongs to the caller and never changes.
    Every method raises DatabaseUnavailable, and UnknownRecord for an id that nothing is stored under.
    """

    def __init__(self, database: Database) -> None:
        """Takes over an open database with current tables; `open_store` makes one."""
        self._database = database

    def __repr__(self) -> str:
        return f"Store({self.masked_url!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._database.close()

    @property
    def optuna_url(self) -> str:
        """For Optuna's `RDBStorage`, whose tables live beside ours. It holds the password: never show it."""
        return self._database.url.render_as_string(hide_password=False)

    @property
    def masked_url(self) -> str:
        """For people: without a password."""
        return url.masked(self._database.url)

    @property
    def name(self) -> str:
        """Of the file or the server's database, for people."""
        return Path(self._database.url.database or "").name

    @property
    def revision(self) -> str | None:
        """Of the tables, as the migrations count."""
        return schema.revision(self._database)

    def exclusive(self) -> AbstractContextManager[None]:
        """Other processes that ask for the same wait meanwhile, also those that create tables."""
        return schema.lock(self._database)

    def add_workload(self, workload: Workload) -> str:
        """Its fingerprint; a workload that is stored already is left as it is."""
        with self._database.session(write=True) as session:
            return workloads.add(session, workload)

    def adopt_model(self, model: ModelShape, path_digest: str) -> None:
        """Recognises what an older version stored of this model, which knew it by a digest with its path in it.

        Studies, plans, launches and the layer profile of that model are those of `model` from now on.
        """
        with self._database.session(write=True) as session:
            workloads.adopt_model(session, model, path_digest)

    def workload(self, fingerprint: str) -> Workload:
        with self._database.session() as session:
            return workloads.get(session, fingerprint)

    def layer_profile(
        self, hardware_fingerprint: str, model_fingerprint: str, software: Software
    ) -> LayerProfile | None:
        """What was saved for exactly these; None when there is none."""
        with self._database.session() as session:
            return workloads.layer_profile(session, hardware_fingerprint, model_fingerprint, software)

    def layer_profiles(self, *, hardware_name: str | None = None) -> tuple[LayerProfile, ...]:
        """Every profile, or those of devices with the name as a part of theirs, in either case; the newest first."""
        with self._database.session() as session:
            return workloads.layer_profiles(session, hardware_name)

    def save_layer_profile(
        self, hardware_fingerprint: str, model_fingerprint: str, software: Software, document: str
    ) -> None:
        """Keeps a JSON text in place of an earlier one. The hardware and model must belong to an added workload."""
        with self._database.session(write=True) as session:
            workloads.save_layer_profile(session, hardware_fingerprint, model_fingerprint, software, document)

    def add_agent(self, machine: str, process: str) -> AgentRecord:
        """A process that will run trials, as `AgentRecord` describes it."""
        with self._database.session(write=True) as session:
            return agents.add(session, machine, process)

    def beat(self, agent_id: str) -> Mapping[str, AgentRecord]:
        """Says that the agent lives; all agents that have not ended, by id, itself among them."""
        with self._database.session(write=True) as session:
            return agents.beat(session, agent_id)

    def agents(self) -> Mapping[str, AgentRecord]:
        """All agents that have not ended, by id."""
        with self._database.session() as session:
            return agents.present(session)

    def take_resources(self, agent_id: str, resources: Collection[str], gone: Collection[str] = ()) -> None:
        """Gives all of them to the agent until it ends, or none. Holders that are known to be gone are ended.

        Raises ResourceHeld with another holder, and Superseded when the agent itself was ended.
        """
        with self._database.session(write=True) as session:
            agents.take(session, agent_id, resources, gone)

    def end_agent(self, agent_id: str) -> None:
        """Says that the agent runs nothing any more, and gives free what it holds; only the first call counts."""
        with self._database.session(write=True) as session:
            agents.end(session, agent_id)

    def create_study(self, workload_fingerprint: str, settings: Mapping[str, object], seed: int) -> StudyRecord:
        """A new search, begun now; `settings` are JSON values."""
        with self._database.session(write=True) as session:
            return studies.create(session, workload_fingerprint, settings, seed)

    def join_study(
        self,
        workload_fingerprint: str,
        settings: Mapping[str, object],
        seed: int,
        same: Callable[[StudyRecord], bool],
    ) -> StudyRecord:
        """The study that began last, if it is the `same` search, else a new one.

        Of any number of processes that ask at once, one creates it and all join it.
        """
        with self._database.session(write=True) as session:
            return studies.join(session, workload_fingerprint, settings, seed, same)

    def study(self, study_id: str) -> StudyRecord:
        with self._database.session() as session:
            return studies.get(session, study_id)

    def lead_study(self, study_id: str, agent_id: str, instead_of: str | None = None) -> None:
        """Makes this agent the one that ends the study, if none is or the one `instead_of` which it comes."""
        with self._database.session(write=True) as session:
            agents.lead(session, study_id, agent_id, instead_of)

    def conclude_study(self, best: BestPlan, lessons: str, agent_id: str) -> bool:
        """Keeps the winner of a study, what was learnt, as JSON, and its end, all at once.

        False, and nothing is kept, unless the study is unfinished and this agent leads it.
        """
        with self._database.session(write=True) as session:
            if not studies.conclude(session, best.study_id, lessons, agent_id):
                return False
            plans.save(session, best)
            return True

    def latest_study(self, workload_fingerprint: str) -> StudyRecord | None:
        """The study that began last, finished or not."""
        with self._database.session() as session:
            return studies.latest(session, workload_fingerprint)

    def studies(self, *, model_name: str | None = None, limit: int | None = None) -> tuple[StudyRecord, ...]:
        """Every study, or those on models with the name as a part of theirs; the one that began last comes first."""
        with self._database.session() as session:
            return studies.listed(session, model_name, limit)

    def find_study(self, name: str) -> StudyRecord:
        """The study whose name or id begins so. Raises UnknownRecord and AmbiguousId."""
        with self._database.session() as session:
            return studies.find(session, name)

    def lessons(self, workload: Workload) -> str | None:
        """Of the study that ended last with the same model family, dtype and kind of devices; None without one."""
        with self._database.session() as session:
            return studies.lessons(session, workload)

    def start_trial(
        self,
        study_id: str,
        plan: Plan,
        role: str,
        parameters: Mapping[str, object] = NO_PARAMETERS,
        agent_id: str | None = None,
    ) -> RunningTrial:
        """A trial with the study's next number, whichever processes start others meanwhile.

        Raises Superseded when the agent has ended.
        """
        with self._database.session(write=True) as session:
            return studies.start_trial(session, study_id, plan, role, parameters, agent_id=agent_id)

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
        """As `start_trial`, unless a trial of the plan runs in the study: of many that claim it, one has it.

        Nor when more of its trials are finished than the `finished` ones that the caller knows.
        """
        with self._database.session(write=True) as session:
            if studies.is_taken(session, study_id, plan, finished):
                return None
            return studies.start_trial(session, study_id, plan, role, parameters, agent_id=agent_id)

    def finish_trial(self, result: TrialResult) -> None:
        """Keeps the result for ever, also that of an abandoned trial. Giving the same result again does nothing.

        Raises AlreadyFinished when the trial has another result.
        """
        with self._database.session(write=True) as session:
            studies.finish_trial(session, result)

    def abandon_trial(self, trial_id: str) -> None:
        """Gives up a trial whose process is gone; a trial that is finished stays finished."""
        with self._database.session(write=True) as session:
            studies.abandon_trial(session, trial_id)

    def running_trials(self, study_id: str | None = None) -> tuple[RunningTrial, ...]:
        """Of every study, or of one, in order of start. Empty for an unknown study."""
        with self._database.session() as session:
            return studies.running(session, study_id)

    def trials(self, study_id: str) -> tuple[RunningTrial | AbandonedTrial | FinishedTrial, ...]:
        """In order of number. Empty for an unknown study."""
        with self._database.session() as session:
            return studies.trials(session, study_id)

    def answers(self, workload_fingerprint: str) -> tuple[FinishedTrial, ...]:
        """Finished trials of every study on exactly this workload, oldest first: no need to run these again."""
        with self._database.session() as session:
            return studies.answers(session, workload_fingerprint)

    def comparable_trials(self, workload: Workload) -> tuple[FinishedTrial, ...]:
        """Finished trials of every study whose times and bytes say something of this workload, oldest first.

        Model (but for its name), data, batch, `oversize`, software and the kind of devices are the same; how many
        devices there are, the machine around them and the memory limit may differ.
        """
        with self._database.session() as session:
            return studies.comparable(session, workload)

    def best_plans(
        self,
        *,
        hardware_fingerprint: str | None = None,
        hardware_name: str | None = None,
        model_name: str | None = None,
        workload_fingerprint: str | None = None,
        limit: int | None = None,
    ) -> tuple[BestPlan, ...]:
        """Winners that meet every given condition; a name may be a part of the stored one, in either case.

        The workload that was searched last comes first, and within a workload the fastest plan.
        """
        with self._database.session() as session:
            return plans.listed(
                session,
                Wanted(
                    hardware_fingerprint=hardware_fingerprint,
                    hardware_name=hardware_name,
                    model_name=model_name,
                    workload_fingerprint=workload_fingerprint,
                ),
                limit,
            )

    def nearest_plans(
        self, now: Fields, *, hardware_name: str | None = None, model_name: str | None = None, limit: int = 10
    ) -> tuple[NearPlan, ...]:
        """Winners whose workloads differ least from the fields of the one at hand, which need not be all.

        Those of the same distance come with the fastest first. `storage.nearness` has the weights.
        """
        with self._database.session() as session:
            return plans.nearest(session, now, Wanted(hardware_name=hardware_name, model_name=model_name), limit)

    def last_winner(self, workload_fingerprint: str) -> BestPlan | None:
        """Of the study that began last on exactly this workload, with this database; None without one."""
        with self._database.session() as session:
            return plans.last(session, workload_fingerprint)

    def winner(self, study_id: str) -> BestPlan | None:
        """Of the study; None while it has none."""
        with self._database.session() as session:
            return plans.of_study(session, study_id)

    def find_plan(self, id_prefix: str, now: Workload | None = None) -> TriedPlan:
        """The plan whose id begins so, of all that studies tried, and what one study says of it.

        Of several studies the one that holds best on the workload `now`; then one that the plan won; then the newest
        from here. Raises UnknownPlan, with the nearest ids, and AmbiguousId.
        """
        with self._database.session() as session:
            return tried.find(session, id_prefix, now)

    def start_launch(
        self,
        plan: Plan,
        workload_fingerprint: str,
        predicted_samples_per_second: float | None,
        agent_id: str | None = None,
    ) -> LaunchRecord:
        """A full training, begun now."""
        with self._database.session(write=True) as session:
            return launches.start(session, plan, workload_fingerprint, predicted_samples_per_second, agent_id)

    def finish_launch(self, result: LaunchResult) -> None:
        """Keeps how it ended; the same again does nothing. Raises AlreadyFinished when it ended otherwise."""
        with self._database.session(write=True) as session:
            launches.finish(session, result)

    def running_launches(self) -> tuple[LaunchRecord, ...]:
        """Every training whose end is not known, oldest first; its agent tells whether it still runs."""
        with self._database.session() as session:
            return launches.running(session)

    def launches(self, plan_id: str) -> tuple[LaunchRecord, ...]:
        """Every training with the plan, oldest first. Empty for an unknown plan."""
        with self._database.session() as session:
            return launches.of_plan(session, plan_id)

    def export_studies(self, study_ids: Sequence[str], source: str) -> Iterator[str]:
        """The lines of a bundle with all that belongs to them; `source` names this database for people.

        Raises UnknownRecord, and UnfinishedStudy for one that has no winner yet.
        """
        with self._database.session(snapshot=True) as session:
            for study_id in study_ids:
                studies.check_finished(session, study_id)
            yield from bundles.lines(session, study_ids, source)

    def import_bundle(self, path: Path) -> Imported:
        """Stores what `export_studies` wrote and this database does not hold; nothing happens the second time.

        Every row is remembered with where it came from. Raises BadBundle, with nothing stored.
        """
        with bundles.opened(path) as text:
            digest = bundles.check(text)
        with self.exclusive(), bundles.opened(path) as text, self._database.session(write=True) as session:
            return bundles.take_in(session, text, digest)

    def problems(self) -> tuple[Problem, ...]:
        """Everything in the database that no version of this software writes; it reads all of it."""
        with self._database.session(snapshot=True) as session:
            return tuple(health.problems(session))

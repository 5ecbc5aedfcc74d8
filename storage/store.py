"""The store: the public interface to the database of all studies."""

from collections.abc import Mapping
from pathlib import Path
from typing import Self

from storage.database import url
from storage.database.engine import LOCK_TIMEOUT_SECONDS, Database
from storage.housekeeping import Housekeeping
from storage.nearness import Fields
from storage.queries import agents as agent_queries
from storage.queries import launches as launch_queries
from storage.queries import plans as plan_queries
from storage.queries import studies as study_queries
from storage.queries import tried as tried_queries
from storage.queries import workloads as workload_queries
from storage.queries.plans import NearPlan, WantedPlans
from storage.records import (
    BestPlan,
    RunningTrial,
)
from storage.transactions import reading, writing
from storage.upkeep import schema
from trials.plan import Plan


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


class Store(Housekeeping):
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

    add_workload = writing(workload_queries.add)
    workload = reading(workload_queries.get)
    layer_profile = reading(workload_queries.layer_profile)
    layer_profiles = reading(workload_queries.layer_profiles)
    save_layer_profile = writing(workload_queries.save_layer_profile)
    add_agent = writing(agent_queries.add)
    beat = writing(agent_queries.beat)
    agents = reading(agent_queries.present)
    take_resources = writing(agent_queries.take)
    end_agent = writing(agent_queries.end)
    create_study = writing(study_queries.create)
    join_study = writing(study_queries.join)
    study = reading(study_queries.get)
    lead_study = writing(agent_queries.lead)

    def conclude_study(self, best: BestPlan, calibration_state: str, agent_id: str) -> bool:
        """Finish a study with its winner and calibration state (JSON), if it is unfinished and led by the agent.

        Otherwise return False and store nothing.
        """
        with self._database.transaction(write=True) as connection:
            if not study_queries.conclude(connection, best.study_id, calibration_state, agent_id):
                return False
            plan_queries.save(connection, best)
            return True

    studies = reading(study_queries.listed)
    find_study = reading(study_queries.find)
    calibration_state = reading(study_queries.calibration_state)
    start_trial = writing(study_queries.start_trial)

    def claim_trial(
        self,
        study_id: str,
        plan: Plan,
        role: str,
        parameters: Mapping[str, object],
        *,
        agent_id: str,
        finished: int = 0,
    ) -> RunningTrial | None:
        """Start a trial, unless one of the plan runs in the study or more than `finished` of them are finished."""
        with self._database.transaction(write=True) as connection:
            if study_queries.is_taken(connection, study_id, plan, finished):
                return None
            return study_queries.start_trial(connection, study_id, plan, role, parameters, agent_id=agent_id)

    finish_trial = writing(study_queries.finish_trial)
    abandon_trial = writing(study_queries.abandon_trial)
    running_trials = reading(study_queries.running)
    trials = reading(study_queries.trials)
    summaries = reading(study_queries.summaries)
    answers = reading(study_queries.answers)
    comparable_trials = reading(study_queries.comparable)

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
            return plan_queries.listed(connection, wanted, limit)

    count_best_plans = reading(plan_queries.count)

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
            return plan_queries.nearest(connection, now, wanted, limit)

    last_winner = reading(plan_queries.last)
    winner = reading(plan_queries.of_study)
    find_plan = reading(tried_queries.find)

    start_launch = writing(launch_queries.start)
    add_window = writing(launch_queries.add_window)
    finish_launch = writing(launch_queries.finish)
    running_launches = reading(launch_queries.running)
    launches = reading(launch_queries.of_plan)

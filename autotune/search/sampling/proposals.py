"""The Optuna study of a search: what was tried, and what to try next. It can be rebuilt from the tables of trials."""

import json
import logging
import math
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

import optuna
from optuna.artifacts import FileSystemArtifactStore, upload_artifact
from optuna.distributions import check_distribution_compatibility
from optuna.exceptions import ExperimentalWarning, StorageInternalError, UpdateFinishedTrialError
from optuna.pruners import BasePruner
from optuna.storages import BaseStorage, RDBStorage
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError
from typing_extensions import override

from autotune.errors import JobError
from autotune.plan_text import plan_text
from autotune.search.execution.run_result import StepCallback
from autotune.search.roles import Role
from autotune.search.sampling.attributes import AGENT_ID, ROLE, TRIAL_ID, trial_attributes
from autotune.search.sampling.context import SamplerContext, SamplerModule
from autotune.search.sampling.hub import HUB, hub_sampler
from storage.database.engine import explain
from storage.errors import DatabaseUnavailable, UnknownRecord
from storage.records import FinishedTrial
from trials import plugins
from trials.errors import UnknownName
from trials.outcome import Completed, Failed, Outcome, OutOfMemory, Rejected

_log = logging.getLogger(__name__)
SAMPLERS: plugins.Plugins[SamplerModule] = plugins.Plugins("autotune.search.samplers")
_OBJECTIVE = "epoch seconds"
# As long as this program waits for its own database, see `LOCK_TIMEOUT_SECONDS` of storage.
_LOCK_SECONDS = 120
_CONSTRAINTS = "constraints"
"""Where Optuna keeps a list of them, and the one place where its dashboard (0.21) looks; it knows no named ones yet."""
_ARTIFACT = "artifacts:"
"""Beginning of the system attributes in which Optuna keeps what it knows of an artifact, as JSON."""
_REJECTED = 1.0
"""Violation of a plan that was rejected: far above that of one that lacked some per cent of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """An outcome as Optuna gets it: a value, a value with a violated constraint, or a failure without either."""

    state: TrialState
    value: float | None
    violation: float | None
    """Share by which an infeasible plan exceeds the limit; 0 for a feasible one, None where that is unknown."""

    @classmethod
    def nothing(cls) -> "Judgement":
        """Return the judgement of a suggestion without a trial, or of a failure that is not due to the plan."""
        return cls(state=TrialState.FAIL, value=None, violation=None)


def judge(outcome: Outcome, epoch_seconds: float | None, predicted_seconds: float) -> Judgement:
    """Return what Optuna gets of an outcome: an infeasible plan keeps its predicted value and violates a constraint."""
    match outcome:
        case Completed(shortened=True):
            return Judgement(state=TrialState.PRUNED, value=None, violation=0.0)
        case Completed():
            return Judgement(state=TrialState.COMPLETE, value=epoch_seconds, violation=0.0)
        case Failed(cause=OutOfMemory(needed_bytes=needed, limit_bytes=limit)):
            violation = max(needed / limit - 1, 1e-3)
            return Judgement(state=TrialState.COMPLETE, value=predicted_seconds, violation=violation)
        case Rejected():
            return Judgement(state=TrialState.COMPLETE, value=predicted_seconds, violation=_REJECTED)
        case _:
            return Judgement.nothing()


def load_sampler(name: str) -> SamplerModule:
    """Return the sampler that `search.sampler` names. Raise JobError."""
    if name.startswith(HUB):
        return hub_sampler(name)
    try:
        return plugins.load(SAMPLERS, name)
    except UnknownName as error:
        raise JobError(f"search.sampler: {error}") from error


@contextmanager
def database(url: str, exclusive: AbstractContextManager[None] | None = None) -> Iterator[BaseStorage]:
    """Open Optuna's tables in a database. Missing ones are created under `exclusive`, a lock of the database."""
    connect = {"connect_args": {"timeout": _LOCK_SECONDS}} if url.startswith("sqlite") else {"pool_pre_ping": True}
    with exclusive or nullcontext(), _errors():
        try:
            storage = RDBStorage(url, engine_kwargs=connect)
        except RuntimeError as error:  # another version of Optuna made the tables
            raise StorageInternalError from error
    try:
        yield storage
    finally:
        storage.remove_session()
        storage.engine.dispose()


def delete_studies(url: str, exclusive: AbstractContextManager[None], names: Iterable[str]) -> None:
    """Delete the Optuna studies with these names, as far as there are any. Raise DatabaseUnavailable."""
    with database(url, exclusive) as storage, _errors():
        for name in names:
            with suppress(KeyError):  # there is none: it was imported, or ended before its first trial
                storage.delete_study(storage.get_study_id_from_name(name))


def attach(url: str, exclusive: AbstractContextManager[None], name: str, file: Path, folder: Path) -> str:
    """Store a file among the artifacts in a folder, as one of the Optuna study with this name; return its id.

    It replaces the study's artifact with the same file name. Raise UnknownRecord where there is no such study, OSError
    where the folder cannot be written, and DatabaseUnavailable.
    """
    artifacts = FileSystemArtifactStore(folder)
    with database(url, exclusive) as storage, _errors():
        try:
            attributes = storage.get_study_system_attrs(storage.get_study_id_from_name(name))
        except KeyError as error:
            raise UnknownRecord(
                f"Optuna has no study {name}, because it was imported, ended before its first trial, or could not be "
                "read in a repair; leave out --artifacts"
            ) from error
        # Optuna's own list of them fails where its dashboard has deleted one, which leaves a null.
        known = (json.loads(value) for key, value in attributes.items() if key.startswith(_ARTIFACT))
        former = next((each["artifact_id"] for each in known if each and each["filename"] == file.name), None)
        if former is None:
            study = optuna.load_study(study_name=name, storage=storage)
            return upload_artifact(artifact_store=artifacts, file_path=str(file), study_or_trial=study)
        with file.open("rb") as content:
            artifacts.write(former, content)
        return str(former)


@contextmanager
def _errors() -> Iterator[None]:
    """Raise DatabaseUnavailable for errors of the database; Optuna's own messages name no URL."""
    try:
        yield
    except (StorageInternalError, SQLAlchemyError) as error:
        cause = error.__cause__ if isinstance(error, StorageInternalError) else None
        raise DatabaseUnavailable(explain("Optuna's tables in the database", cause or error)) from None


class Proposals:
    """Optuna study over the parameters of a space, which an Optuna dashboard can open."""

    def __init__(self, storage: BaseStorage, name: str, sampler: str, context: SamplerContext) -> None:
        """Create the study, or open the one of that name.

        Raise JobError for an unknown sampler, and where the study has another space.
        """
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._space = context.space
        self._storage = storage
        suggesting = load_sampler(sampler).sampler(context)
        with _errors():
            self._study = optuna.create_study(
                storage=storage, study_name=name, sampler=suggesting, pruner=ClearlyWorse(), load_if_exists=True
            )
            self._study_id = storage.get_study_id_from_name(name)
            # Optuna marks this method as experimental; it only names the axis in the dashboard.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ExperimentalWarning)
                self._study.set_metric_names([_OBJECTIVE])
            self._check_space()

    def _check_space(self) -> None:
        # Optuna refuses parameters with other choices than in earlier trials, by an error without a remedy.
        for trial in self._study.get_trials(deepcopy=False):
            for name, values in self._space.distributions.items():
                try:
                    check_distribution_compatibility(trial.distributions.get(name, values), values)
                except ValueError:
                    raise JobError(
                        f"this search was started with other values of {name}, as after another profile or with other "
                        "packers; start a new one with --fresh, which keeps all trials"
                    ) from None

    @_errors()
    def synchronize(
        self,
        trials: Iterable[FinishedTrial],
        judged: Callable[[FinishedTrial], Judgement],
        is_left: Callable[[str | None], bool] = lambda _: True,
    ) -> None:
        """Fail the open trials of agents for which `is_left` is true, and add the trials that the study lacks.

        No other agent may do so meanwhile.
        """
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING, TrialState.WAITING)):
            if is_left(trial.user_attrs.get(AGENT_ID)):
                self._study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
        known = {trial.user_attrs.get(TRIAL_ID) for trial in self._study.get_trials(deepcopy=False)}
        for record in trials:
            if record.id not in known:
                self.add(record, judged(record))

    @_errors()
    def suggest(self, agent_id: str | None = None) -> optuna.Trial:
        """Ask the sampler for the next point, for an agent. It is open until `tell`."""
        trial = self._study.ask(self._space.distributions)
        if agent_id is not None:
            trial.set_user_attr(AGENT_ID, agent_id)
        return trial

    @_errors()
    def pruning(self, trial: optuna.Trial, to_beat: float | None) -> StepCallback:
        """Return a callback for the steps of a suggested trial that asks the study's pruner; see `pruner.TO_BEAT`."""
        numbers = count()
        trial.set_user_attr(TO_BEAT, to_beat)

        def report(epoch_seconds: float) -> bool:
            try:
                trial.report(epoch_seconds, next(numbers))
                return not trial.should_prune()
            # A failing database must not cost a measurement.
            except (StorageInternalError, SQLAlchemyError, UpdateFinishedTrialError) as error:
                _log.info("a step could not be reported to Optuna: %s", error)
                return True

        return report

    @_errors()
    def describe(self, attributes: Mapping[str, Any]) -> None:
        """Set user attributes of the study; the values are JSON values."""
        for name, value in attributes.items():
            self._study.set_user_attr(name, value)

    def tell(self, trial: optuna.Trial, record: FinishedTrial | None, judgement: Judgement) -> None:
        """Finish a suggested trial. `record` is the trial in the store that it led to; None if it needed no run.

        A trial that another agent has failed meanwhile, because this one was silent, is added by `synchronize` later.
        """
        with suppress(UpdateFinishedTrialError), _errors():
            found = {} if record is None else trial_attributes(record)
            for name, value in {**found, ROLE: Role.SAMPLED}.items():
                trial.set_user_attr(name, value)
            if judgement.violation is not None:
                number = self._storage.get_trial_id_from_study_id_trial_number(self._study_id, trial.number)
                self._storage.set_trial_system_attr(number, _CONSTRAINTS, [judgement.violation])
            self._study.tell(trial, judgement.value, state=judgement.state)

    @_errors()
    def add(self, record: FinishedTrial, judgement: Judgement) -> None:
        """Add a trial that the sampler did not suggest here: a baseline, a seed, a repeat, or one of another run.

        Samplers do not learn from repeats (`Nearest`). Its parameters are those of its plan in this study's space; a
        plan outside it has none.
        """
        point = self._space.point(record.plan) or {}
        trial = optuna.trial.create_trial(
            state=judgement.state,
            value=judgement.value,
            params=point,
            distributions={name: self._space.distributions[name] for name in point},
            user_attrs={**trial_attributes(record), **({} if point else {"plan_text": plan_text(record.plan)})},
            system_attrs={} if judgement.violation is None else {_CONSTRAINTS: [judgement.violation]},
        )
        # `create_trial` has set both to the present time.
        trial.datetime_start, trial.datetime_complete = _local(record.started), _local(record.result.finished)
        self._study.add_trial(trial)


def _local(time: datetime) -> datetime:
    """Return the time as Optuna stores it: local, without a zone."""
    return time.astimezone().replace(tzinfo=None)


TO_BEAT = "to_beat_seconds"
"""Attribute with what the best plan would take now: the values in the study may be from when the machine was faster."""
# A standard deviation needs two.
_LEAST_STEPS = 2
# Choices: a plan that might win is worth more than the rest of its steps, so only 3 standard errors end a trial.
_CLEARLY = 3.0
"""Standard errors by which a trial has to be worse."""
_LEAST_ERROR = 0.03
"""Least standard error of the mean, as a share, since few steps may agree by chance."""


class ClearlyWorse(BasePruner):
    """Pruner of trials whose intermediate values have a mean above the attribute TO_BEAT by 3 standard errors.

    Each intermediate value is an estimate of the final one, from the ratio of one step to its prediction, so steps of
    plans with other packs can be compared. A trial without the attribute is not pruned.
    """

    @override
    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        estimates, to_beat = list(trial.intermediate_values.values()), trial.user_attrs.get(TO_BEAT)
        if to_beat is None or len(estimates) < _LEAST_STEPS:
            return False
        mean = statistics.fmean(estimates)
        error = max(statistics.stdev(estimates) / math.sqrt(len(estimates)), _LEAST_ERROR * mean)
        return bool(mean - _CLEARLY * error > to_beat)

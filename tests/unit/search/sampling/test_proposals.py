import shutil
import sqlite3
from dataclasses import replace
from datetime import UTC
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState

from autotune.errors import JobError
from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.sampling.advisor import Advisor
from autotune.search.sampling.attributes import study_attributes, trial_attributes
from autotune.search.sampling.context import SamplerContext
from autotune.search.sampling.proposals import Judgement, Proposals, database, judge
from autotune.search.space.space import Space
from storage.errors import DatabaseUnavailable
from storage.records import FinishedTrial
from tests.values.search import axes_of, finished, limits_of, padded_plan, predictor_of, solver_of, workload_of
from tests.values.storage import OUTCOMES, completed
from trials.job import SearchSection
from trials.outcome import Failed, OutOfMemory
from trials.plan import Plan

PREDICTOR = predictor_of()
SPACE = Space(axes_of(), solver_of(1 << 50, PREDICTOR))
PLANS = (*SPACE.starts, *SPACE.neighbours(SPACE.starts[0]))
GOOD = Judgement(state=TrialState.COMPLETE, value=100.0, violation=0.0)
TOO_LARGE = Judgement(state=TrialState.COMPLETE, value=90.0, violation=0.25)


def url_of(folder: Path) -> str:
    return f"sqlite:///{folder}/study.db"


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with Optuna's tables."""
    folder = tmp_path_factory.mktemp("tables")
    with database(url_of(folder)):
        pass
    return folder / "study.db"


@pytest.fixture(autouse=True)
def _made_before(tables: Path, tmp_path: Path) -> None:
    shutil.copy(tables, tmp_path)


def open_proposals(folder: Path, sampler: str = "tpe", seed: int = 0) -> Proposals:
    limits = limits_of(1 << 50)
    advisor = Advisor(SPACE, CalibratedPredictor(PREDICTOR), limits, SearchSection())
    with database(url_of(folder)) as storage:
        return Proposals(storage, "study", sampler, SamplerContext(space=SPACE, advisor=advisor, seed=seed))


def stored(folder: Path) -> list[FrozenTrial]:
    """Return the trials that any Optuna program sees."""
    return optuna.load_study(study_name="study", storage=url_of(folder)).get_trials()


def judged(trial: FinishedTrial) -> Judgement:
    return judge(trial.result.outcome, trial.result.epoch_seconds, 90.0)


def trial(number: int, kind: str = "completed", plan: Plan | None = None) -> FinishedTrial:
    """Return a trial of the plan with that number in the space, or of another plan."""
    values: dict[str, Any] = {"epoch_seconds": 100.0 + number} if kind == "completed" else {}
    return finished(plan or PLANS[number], OUTCOMES[kind], number, **values)


def test_a_completed_trial_is_judged_by_its_epoch() -> None:
    assert judge(OUTCOMES["completed"], 100.0, 90.0) == GOOD


def test_a_plan_that_did_not_fit_violates_a_constraint_by_its_share_above_the_limit() -> None:
    outcome = Failed(cause=OutOfMemory(stage=0, rank=0, needed_bytes=125, limit_bytes=100))
    assert judge(outcome, None, 90.0) == TOO_LARGE


def test_a_plan_that_did_not_fit_by_a_hair_violates_its_constraint_all_the_same() -> None:
    outcome = Failed(cause=OutOfMemory(stage=0, rank=0, needed_bytes=100, limit_bytes=100))
    assert (judge(outcome, None, 90.0).violation or 0.0) > 0


def test_a_rejected_plan_violates_the_constraint_more_than_one_that_nearly_fits() -> None:
    rejected = judge(OUTCOMES["rejected"], None, 90.0)
    assert (rejected.state, rejected.value) == (TrialState.COMPLETE, 90.0)
    assert (rejected.violation or 0.0) > (TOO_LARGE.violation or 0.0)


@pytest.mark.parametrize("kind", ["crash", "timeout"])
def test_an_outcome_that_does_not_depend_on_the_plan_is_a_failure_without_a_value(kind: str) -> None:
    assert judge(OUTCOMES[kind], None, 90.0) == Judgement.nothing()


def test_a_suggestion_is_a_point_of_the_space_and_open_until_tell(tmp_path: Path) -> None:
    proposals = open_proposals(tmp_path)
    suggestion = proposals.suggest()
    assert set(suggestion.params) == set(SPACE.distributions)
    assert [found.state for found in stored(tmp_path)] == [TrialState.RUNNING]
    proposals.tell(suggestion, trial(1), GOOD)
    (stored_trial,) = stored(tmp_path)
    assert (stored_trial.state, stored_trial.value, dict(stored_trial.constraints)) == (
        TrialState.COMPLETE,
        100.0,
        {"0": 0.0},
    )
    assert stored_trial.user_attrs == {**trial_attributes(trial(1)), "role": "sampled"}


def test_a_suggestion_without_a_plan_becomes_a_failure_without_a_stored_trial(tmp_path: Path) -> None:
    proposals = open_proposals(tmp_path)
    proposals.tell(proposals.suggest(), None, Judgement.nothing())
    (stored_trial,) = stored(tmp_path)
    assert (stored_trial.state, stored_trial.user_attrs) == (TrialState.FAIL, {"role": "sampled"})


def test_an_infeasible_plan_is_stored_with_its_violation(tmp_path: Path) -> None:
    proposals = open_proposals(tmp_path)
    proposals.tell(proposals.suggest(), trial(1, "out of memory"), TOO_LARGE)
    proposals.add(trial(2), TOO_LARGE)
    assert [dict(found.constraints) for found in stored(tmp_path)] == [{"0": 0.25}] * 2


def test_synchronizing_ends_what_an_interrupted_run_left_open(tmp_path: Path) -> None:
    open_proposals(tmp_path).suggest()
    open_proposals(tmp_path).synchronize([], judged)
    assert [found.state for found in stored(tmp_path)] == [TrialState.FAIL]


def test_synchronizing_adds_what_the_study_lacks_exactly_once(tmp_path: Path) -> None:
    proposals = open_proposals(tmp_path)
    proposals.tell(proposals.suggest(), trial(1), GOOD)
    proposals.add(trial(2), GOOD)
    for _ in range(2):
        open_proposals(tmp_path).synchronize([trial(1), trial(2), trial(3), trial(4, plan=padded_plan(4))], judged)
    found = stored(tmp_path)
    assert [each.user_attrs["trial_id"] for each in found] == [trial(number).id for number in (1, 2, 3, 4)]
    assert (found[2].params, found[2].value, found[3].params) == (SPACE.point(PLANS[3]), 103.0, {})


def test_a_study_is_rebuilt_with_its_infeasible_plans_and_failures(tmp_path: Path) -> None:
    records = [trial(1), trial(2, "out of memory"), trial(3, "crash")]
    open_proposals(tmp_path).synchronize(records, judged)
    good, too_large, crashed = stored(tmp_path)
    assert (good.value, dict(good.constraints)) == (101.0, {"0": 0.0})
    assert (too_large.value, dict(too_large.constraints)) == (90.0, {"0": 90 / 76 - 1})
    assert (crashed.state, crashed.value) == (TrialState.FAIL, None)


def test_a_trial_has_the_times_of_its_run_and_the_cause_of_its_failure(tmp_path: Path) -> None:
    open_proposals(tmp_path).add(trial(3, "crash"), Judgement.nothing())
    (found,) = stored(tmp_path)
    assert found.datetime_start is not None
    assert (found.datetime_start.astimezone(UTC), found.datetime_complete) == (trial(3).started, found.datetime_start)
    assert found.user_attrs["outcome"] == "crash"
    assert found.user_attrs["cause"] == "rank 3 failed: ValueError: '; DROP TABLE autotune_trial; --"


@pytest.mark.parametrize("sampler", ["tpe", pytest.param("gp", marks=pytest.mark.long)])
def test_a_sampler_does_not_learn_from_repeats(tmp_path: Path, sampler: str) -> None:
    suggested = []
    for repeats in (0, 8):
        (folder := tmp_path / str(repeats)).mkdir()
        proposals = open_proposals(folder, sampler)
        for number in range(8):
            proposals.add(trial(number), GOOD)
        for number in range(repeats):
            proposals.add(replace(trial(number % 3), id=f"{number + 100:032x}", role="confirm"), TOO_LARGE)
        suggested.append(proposals.suggest().params)
    assert suggested[0] == suggested[1]


def test_a_study_names_its_objective_and_what_it_tunes(tmp_path: Path) -> None:
    open_proposals(tmp_path).describe(study_attributes(workload_of()))
    study = optuna.load_study(study_name="study", storage=url_of(tmp_path))
    assert study.metric_names == ["epoch seconds"]
    assert study.user_attrs["hardware"] == str(workload_of().hardware)


def test_a_trial_that_was_ended_early_is_pruned(tmp_path: Path) -> None:
    shortened = replace(completed(), shortened=True)
    pruned = Judgement(state=TrialState.PRUNED, value=None, violation=0.0)
    assert judge(shortened, 500.0, 90.0) == pruned
    proposals = open_proposals(tmp_path)
    suggestion = proposals.suggest()
    proposals.tell(suggestion, trial(2), pruned)
    open_proposals(tmp_path).synchronize([finished(PLANS[1], shortened, 1, epoch_seconds=500.0)], judged)
    assert [found.state for found in stored(tmp_path)] == [TrialState.PRUNED] * 2


def test_steps_go_on_until_the_study_sees_that_they_are_clearly_worse(tmp_path: Path) -> None:
    proposals = open_proposals(tmp_path)
    proposals.add(trial(1), GOOD)
    good, bad = (proposals.pruning(proposals.suggest(), 100.0) for _ in range(2))
    assert [good(seconds) for seconds in (101.0, 99.0, 100.0)] == [True] * 3
    assert [bad(seconds) for seconds in (200.0, 201.0)] == [True, False]
    assert stored(tmp_path)[2].intermediate_values == {0: 200.0, 1: 201.0}


def test_the_sampler_keeps_away_from_what_does_not_fit(tmp_path: Path) -> None:
    proposals = open_proposals(tmp_path)
    for number, plan in enumerate(SPACE.starts * 2):
        fits = plan.layout.pipeline == 2
        proposals.add(trial(number, plan=plan), GOOD if fits else TOO_LARGE)
    suggested = []
    for number in range(10):
        suggestion = proposals.suggest()
        suggested.append(suggestion.params["layout"])
        fits = suggested[-1] == "p2-d1-z0"
        proposals.tell(suggestion, trial(number + 50, plan=SPACE.starts[0]), GOOD if fits else TOO_LARGE)
    assert suggested.count("p2-d1-z0") > 5


def test_the_same_seed_suggests_the_same(tmp_path: Path) -> None:
    suggested = []
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        (tmp_path / name).mkdir()
        suggested.append(open_proposals(tmp_path / name, seed=seed).suggest().params)
    assert suggested[0] == suggested[1] != suggested[2]


def test_an_unknown_sampler_is_refused_with_the_names_that_exist(tmp_path: Path) -> None:
    with pytest.raises(
        JobError, match="'annealing' is not one of the samplers here: exhaustive, gp, model, tpe, uniform"
    ):
        open_proposals(tmp_path, sampler="annealing")


# --- Optuna's tables that cannot be used ---


def test_a_study_of_another_space_is_refused_with_the_remedy(tmp_path: Path) -> None:
    open_proposals(tmp_path).add(trial(0), GOOD)
    other = Space(axes_of(packers=("isf",)), solver_of(1 << 50, PREDICTOR))
    advisor = Advisor(other, CalibratedPredictor(PREDICTOR), limits_of(1 << 50), SearchSection())
    with database(url_of(tmp_path)) as storage, pytest.raises(JobError, match=r"other values of packer.*--fresh"):
        Proposals(storage, "study", "tpe", SamplerContext(space=other, advisor=advisor, seed=0))


def test_tables_of_another_version_of_optuna_are_refused(tmp_path: Path) -> None:
    open_proposals(tmp_path)
    with sqlite3.connect(tmp_path / "study.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'v9.9.9.a'")
        connection.execute("UPDATE version_info SET schema_version = 99")
    with pytest.raises(DatabaseUnavailable, match="use the version of Optuna that made them"):
        open_proposals(tmp_path)


@pytest.mark.parametrize("table", ["studies", "trials"])
def test_lost_tables_are_reported_without_the_sql_statement(tmp_path: Path, table: str) -> None:
    proposals = open_proposals(tmp_path)
    with sqlite3.connect(tmp_path / "study.db") as connection:
        connection.execute(f"DROP TABLE {table}")
    with pytest.raises(DatabaseUnavailable, match=f"no such table: {table}") as caught:
        proposals.suggest()
    assert "SELECT" not in str(caught.value)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "study.db").write_bytes(b"remember the milk\n" * 500)
    with pytest.raises(DatabaseUnavailable, match="not a database"), database(url_of(tmp_path)):
        pass

"""Studies that travel from one database to another as a file."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import event

from storage.errors import BadBundle, UnfinishedStudy, UnknownRecord
from storage.records import LaunchResult
from storage.store import Store, open_store
from storage.validity import Verdict, validity
from tests.contracts.conftest import on_both_databases
from tests.values.storage import (
    COSTS,
    EXPLANATION,
    NOON,
    OUTCOMES,
    PADDED_PLAN,
    WORKLOAD,
    best_of,
    concluded,
    packed_plan,
    result_of,
    slow_window,
    window_of,
)
from trials import wire

HERE = "laptop: autotune.db"
STRANGE = 'o\'brien\n"x"; DROP TABLE autotune_trial; -- 雪'


def trained(launch: str) -> LaunchResult:
    return LaunchResult(launch_id=launch, status="finished", steps=40, training_samples_per_second=11.9, finished=NOON)


def studied(store: Store) -> str:
    """A finished study with one of everything."""
    study = store.create_study(store.add_workload(WORKLOAD), {"note": STRANGE}, seed=7).id
    for name, outcome in OUTCOMES.items():
        store.finish_trial(result_of(store.start_trial(study, packed_plan(len(name)), name, {"qv": 9}).id, outcome))
    store.abandon_trial(store.start_trial(study, packed_plan(40), "sampled").id)
    store.start_trial(study, packed_plan(41), "sampled")
    concluded(store, best_of(study), '{"calibration_state": []}')
    store.save_layer_profile(
        WORKLOAD.hardware.fingerprint, WORKLOAD.model.fingerprint, WORKLOAD.software, wire.encode(COSTS)
    )
    launch = store.start_launch(packed_plan(), WORKLOAD.fingerprint, 12.5)
    for window in (window_of(launch.id), slow_window(launch.id, 12)):
        store.add_window(window)
    store.finish_launch(trained(launch.id))
    running = store.start_launch(packed_plan(), WORKLOAD.fingerprint, None)
    store.add_window(window_of(running.id))
    return study


@pytest.fixture
def there(tmp_path: Path) -> Iterator[Store]:
    """Another database."""
    with open_store(f"sqlite:///{tmp_path / 'there.db'}") as store:
        yield store


@pytest.fixture
def bundle(store: Store, tmp_path: Path) -> Path:
    return exported(store, studied(store), tmp_path / "bundle.jsonl")


@pytest.fixture(scope="module")
def foreign_lines(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """A bundle of another database."""
    with open_store(f"sqlite:///{tmp_path_factory.mktemp('foreign')}/store.db") as store:
        return tuple(store.export_studies([studied(store)], HERE))


def exported(store: Store, study: str, path: Path) -> Path:
    path.write_text("".join(store.export_studies([study], HERE)))
    return path


@on_both_databases
def test_what_is_exported_is_found_elsewhere_with_where_it_came_from(store: Store, there: Store, bundle: Path) -> None:
    done = there.import_bundle(bundle)
    assert (done.source, done.known) == (HERE, 0)
    assert done.new == len(bundle.read_text().splitlines()) - 2
    (study,) = there.studies()
    assert (study.imported_from, study.settings) == (HERE, {"note": STRANGE})
    (theirs,), (ours,) = there.best_plans(), store.best_plans()
    assert theirs.imported_from == HERE
    assert best_of(study.id) == ours
    assert [trial.plan for trial in there.trials(study.id)] == [trial.plan for trial in store.trials(study.id)]
    assert not there.running_trials()
    assert not list(there.problems())


def test_an_import_is_done_once(there: Store, bundle: Path) -> None:
    first = there.import_bundle(bundle)
    second = there.import_bundle(bundle)
    assert (second.new, second.known) == (0, first.new)


def test_many_rows_are_stored_by_as_many_statements_as_a_few(tmp_path: Path) -> None:
    """So that an import is short, for which others wait."""

    def statements(trials: int) -> int:
        done = list[str]()
        with open_store(f"sqlite:///{tmp_path / str(trials)}.db") as store:
            study = store.create_study(store.add_workload(WORKLOAD), {}, seed=trials).id
            for number in range(trials):
                store.finish_trial(result_of(store.start_trial(study, packed_plan(9 + number), "sampled").id))
            concluded(store, best_of(study))
            bundle = exported(store, study, tmp_path / f"{trials}.jsonl")
        with open_store(f"sqlite:///{tmp_path / str(trials)}-there.db") as store:
            event.listen(store._database.engine, "before_cursor_execute", lambda *given: done.append(given[2]))
            store.import_bundle(bundle)
        return len(done)

    assert statements(2) == statements(20)


def test_what_comes_home_is_not_foreign(store: Store, bundle: Path) -> None:
    assert store.import_bundle(bundle).new == 0
    assert store.studies()[0].imported_from is None


def test_a_foreign_plan_is_to_be_measured_again_and_its_trials_answer_nothing(there: Store, bundle: Path) -> None:
    there.import_bundle(bundle)
    (best,) = there.best_plans()
    found = validity(best.workload, WORKLOAD, imported_from=best.imported_from)
    assert found.verdict is Verdict.REMEASURE
    assert "laptop" in str(found.changes[0])
    assert there.answers(WORKLOAD.fingerprint) == ()
    assert there.comparable_trials(WORKLOAD) == ()
    assert there.last_winner(WORKLOAD.fingerprint) is None
    key = WORKLOAD.hardware.fingerprint, WORKLOAD.model.fingerprint, WORKLOAD.software
    assert there.layer_profile(*key) is None
    assert len(there.layer_profiles()) == 1
    there.save_layer_profile(*key, "{}")
    assert there.layer_profile(*key) is not None


def test_a_result_that_came_after_the_export_is_taken_in_later(store: Store, there: Store, bundle: Path) -> None:
    there.import_bundle(bundle)
    study = store.studies()[0].id
    late = [trial for trial in store.trials(study) if trial.plan in (packed_plan(40), packed_plan(41))]
    for trial in late:
        store.finish_trial(result_of(trial.id))
    assert there.import_bundle(exported(store, study, bundle)).new == 6  # an outcome and two ranks each
    assert {trial.id for trial in late} <= {trial.id for trial in there.trials(study) if hasattr(trial, "result")}
    assert not list(there.problems())


def test_a_trial_that_is_given_up_between_two_exports_contradicts_neither(
    store: Store, there: Store, bundle: Path
) -> None:
    first = there.import_bundle(bundle)
    for trial in store.running_trials():
        store.abandon_trial(trial.id)
    again = exported(store, store.studies()[0].id, bundle.with_name("again.jsonl"))
    second = there.import_bundle(again)
    assert (second.new, second.known) == (0, first.new)
    for path in (bundle, again):
        assert store.import_bundle(path).new == 0
    assert not list(there.problems())


FROZEN_BUNDLE = Path(__file__).parents[1] / "assets" / "bundles" / "6.jsonl"
"""What a version before 0.1.0 exported from the studies of tests/assets/databases/0100.db. Never change it."""
FROZEN_DATABASE = FROZEN_BUNDLE.parents[1] / "databases" / "0100.db"


@on_both_databases
def test_a_frozen_bundle_is_taken_in_once(store: Store) -> None:
    first, second = store.import_bundle(FROZEN_BUNDLE), store.import_bundle(FROZEN_BUNDLE)
    assert (first.known, second.new, second.known) == (0, 0, first.new)
    (best,) = (best for best in store.best_plans() if best.workload == WORKLOAD)
    assert best == best_of(best.study_id, workload=WORKLOAD, imported_from=best.imported_from)
    assert {each.windows for each in store.launches(best.plan.id)} == {
        (window_of(each.id), slow_window(each.id, 12)) for each in store.launches(best.plan.id)
    }
    assert not list(store.problems())


def test_a_frozen_bundle_that_comes_home_changes_nothing(tmp_path: Path) -> None:
    shutil.copy(FROZEN_DATABASE, tmp_path / "store.db")
    with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        assert store.import_bundle(FROZEN_BUNDLE).new == 0


def test_a_model_that_has_another_name_here_is_the_same(there: Store, bundle: Path) -> None:
    there.add_workload(replace(WORKLOAD, model=replace(WORKLOAD.model, name="renamed")))
    there.import_bundle(bundle)
    (best,) = there.best_plans()
    assert best.workload.fingerprint == WORKLOAD.fingerprint
    assert validity(best.workload, WORKLOAD).verdict is Verdict.VALID


def test_a_study_without_a_winner_or_an_unknown_one_is_refused(store: Store) -> None:
    study = store.create_study(store.add_workload(WORKLOAD), {}, seed=0)
    with pytest.raises(UnfinishedStudy, match=study.name):
        list(store.export_studies([study.id], HERE))
    with pytest.raises(UnknownRecord):
        list(store.export_studies(["0" * 32], HERE))


def resigned(lines: list[str]) -> list[str]:
    """Return the lines with a matching last line, as after a change by hand: damage to the file would not match it."""
    body = "".join(lines[:-1])
    end = {"rows": len(lines) - 2, "sha256": hashlib.sha256(body.encode()).hexdigest()}
    return [*lines[:-1], f"{json.dumps(end)}\n"]


def without(table: str) -> Callable[[list[str]], list[str]]:
    def spoil(lines: list[str]) -> list[str]:
        return resigned([line for line in lines if f'"table": "autotune_{table}"' not in line])

    return spoil


def one_without(table: str) -> Callable[[list[str]], list[str]]:
    def spoil(lines: list[str]) -> list[str]:
        gone = next(line for line in lines if f'"table": "autotune_{table}"' in line)
        return resigned([line for line in lines if line is not gone])

    return spoil


def with_header(old: str, new: str) -> Callable[[list[str]], list[str]]:
    return lambda lines: resigned([lines[0].replace(old, new), *lines[1:]])


def changed(table: str, old: str, new: str) -> Callable[[list[str]], list[str]]:
    def spoil(lines: list[str]) -> list[str]:
        ours = [line for line in lines if f'"autotune_{table}"' in line and old in line]
        return resigned([line.replace(old, new) if line is ours[0] else line for line in lines])

    return spoil


SPOILT: tuple[tuple[Callable[[list[str]], list[str]], str], ...] = (
    (lambda lines: lines[:-1], "without its checksum"),
    (lambda lines: [*lines[:-1], lines[-1][:20]], "no JSON object"),
    (lambda lines: [line.replace('": 11.9', '": 99.9') for line in lines], "its checksum differs"),
    (lambda lines: [*lines[:5], *lines[6:]], "its checksum differs"),
    (lambda lines: [*lines, "\n"], "no JSON object"),
    (lambda lines: [], "the bundle is empty"),
    (lambda lines: ["\x00\x01\x02"], "no JSON object"),
    (lambda lines: ["[1, 2]\n", *lines[1:]], "no JSON object"),
    *(
        (with_header('"version": 6', f'"version": {other}'), f"has version {other}, this software reads 6; export")
        for other in (5, 7)
    ),
    (lambda lines: [lines[0].replace("autotune-bundle", "x"), *lines[1:]], "no file that `autotune db export`"),
    (without("plan"), "refers to a row that is missing"),
    (without("model"), "refers to a row that is missing"),
    (without("outcome"), "without an outcome"),
    (changed("hardware", '"devices": 8', '"devices": 4'), "its content is that of"),
    (changed("hardware", '"devices": 8', '"devices": "8"'), "devices is no int"),
    (changed("hardware", '"devices": 8', '"device": 8'), "does not have the columns"),
    (changed("trial", '"finished"', '"done"'), "does not have the columns"),
    (changed("study", '"started": "2', '"started": "x'), "for a time"),
    (changed("outcome", '"kind": "', '"kind": "x'), r"contradict its document"),
    (changed("best_plan", '"epoch_seconds": 100.0', '"epoch_seconds": NaN'), "no JSON object"),
    (changed("best_plan", '"epoch_seconds": 100.0', '"epoch_seconds": 1e999'), "no JSON object"),
    (
        changed("best_plan", '"estimated_samples_per_second": 10.0', '"estimated_samples_per_second": 0.0'),
        "more than 0 samples/s",
    ),
    (changed("outcome", "2.5", "null"), r"losses\.0"),
    (changed("outcome", "2.5", "NaN"), r"losses\.0: Input should be a finite number"),
    (changed("outcome", "9000", f"{10**30}"), "is no whole number of 64 bits"),
    (changed("outcome", "[0.5,", "[0.0,"), "timed steps of more than 0 s"),
    (changed("outcome", '"epoch_seconds": 1234.5', '"epoch_seconds": null'), "no estimate of epoch_seconds"),
    (changed("layer_profile", "0.125", "-0.125"), "forward_seconds is -0.125, which cannot be a measured value"),
    (changed("layer_profile", "0.125", "1e999"), "Input should be a finite number"),
    (changed("layer_profile", "vision_embedding", "vision"), "there are no costs of vision_embedding"),
    (changed("plan", '"autotune_plan"', '"autotune_agent"'), "names no table"),
    (changed("plan", '"autotune_plan"', '["autotune_plan"]'), "names no table"),
    (changed("hardware", '"devices": 8', f'"devices": {10**30}'), "cannot be stored"),
    (with_header('"exported": "', '"exported": "0001-01-01T00:00+14:00", "x": "'), "for a time"),
    (with_header('"exported"', '"x"'), "None for a time"),
    (lambda lines: resigned(["[" * 100_000 + "\n", *lines[1:]]), "no JSON object"),
    (without("best_plan"), "has ended without a winner"),
    (without("stage_measurement"), "0 ranks in place of 2"),
    (one_without("trial"), "refers to a row that is missing"),
    (one_without("stage_measurement"), "1 ranks in place of 2"),
)


def test_a_bundle_that_is_not_whole_is_refused_and_nothing_is_stored(
    store: Store, tmp_path: Path, foreign_lines: tuple[str, ...]
) -> None:
    bundle = tmp_path / "bundle.jsonl"
    for spoil, message in SPOILT:
        bundle.write_text("".join(spoil(list(foreign_lines))))
        with pytest.raises(BadBundle, match=message):
            store.import_bundle(bundle)
        assert not store.studies()
        assert not store.best_plans()
        with pytest.raises(UnknownRecord):
            store.workload(WORKLOAD.fingerprint)


def test_the_speed_of_finished_trainings_travels_with_them(store: Store, there: Store, bundle: Path) -> None:
    there.import_bundle(bundle)
    finished, _ = store.launches(packed_plan().id)
    assert len(finished.windows) == 2
    assert there.launches(packed_plan().id) == (replace(finished, imported_from=HERE),)
    assert not list(there.problems())


def test_plans_and_trainings_of_another_study_stay_here(store: Store, there: Store, tmp_path: Path) -> None:
    study, other = studied(store), store.create_study(WORKLOAD.fingerprint, {}, seed=8).id
    alien = packed_plan(77)
    store.start_trial(other, alien, "sampled")
    store.set_note(store.find_subject(alien.id), "of the other study")
    launch = store.start_launch(alien, WORKLOAD.fingerprint, None)
    store.finish_launch(trained(launch.id))
    text = exported(store, study, tmp_path / "bundle.jsonl").read_text()
    assert [each for each in (alien.id, launch.id, "of the other study") if each in text] == []
    there.import_bundle(tmp_path / "bundle.jsonl")
    assert len(there.launches(packed_plan().id)) == 1


def test_a_file_that_is_no_text_or_not_there_is_refused(there: Store, tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (binary, tmp_path / "none", tmp_path):
        with pytest.raises(BadBundle, match="autotune db export"):
            there.import_bundle(path)


def test_a_bundle_with_a_line_without_end_is_refused_before_it_is_held(there: Store, tmp_path: Path) -> None:
    path = tmp_path / "zeros.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(BadBundle, match="a line of more than 32 MiB"):
        there.import_bundle(path)


def test_a_bundle_that_contradicts_what_is_stored_is_refused(there: Store, bundle: Path) -> None:
    there.import_bundle(bundle)
    lines = bundle.read_text().splitlines(keepends=True)
    bundle.write_text("".join(changed("study", '"seed": 7', '"seed": 8')(lines)))
    with pytest.raises(BadBundle, match="contradicts the autotune_study"):
        there.import_bundle(bundle)


def test_a_bundle_of_a_padded_plan_without_data_fields_is_whole(store: Store, there: Store, tmp_path: Path) -> None:
    study = store.create_study(store.add_workload(WORKLOAD), {}, seed=0).id
    store.finish_trial(result_of(store.start_trial(study, PADDED_PLAN, "default").id))
    bare = {"confidence": None, "ties": (), "pareto": (), "baselines": ()}
    concluded(store, best_of(study, plan=PADDED_PLAN, explanation=EXPLANATION, **bare))
    there.import_bundle(exported(store, study, tmp_path / "bundle"))
    (found,) = there.best_plans()
    assert (found.plan, found.explanation) == (PADDED_PLAN, EXPLANATION)

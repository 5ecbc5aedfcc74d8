"""Which plan a training gets, and what is promised of it."""

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.errors import JobError, PlanNotValid
from autotune.events import Event, Note
from autotune.library.export import best_known
from autotune.plan_choice import check_new, choose_plan, is_of_store, known_winner, note_faster
from autotune.results.known_plan import of_winner
from storage.store import Store, open_store
from tests.unit.training.test_training_output import SETTINGS
from tests.values.storage import (
    WORKLOAD,
    best_of,
    changed,
    concluded,
    new_study,
    packed_plan,
    peaking_at,
    result_of,
)
from trials.outcome import Rejected
from trials.plan import Plan
from trials.tasks.training.output import open_output
from trials.tasks.training.settings import Settings
from trials.workload import Workload


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("data.text_tokens", 1 << 20),
        ("global_batch_samples", 64),
        ("hardware.power_limit_watts", 300),
        ("software.torch", "2.14.0"),
    ],
)
def test_no_speed_is_promised_of_a_plan_that_was_measured_under_other_conditions(
    tmp_path: Path, field: str, value: Any
) -> None:
    heard: list[Event] = []
    with open_store(f"sqlite:///{tmp_path}/autotune.db") as store:
        best = concluded(store, best_of(new_study(store)))
        assert choose_plan(store, WORKLOAD, best.plan, heard.append) == of_winner(best)
        assert "promised" not in "".join(map(str, heard))
        chosen = choose_plan(store, changed(field, value), best.plan.id, heard.append)
    assert (chosen.plan, chosen.speed) == (best.plan, None)
    assert f"under other conditions, so that no speed is promised: {field} was " in "".join(map(str, heard))


def test_the_speed_with_another_limit_of_memory_is_promised(tmp_path: Path) -> None:
    heard: list[Event] = []
    with open_store(f"sqlite:///{tmp_path}/autotune.db") as store:
        best = concluded(store, best_of(new_study(store)))
        now = changed("memory_limit_bytes", 2 * WORKLOAD.memory_limit_bytes)
        assert choose_plan(store, now, best.plan.id, heard.append) == of_winner(best)
    assert "measured under other conditions: hardware.memory_limit was " in "".join(map(str, heard))


PEAK = (61 << 30) + 1
"""A little more than a whole number of MiB."""
MAY_RUN_OUT = (
    "the fullest rank needed 62,464.0 MiB when it was measured, and the limit is 61,440.0 MiB, so that it may run out "
    "of memory"
)


def measured(store: Store, workload: Workload, peak_bytes: int = PEAK) -> Plan:
    """Store a search on a workload whose winner was measured with this peak."""
    study, plan = new_study(store, workload), packed_plan()
    trial = store.start_trial(study, plan, "sampled")
    store.finish_trial(result_of(trial.id, peaking_at(peak_bytes)))
    return concluded(store, best_of(study, plan=plan, workload=workload)).plan


def limited(limit_bytes: int) -> Workload:
    return changed("memory_limit_bytes", limit_bytes)


def chosen(
    store: Store, limit_bytes: int, wanted: Plan | str, *, binds: bool = True, output: Path | None = None
) -> str:
    """The notes on the chosen plan, with all trials binding the training or none."""
    heard: list[Event] = []
    found = choose_plan(store, limited(limit_bytes), wanted, heard.append, output, binds=lambda _: binds)
    assert wanted in (found.plan.id, found.plan)
    return "".join(map(str, heard))


def test_a_plan_that_was_measured_to_need_more_memory_than_the_limit_is_refused(tmp_path: Path) -> None:
    with open_store(f"sqlite:///{tmp_path}/autotune.db") as store:
        plan = measured(store, WORKLOAD)
        assert "needed" not in chosen(store, PEAK, plan.id)
        assert MAY_RUN_OUT in chosen(store, 60 << 30, plan.id, binds=False)  # trials on other packs
        refusal = (
            f"plan {plan.id} does not fit here: its fullest rank needed 62,464.0 MiB when it was measured, and the "
            "limit is 61,440.0 MiB; raise hardware.memory_limit to at least 62465MiB, or run `autotune tune JOB`"
        )
        # A search with this limit ran no trial of it to its end.
        for _ in range(2):
            for wanted in (plan.id, plan):
                with pytest.raises(PlanNotValid, match=f"^{re.escape(refusal)}$"):
                    chosen(store, 60 << 30, wanted)
            again = store.start_trial(new_study(store, limited(60 << 30)), plan, "sampled")
            store.finish_trial(result_of(again.id, Rejected(reason="it does not fit")))
        within = store.start_trial(new_study(store, limited(60 << 30)), plan, "sampled")
        store.finish_trial(result_of(within.id, peaking_at(60 << 30)))
        assert "needed" not in chosen(store, 60 << 30, plan.id)


@pytest.mark.parametrize(("accelerator", "is_sure"), [("cuda", False), ("cpu", True)])
def test_a_peak_near_the_limit_of_its_trial_is_sure_only_without_an_allocator(
    accelerator: str, is_sure: bool, tmp_path: Path
) -> None:
    """An allocator keeps less with a lower limit."""
    now = changed("hardware.accelerator", accelerator, limited(60 << 30))
    with open_store(f"sqlite:///{tmp_path}/autotune.db") as store:
        plan, heard = measured(store, replace(now, memory_limit_bytes=PEAK)), list[Event]()
        with pytest.raises(PlanNotValid, match="does not fit here") if is_sure else nullcontext():
            choose_plan(store, now, plan, heard.append, binds=lambda _: True)
    assert (MAY_RUN_OUT in "".join(map(str, heard))) is not is_sure


@pytest.mark.parametrize("field", ["software.torch", "hardware.device_memory_bytes", "data.lengths_digest"])
def test_a_plan_that_needed_more_memory_under_other_conditions_has_a_note(tmp_path: Path, field: str) -> None:
    with open_store(f"sqlite:///{tmp_path}/autotune.db") as store:
        plan = measured(store, changed(field, 7 if field.endswith("bytes") else "other"))
        assert MAY_RUN_OUT in chosen(store, 60 << 30, plan.id)


def test_the_plan_of_an_imported_search_that_needed_more_memory_has_a_note(tmp_path: Path) -> None:
    with open_store(f"sqlite:///{tmp_path}/other.db") as other:
        plan = measured(other, WORKLOAD)
        study = other.find_plan(plan.id).study
        (tmp_path / "bundle.jsonl").write_text("".join(other.export_studies([study.id], "other")))
    with open_store(f"sqlite:///{tmp_path}/autotune.db") as store:
        store.import_bundle(tmp_path / "bundle.jsonl")
        assert MAY_RUN_OUT in chosen(store, 60 << 30, plan.id)


def test_the_nearest_plan_that_is_offered_fits_the_limit(tmp_path: Path) -> None:
    with open_store(f"sqlite:///{tmp_path}/autotune.db") as store:
        plan = measured(store, WORKLOAD)
        with pytest.raises(PlanNotValid, match=f"train with the nearest by `--plan {plan.id}`"):
            choose_plan(store, limited(PEAK), None, lambda _: None)
        with pytest.raises(PlanNotValid, match=r"`autotune run JOB` first$"):
            choose_plan(store, limited(PEAK - 1), None, lambda _: None)


def test_a_training_whose_plan_needed_more_memory_than_the_limit_may_go_on(tmp_path: Path) -> None:
    output = tmp_path / "output"
    with open_store(f"sqlite:///{tmp_path}/autotune.db") as store:
        plan = measured(store, WORKLOAD)
        settings = Settings(
            plan=plan.id,
            data="c0ffee",
            model="beef",
            weights="random",
            dtype="bfloat16",
            seed=0,
            evaluation_data="cafe",
            global_batch_samples=32,
            oversize="own-pack",
            learning_rate=1e-5,
            epochs=1,
        )
        open_output(output, settings, plan)
        with pytest.raises(JobError, match=f"continue with `autotune launch JOB --plan {plan.id}`"):
            check_new(store, limited(60 << 30), output)
        assert MAY_RUN_OUT in chosen(store, 60 << 30, plan.id, output=output)


SPEED, ERROR = "estimated_samples_per_second", "estimated_samples_per_second_error"


def found(store: Store, number: int, speed: float, trainer: str | None = None) -> Plan:
    """Store a search whose winner, a plan of its own, had this speed."""
    study = store.create_study(store.add_workload(WORKLOAD), {"trainer": trainer}, seed=0)
    fields: dict[str, Any] = {SPEED: speed, ERROR: 1.0, "epoch_seconds": 1000 / speed, "created": study.started}
    best = best_of(study.id, plan=packed_plan(number), trainer=trainer, **fields)
    return concluded(store, best).plan


def test_a_faster_winner_of_an_earlier_search_is_named(tmp_path: Path) -> None:
    url, heard, exported = f"sqlite:///{tmp_path}/autotune.db", list[Event](), list[Any]()
    with open_store(url) as store:
        _, fastest, _ = (found(store, number, speed) for number, speed in ((1, 90.0), (2, 100.0), (3, 95.0)))
        study = store.find_plan(fastest.id).study
        last = found(store, 4, 60.0)
        assert choose_plan(store, WORKLOAD, None, heard.append).plan == last
    forecaster: Any = SimpleNamespace(workload=WORKLOAD)
    assert best_known(forecaster, "ms-swift", url, exported.append) == last
    text = (
        f"Study {study.name} of {study.started:%Y-%m-%d} measured plan {fastest.id} faster (100.0 against 60.0 "
        f"samples/s); `launch` and `export` take it with --plan {fastest.id}"
    )
    for events in (heard, exported):
        assert [str(event) for event in events].count(str(Note(text=text))) == 1


@pytest.mark.parametrize(
    ("earlier", "last"),
    [
        ({"number": 1, "speed": 61.5}, {}),
        ({"number": 4, "speed": 100.0}, {}),
        ({"number": 1, "speed": 100.0}, {"trainer": "ms-swift"}),
    ],
    ids=["within the errors", "the same plan", "beyond the limits of the trainer"],
)
def test_no_other_winner_is_named(tmp_path: Path, earlier: dict[str, Any], last: dict[str, Any]) -> None:
    heard: list[Event] = []
    with open_store(f"sqlite:///{tmp_path}/autotune.db") as store:
        found(store, **earlier)
        plan = found(store, 4, 60.0, **last)
        winner = store.last_winner(WORKLOAD.fingerprint, last.get("trainer"))
        assert winner is not None
        assert winner.plan == plan
        note_faster(store, winner, heard.append)
    assert heard == []


def imported(store: Store, folder: Path) -> Plan:
    """Import a search of another database, and return its winner."""
    with open_store(f"sqlite:///{folder}/other.db") as other:
        plan = found(other, 1, 100.0)
        study = other.find_plan(plan.id).study
        (folder / "bundle.jsonl").write_text("".join(other.export_studies([study.id], "other")))
    store.import_bundle(folder / "bundle.jsonl")
    return plan


def test_an_imported_winner_is_not_named(tmp_path: Path) -> None:
    heard: list[Event] = []
    with open_store(f"sqlite:///{tmp_path}/autotune.db") as store:
        imported(store, tmp_path)
        found(store, 4, 60.0)
        choose_plan(store, WORKLOAD, None, heard.append)
    assert not any("faster" in str(event) for event in heard)


def test_where_only_an_imported_winner_is_known_it_is_offered_by_its_id(tmp_path: Path) -> None:
    with open_store(f"sqlite:///{tmp_path}/autotune.db") as store:
        plan = imported(store, tmp_path)
        with pytest.raises(PlanNotValid) as refused:
            known_winner(store, WORKLOAD)
        assert str(refused.value).startswith(
            f"no plan is known for this job here, except plan {plan.id}, which is imported and used only where it is "
            "named; run `autotune tune JOB`"
        )
        assert f"the nearest by `--plan {plan.id}`" in str(refused.value)
        assert "archive" not in str(refused.value)
        own = store.find_plan(found(store, 4, 60.0).id).study  # slower than the imported one
        store.archive_studies([own.id])
        with pytest.raises(PlanNotValid, match=f"`autotune studies unarchive {own.name}`"):
            known_winner(store, WORKLOAD)


def test_a_plan_may_also_be_of_a_file_or_of_the_training_that_it_continues(tmp_path: Path) -> None:
    plan = packed_plan()
    assert [is_of_store(each, tmp_path) for each in (None, plan.id, "plan.yaml", plan)] == [True, True, False, False]
    open_output(tmp_path, replace(SETTINGS, plan=plan.id), plan)
    assert [is_of_store(each, tmp_path) for each in (None, plan.id[:8], "abc")] == [False, False, True]

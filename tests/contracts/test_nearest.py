"""Plans of the workload nearest to the one at hand."""

import math
from pathlib import Path

import pytest

from storage.nearness import differences, distance, fields_of, fields_of_machine
from storage.store import Store
from tests.contracts.conftest import on_both_databases
from tests.values.storage import PADDED_PLAN, WORKLOAD, best_of, changed, concluded
from trials.workload import Workload


def known(store: Store, workload: Workload, **fields: object) -> str:
    study = store.create_study(store.add_workload(workload), {}, seed=0).id
    return concluded(store, best_of(study, workload=workload, **fields)).study_id


@on_both_databases
def test_the_same_workload_comes_first_and_then_what_differs_least(store: Store) -> None:
    workloads = {
        "other GPUs": changed("hardware.device_name", "NVIDIA H100"),
        "half of them": changed("hardware.devices", 4),
        "the same": WORKLOAD,
        "other torch": changed("software.torch", "2.14.0"),
        "other family": changed("model.family", "qwen2_5_vl"),
        "other data": changed("data.histogram", ((0, 128, 600), (1, 256, 100), (5, 1344, 300))),
    }
    studies = {known(store, workload): name for name, workload in workloads.items()}
    found = store.nearest_plans(fields_of(WORKLOAD))
    assert [studies[near.best.study_id] for near in found] == [
        "the same",
        "other torch",
        "half of them",
        "other data",
        "other family",
        "other GPUs",
    ]
    assert found[0].distance == 0
    assert [near.distance for near in found] == sorted(near.distance for near in found)
    assert [one.field for one in found[2].differences] == ["hardware.devices"]
    assert found[2].distance == 10
    assert math.isclose(found[3].distance, 20 * 0.54)
    assert store.nearest_plans(fields_of(WORKLOAD), limit=2) == found[:2]


def test_the_example_of_the_documentation_prints_the_nearest_plans(
    store: Store, database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    known(store, changed("hardware.devices", 4))
    page = (Path(__file__).parents[2] / "docs" / "storage.md").read_text()
    example = page.split("```python\n")[1].split("```")[0]
    exec(example.replace("postgresql://me@host/results", database_url), {})
    assert capsys.readouterr().out.startswith(f"{best_of('').plan.id} 0")


def test_plans_of_one_distance_come_with_the_fastest_first(store: Store) -> None:
    slow = known(store, WORKLOAD, epoch_seconds=200.0)
    fast = known(store, WORKLOAD, epoch_seconds=50.0, plan=PADDED_PLAN)
    assert [near.best.study_id for near in store.nearest_plans(fields_of(WORKLOAD))] == [fast, slow]


def test_a_machine_alone_can_be_compared(store: Store) -> None:
    other = changed("model.family", "qwen2_5_vl")
    near, far = known(store, other), known(store, changed("hardware.driver", "580", other))
    found = store.nearest_plans(fields_of_machine(WORKLOAD.hardware, WORKLOAD.software))
    assert [(each.best.study_id, each.distance) for each in found] == [(near, 0), (far, 1)]


def test_only_wanted_plans_are_compared(store: Store) -> None:
    known(store, WORKLOAD)
    other = known(store, changed("hardware.device_name", "NVIDIA H100"))
    found = store.nearest_plans(fields_of(WORKLOAD), hardware_name="h100")
    assert [near.best.study_id for near in found] == [other]
    assert store.nearest_plans(fields_of(WORKLOAD), model_name="no such") == ()


def test_a_long_histogram_cannot_hide_a_nearer_workload(store: Store) -> None:
    """The histogram is looked at last: a workload that is first without it need not be."""
    elsewhere = changed("data.histogram", ((40, 9000, 1000),))
    known(store, elsewhere)
    nearer = known(store, changed("hardware.devices", 7))
    (found,) = store.nearest_plans(fields_of(WORKLOAD), limit=1)
    assert found.best.study_id == nearer


def test_many_workloads_of_other_data_do_not_hide_a_nearer_one(store: Store) -> None:
    for number in range(65):
        known(store, changed("data.histogram", ((0, 64 * (number + 2), 1000),)))
    nearer = known(store, changed("hardware.driver", "570.99"))
    for limit in (1, 3, 50):
        found = store.nearest_plans(fields_of(WORKLOAD), limit=limit)
        assert (found[0].best.study_id, found[0].distance, len(found)) == (nearer, 1, limit)


@pytest.mark.parametrize(("field", "value", "expected"), [("driver", None, 1.0), ("link", "NV18", 5.0)])
def test_what_was_not_known_counts_as_another_text(field: str, value: object, expected: float) -> None:
    (found,) = differences(fields_of(WORKLOAD), fields_of(changed(f"hardware.{field}", value)))
    assert (found.distance, distance([found])) == (expected, expected)
    assert str(found).startswith(f"hardware.{field} ")

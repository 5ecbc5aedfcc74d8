"""Which winner is exported, and launched, where searches were for a trainer and for none."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.library.export import best_known
from autotune.plan_choice import choose_plan
from autotune.results.study_report import Known, plans_text
from storage.store import open_store
from storage.validity import Validity, Verdict
from tests.values.storage import WORKLOAD, best_of, concluded, packed_plan

VALID = Validity(verdict=Verdict.VALID, changes=())


@pytest.mark.parametrize(
    ("searched", "exported", "launched"),
    [((None, "ms-swift"), 1, 0), (("ms-swift", None), 0, 1), (("ms-swift",), 0, 0), (("qwen-vl", None), 1, 1)],
    ids=["trainer last", "own last", "trainer alone", "another trainer"],
)
def test_each_takes_the_winner_of_its_own_kind_where_there_is_one(
    tmp_path: Path, searched: Sequence[str | None], exported: int, launched: int
) -> None:
    url, said = f"sqlite:///{tmp_path / 'known.db'}", list[Any]()
    plans = [packed_plan(1 + number) for number in range(len(searched))]
    with open_store(url) as store:
        for plan, trainer in zip(plans, searched, strict=True):
            study = store.create_study(store.add_workload(WORKLOAD), {"trainer": trainer}, 0)
            concluded(store, best_of(study.id, plan=plan))
        found = choose_plan(store, WORKLOAD, None, said.append)
        listed = plans_text([Known(best=best, validity=VALID) for best in store.best_plans()])
    assert found.plan == plans[launched]
    assert ("for ms-swift" in said[0].text) == (searched[launched] == "ms-swift")
    assert ("  for" in listed.splitlines()[0]) == any(searched)
    assert all(sum(trainer in line for line in listed.splitlines()) == 1 for trainer in searched if trainer)
    forecaster: Any = SimpleNamespace(workload=WORKLOAD)
    assert best_known(forecaster, "ms-swift", url, said.append) == plans[exported]

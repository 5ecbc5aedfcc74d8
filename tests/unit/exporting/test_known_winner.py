"""Which winner is exported, and launched, where searches were for a trainer and for none."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.library.export import _best_known
from autotune.plan_choice import choose_plan
from storage.store import open_store
from tests.values.storage import WORKLOAD, best_of, concluded, packed_plan


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
    assert found.plan == plans[launched]
    assert ("for ms-swift" in said[0].text) == (searched[launched] == "ms-swift")
    forecaster: Any = SimpleNamespace(workload=WORKLOAD)
    assert _best_known(forecaster, "ms-swift", url, said.append) == plans[exported]

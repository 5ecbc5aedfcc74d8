"""A full training knows what slowed it down."""

from pathlib import Path

import pytest

from autotune.machine.conditions import Conditions
from autotune.training import full_training
from storage.spool import Spool
from storage.store import open_store
from tests.values.training import plan_of, prepared_of
from trials.sites.local import LocalSite
from trials.workload import Hardware

pytestmark = pytest.mark.ranks


def test_a_launch_is_judged_by_the_conditions_while_its_ranks_computed(
    shallow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[Conditions] = []

    def disturbance(conditions: Conditions, _: Hardware) -> str:
        judged.append(conditions)
        return "a reason"

    monkeypatch.setattr(full_training, "disturbance", disturbance)
    prepared = prepared_of(shallow, tmp_path)
    with open_store(f"sqlite:///{tmp_path / 'known.db'}") as store:
        launched = full_training.launch(
            prepared,
            plan_of("4+2", data=2, zero=1),
            store,
            Spool(tmp_path / "spool"),
            tmp_path / "launch",
            site=LocalSite("cpu"),
            promised_samples_per_second=None,
            max_steps=20,  # conditions need a second
        )
    assert launched.disturbance == "a reason"
    (conditions,) = judged
    assert conditions.own_cpu > 0  # that of the ranks

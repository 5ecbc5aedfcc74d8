"""The evidence of a winner in the JSON results of all commands that show it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from autotune.cli import main
from storage.store import open_store
from tests.values.storage import WORKLOAD, best_of, completed, concluded, packed_plan, result_of


@pytest.mark.usefixtures("home")
def test_every_json_result_of_a_winner_has_its_evidence(tmp_path: Path) -> None:
    with open_store(f"sqlite:///{tmp_path / 'db'}") as store:
        study = store.create_study(store.add_workload(WORKLOAD), {}, seed=0)
        trial = store.start_trial(study.id, packed_plan(), "sampled")
        store.finish_trial(replace(result_of(trial.id, completed()), disturbance="others computed"))
        concluded(store, best_of(study.id))

    def document(*arguments: str) -> Any:
        answer = CliRunner().invoke(main, [*arguments, "--json", "--db", f"sqlite:///{tmp_path / 'db'}"])
        assert answer.exit_code == 0, answer.output
        return json.loads(answer.stdout)

    shown = document("show", packed_plan().id)["evidence"]
    assert (shown["winner_runs"], shown["disturbed_winner_runs"]) == (1, 1)
    assert document("plans")["plans"][0]["evidence"] == shown
    assert document("studies", study.name)["best"]["evidence"] == shown

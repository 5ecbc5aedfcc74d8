"""Optuna's own dashboard on our database: through its HTTP API, and in a headless Chromium where one is installed."""

from pathlib import Path

import pytest

from storage.store import open_store
from tests.machines.search_bench import PREDICTOR, Bench
from tests.machines.simulated import SimulatedLauncher
from tests.programs.browser import CHROMIUM
from tests.programs.dashboards import ask, attributes, dashboard, rendered
from trials.outcome import Failed, OutOfMemory
from trials.plan import Plan


@pytest.mark.parametrize("database_url", ["sqlite", pytest.param("postgresql", marks=pytest.mark.long)], indirect=True)
@pytest.mark.parametrize("renders", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_dashboard_shows_studies_parameters_constraints_and_states(
    database_url: str, renders: bool, tmp_path: Path
) -> None:
    with open_store(database_url) as store:
        bench = Bench(tmp_path, store)
        study = bench.study()
        too_large = OutOfMemory(stage=0, rank=0, needed_bytes=120, limit_bytes=100)
        first: list[Plan] = []

        def cause_of(plan: Plan) -> OutOfMemory | None:
            first.append(plan)
            return too_large if plan == first[0] else None

        bench.search(study, SimulatedLauncher(PREDICTOR, cause_of=cause_of), trials=6)
        trials = {trial.id: trial for trial in bench.stored(study)}
    with dashboard(database_url) as address:
        summaries = {each["study_name"]: each["study_id"] for each in ask(f"{address}/api/studies")["study_summaries"]}
        number = summaries[study.name]
        shown = ask(f"{address}/api/studies/{number}?after=0")["trials"]
        if renders and CHROMIUM:
            assert study.name in rendered(f"{address}/dashboard", tmp_path / "chromium")
            page = rendered(f"{address}/dashboard/studies/{number}/analytics", tmp_path / "chromium")
            assert all(text in page for text in (study.name, "Param boundary_0", "layout"))
    assert len(shown) == len({attributes(each)["trial_id"] for each in shown}) >= 6
    for each in shown:
        trial = trials[attributes(each)["trial_id"]]
        parameters = {parameter["name"]: parameter["param_external_value"] for parameter in each["params"]}
        assert {name: str(value) for name, value in trial.parameters.items()}.items() <= parameters.items()
        assert each["state"] == "Complete"
        (constraint,) = each["constraints"]
        assert (constraint > 0) == (trial.result.outcome == Failed(cause=too_large))
        assert attributes(each).get("cause") == (str(too_large) if constraint > 0 else None)
    assert sum(each["constraints"][0] > 0 for each in shown) == 1

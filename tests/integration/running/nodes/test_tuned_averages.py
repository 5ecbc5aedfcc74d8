"""A search over two nodes of two ranks each with a slow link: averages of gradients on each node first, and at once."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from click.testing import CliRunner

from autotune import tune
from autotune.cli import main
from autotune.events import Event, Note, TrialEnded
from autotune.search.roles import Role
from storage.records import BestPlan, FinishedTrial
from storage.store import open_store
from tests.machines.nodes import Cable, cable, ssh_over
from tests.programs import postgres
from tests.values.exchanges import named
from tests.values.training import PACKED, job_of, plan_of
from trials import wire
from trials.costs.layer_costs import LayerCosts
from trials.outcome import Completed, Measurement
from trials.plan import Plan

pytestmark = [pytest.mark.ranks, pytest.mark.long, pytest.mark.usefixtures("home")]

RATE = "100mbit"
BY_NODES = plan_of("4+2", data=4, zero=1, within=2)
AT_ONCE = replace(BY_NODES, layout=replace(BY_NODES.layout, reduce_within=1))
SPACE = {
    # One stage and packs of one kind, so that both plans are among the few of the space.
    "split": [6],
    "packers": [PACKED.packer],
    "qv": [PACKED.qv],
    "qt": [PACKED.qt],
    "qv_slack": [PACKED.qv - PACKED.qv_min],
    "qt_slack": [PACKED.qt - PACKED.qt_min],
    "sequence": ["1"],
    "recompute": "none",
}


@pytest.fixture
def joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cable]:
    """Two nodes, of which ssh reaches the other one."""
    with cable() as made:
        monkeypatch.setenv("PATH", str(ssh_over(made, tmp_path / "bin")), prepend=":")
        made.limit(RATE)
        yield made


def test_a_search_tries_both_averages_on_real_ranks_and_shows_their_times_side_by_side(
    shallow: Path, tmp_path: Path, joined: Cable, plan_file: Callable[[Plan], Path], postgres_server: str
) -> None:
    """The results are in a database of a team."""
    heard: list[Event] = []
    # A trial of one step is never ended early, so both are measured.
    few = {"trials": 16, "time_limit": "5min", "warmup_steps": 1, "timed_steps": 1, "confirm_rounds": 1}
    search = {
        **few,
        "final_steps": 0,
        "sampler": "exhaustive",
        "space": SPACE,
        "current_plan": str(plan_file(BY_NODES)),
    }
    hosts = {"launcher": "torchrun", "hosts": [joined.here, joined.there], "devices": 4, "start_timeout": "200s"}
    batch = {"global_batch_samples": 24}
    job = job_of(shallow, tmp_path / "output", hardware=hosts, search=search, training=batch)
    with postgres.database(postgres_server) as team:
        best = tune(job, listener=heard.append, database=team)
        timed = averages(best, team)
        done = [each.trial for each in heard if isinstance(each, TrialEnded)]
        # Perhaps during the last backward pass, as the profile says.
        tried = {
            replace(plan, layout=replace(plan.layout, bucket_bytes=0)): plan for plan in (one.plan for one in done)
        }
        of_all = tried[AT_ONCE]
        shown = CliRunner().invoke(main, ["compare", of_all.id, BY_NODES.id, "--db", team])

    assert set(timed) == {1, 2}
    (reason,) = (each.text for each in heard if isinstance(each, Note) and each.text.startswith("Averages of gradie"))
    if timed[2] < timed[1]:
        assert "are searched with p1-d4-z" in reason or "is predicted to take at least" in reason
    else:
        assert reason.endswith("averages on each node first took longer in the profile")

    assert Role.CURRENT_PLAN in {trial.role for trial in done if trial.plan == BY_NODES}
    by_nodes, at_once = (
        [measurement(trial) for trial in done if trial.plan == plan and isinstance(trial.result.outcome, Completed)]
        for plan in (BY_NODES, of_all)
    )
    assert len(by_nodes[0].stages) == len(at_once[0].stages) == 4
    for one, other in product(by_nodes, at_once):
        assert one.steps == other.steps
        assert one.losses == pytest.approx(other.losses, rel=1e-6)

    assert shown.exit_code == 0, shown.stderr
    # A line is folded where the other layout is as long.
    assert "pipeline 1 x data 4, ZeRO 1, averages over 2 ranks of" in shown.stdout
    assert re.search(rf"{BY_NODES.id} is \d\.\d\d .* times as fast as {of_all.id}", shown.stdout)


def measurement(trial: FinishedTrial) -> Measurement:
    assert isinstance(trial.result.outcome, Completed)
    return trial.result.outcome.measurement


def averages(best: BestPlan, database: str) -> dict[int, float]:
    """Return the profiled seconds per byte over all ranks, by the number of ranks of a node that average first."""
    work = best.workload
    with open_store(database) as store:
        profile = store.layer_profile(work.hardware.fingerprint, work.model.fingerprint, work.software)
    assert profile is not None
    found = named(wire.decode(LayerCosts, profile.document), "average")
    return {each.within: each.seconds_per_byte[1] for each in found if each.pipeline == 1}

"""Plans of `search.queue`: which are refused, and that the others run before all others."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from optuna.storages import InMemoryStorage

from autotune.errors import JobError
from autotune.events import unheard
from autotune.job_file import job_of_values
from autotune.machine.agent import Agent
from autotune.search.assembly import assemble
from autotune.search.execution.ledger import StudyLedger
from autotune.search.roles import Role
from autotune.search.space.given_plans import queued_plans
from autotune.search.space.space import Space
from autotune.workbench import Workbench
from autotune.workload import Prepared
from storage.store import open_store
from tests.machines.search_bench import AXES, MEMORY, PREDICTOR, Bench
from tests.machines.simulated import SimulatedLauncher
from tests.values.search import COSTS, prepared_of, solver_of
from trials import wire
from trials.launchers.local import LocalLauncher
from trials.outcome import OutOfMemory
from trials.plan import Layout, Packed, Plan
from trials.run.pool import WarmPool
from trials.sites.local import LocalSite
from trials.stage import Stage

LEAST_MEMORY = 30 << 20
PACKED = Packed(qv=11, qt=555, qv_min=10, qt_min=500, packer="cutting-stock")
OUTSIDE = Plan(
    packing=PACKED,
    layout=Layout(pipeline=2, data=1, zero=0),
    stages=(Stage(vision=4, language=0), Stage(vision=1, language=4)),
)
"""Another packer than those that are searched, and capacities between those of the grid."""


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        yield Bench(tmp_path, store)


def test_a_plan_that_failed_keeps_no_winner_of_an_earlier_search_out(bench: Bench) -> None:
    """However fast it was predicted to be."""
    starts = Space(AXES, solver_of(MEMORY, PREDICTOR)).starts
    least = min(map(PREDICTOR.epoch_seconds, starts))
    slower = next(plan for plan in starts if 1.1 * least < PREDICTOR.epoch_seconds(plan))
    full = OutOfMemory(stage=0, rank=0, needed_bytes=120, limit_bytes=100)
    bench.inherited, bench.remembers = (slower,), False
    failing = SimulatedLauncher(PREDICTOR, cause_of=lambda plan: None if plan == slower else full)
    for machine, is_tried in ((SimulatedLauncher(PREDICTOR), False), (failing, True)):
        found = bench.search(bench.study(), machine, trials=8).trials
        assert (Role.INHERITED in {trial.role for trial in found}) == is_tried


def test_queued_plans_run_first_in_their_order_also_outside_of_the_space(bench: Bench) -> None:
    assert PACKED.packer not in AXES.packers
    inside, study = Space(AXES, solver_of(MEMORY, PREDICTOR)).starts[0], bench.study()
    bench.queued = (OUTSIDE, inside)
    ledger = bench.search(study, SimulatedLauncher(PREDICTOR), trials=6)
    stored = bench.stored(study)
    assert [(trial.role, trial.plan) for trial in stored[:2]] == [("queued", OUTSIDE), ("queued", inside)]
    assert {Role.PACKED, Role.DEFAULT, Role.OMNIBAL} < {trial.role for trial in stored}
    outside, known, *_ = optuna.load_study(study_name=study.name, storage=bench.store.optuna_url).get_trials()
    assert [each.user_attrs["role"] for each in (outside, known)] == ["queued"] * 2
    assert outside.value == stored[0].result.epoch_seconds
    assert (not outside.params, "cutting-stock" in outside.user_attrs["plan_text"]) == (True, True)
    assert known.params.keys() == stored[1].parameters.keys() != set()
    assert [text for text in bench.said if text.startswith("A trial of the plan predicted best takes")]
    again = SimulatedLauncher(PREDICTOR)
    assert bench.search(study, again, trials=6).trials == ledger.trials
    assert again.asked == []


def test_queued_plans_leave_a_trial_for_each_kind_of_baseline(bench: Bench) -> None:
    bench.queued = (OUTSIDE, replace(OUTSIDE, packing=replace(PACKED, qt=600)))
    ledger = bench.search(bench.study(), SimulatedLauncher(PREDICTOR), trials=4)
    assert [trial.plan for trial in ledger.trials if trial.role == Role.QUEUED] == [OUTSIDE]
    assert (
        f"Of search.queue, the budget leaves out {bench.queued[1].id}; raise search.trials or its limits" in bench.said
    )


def naming(folder: Path, *plans: Plan, memory: int = 1 << 40) -> Prepared:
    """Return a job with these plans in its queue."""
    paths = [folder / f"{number}.json" for number in range(len(plans))]
    for path, plan in zip(paths, plans, strict=True):
        path.write_text(wire.encode(plan))
    return prepared_of(folder, memory, queue=[str(path) for path in paths])


def test_the_plans_of_the_files_are_queued_in_their_order(tmp_path: Path) -> None:
    other = replace(OUTSIDE, packing=replace(PACKED, qt=600))
    assert list(queued_plans(naming(tmp_path, OUTSIDE, other)).values()) == [OUTSIDE, other]


@pytest.mark.parametrize(
    ("plans", "message"),
    [
        ((OUTSIDE, OUTSIDE), rf"^search\.queue\[1\]: .*1\.json has plan {OUTSIDE.id}, like search\.queue\[0\]; remove"),
        (
            (replace(OUTSIDE, layout=Layout(pipeline=2, data=2, zero=0)),),
            r"^search\.queue\[0\]: .* for 4 devices, not 2",
        ),
        ((OUTSIDE, replace(OUTSIDE, stages=OUTSIDE.stages[:1] * 2)), r"^search\.queue\[1\]: stages hold 8 vision"),
    ],
    ids=["twice", "devices", "layers"],
)
def test_a_plan_that_is_not_one_of_this_job_or_named_twice_is_refused(
    tmp_path: Path, plans: tuple[Plan, ...], message: str
) -> None:
    with pytest.raises(JobError, match=message):
        queued_plans(naming(tmp_path, *plans))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        JobError, match=r"^search\.queue\[0\]: .*none\.json cannot be read \(No such file.*; give a file"
    ):
        queued_plans(prepared_of(tmp_path, queue=[str(tmp_path / "none.json")]))


def test_a_plan_that_surely_needs_more_memory_is_refused_with_the_arithmetic_before_a_trial(tmp_path: Path) -> None:
    prepared = naming(tmp_path, OUTSIDE, memory=LEAST_MEMORY)
    work = prepared.workload
    with open_store(f"sqlite:///{tmp_path}/autotune.db") as store, Agent(store) as agent:
        study = store.create_study(store.add_workload(work), {}, seed=0)
        store.save_layer_profile(work.hardware.fingerprint, work.model.fingerprint, work.software, wire.encode(COSTS))
        bench = Workbench(prepared=prepared, store=store, agent=agent, site=LocalSite("cpu"), folder=tmp_path)
        ledger, pool = StudyLedger(store, bench.spool, study, agent, ()), WarmPool(LocalLauncher(tmp_path, 2, "cpu"))
        with pytest.raises(
            JobError,
            match=rf"^search\.queue\[0\]: plan {OUTSIDE.id} cannot run: stage 0 is predicted to need 47 MiB, 42 MiB "
            r"at least, limit 30 MiB; change it, or remove it from the queue",
        ):
            assemble(
                bench,
                study,
                ledger,
                [pool],
                InMemoryStorage(),
                current_plan=None,
                queued=queued_plans(prepared),
                warm_start=False,
                listener=unheard,
            )
        assert not store.trials(study.id)


def test_paths_of_a_queue_are_relative_to_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    search = {"queue": ["one.json", "/two.json"]}
    job = job_of_values({"model": {"path": "m"}, "data": {"sources": [{"path": "d.jsonl"}]}, "search": search})
    assert job.search.queue == (tmp_path / "one.json", Path("/two.json"))

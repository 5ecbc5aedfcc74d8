"""The decision of `training.compile: auto`, by stored profiles, so that no rank starts."""

import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import JobError, TrialsKeepFailing
from autotune.events import Event, Note
from autotune.machine.agent import Agent
from autotune.search.compile_setting import decisions_of
from autotune.search.compiling import as_decided, decided
from autotune.workbench import Workbench
from storage.store import Store, open_store
from tests.values.search import COSTS, keeping, prepared_of
from tests.values.training import plan_of
from trials import wire
from trials.costs.layer_costs import LayerCosts
from trials.errors import NoCompiler
from trials.sites.local import LocalSite
from trials.workload import Workload

COMPILED = replace(COSTS, compile_seconds=60.0, compiled_shares=(("vision", 0.8, 0.02), ("language", 0.8, 0.01)))
"""Of layers that are a fifth faster."""
LONG = {"epochs": 1000}


@pytest.fixture(autouse=True)
def _compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a C++ compiler and Python's headers."""
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setenv("CXX", "/bin/sh")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"sqlite:///{tmp_path}/autotune.db") as store:
        yield store


BenchOf = Callable[..., Workbench]


@pytest.fixture
def bench_of(store: Store, tmp_path: Path) -> Iterator[BenchOf]:
    """Return the workbench of a job with `auto` and these settings of the training, in a search with others."""
    with Agent(store) as agent:

        def bench(training: dict[str, Any] | None = None, memory: int = 1 << 40, **search: Any) -> Workbench:
            prepared = prepared_of(tmp_path, memory, **search)
            settings = prepared.job.training.model_copy(update={"compile": "auto", **(training or {})})
            hardware = replace(prepared.workload.hardware, accelerator="cpu")
            prepared = replace(
                prepared,
                job=prepared.job.model_copy(update={"training": settings}),
                workload=replace(prepared.workload, hardware=hardware),
            )
            return Workbench(prepared=prepared, store=store, agent=agent, site=LocalSite("cpu"), folder=tmp_path)

        yield bench


def give(store: Store, work: Workload, plain: LayerCosts = COSTS, compiled: LayerCosts = COMPILED) -> None:
    """Store profiles of the layers both ways."""
    for costs in (plain, compiled):
        each = work.with_layers(compiled=costs.compile_seconds is not None)
        store.add_workload(each)
        store.save_layer_profile(each.hardware.fingerprint, each.model.fingerprint, each.software, wire.encode(costs))


class Heard(list[str]):
    """The notes that a decision prints."""

    def __call__(self, event: Event) -> None:
        if isinstance(event, Note):
            self.append(event.text)


def test_a_long_training_is_compiled_and_a_short_one_is_not_with_a_reason_that_is_stored(
    store: Store, bench_of: BenchOf
) -> None:
    work = bench_of().prepared.workload
    give(store, work)
    heard = Heard()
    short, long = decided(bench_of(), heard), decided(bench_of(LONG), heard)
    assert (short.prepared.job.training.compile, short.prepared.workload) == (False, work)
    assert (long.prepared.job.training.compile, long.prepared.workload) == (True, work.with_layers(compiled=True))
    assert heard[0].startswith("training.compile: auto: steps with compiled layers take 0.8")
    assert heard[0].endswith("; the training has 15: not compiled")
    assert heard[1].endswith("; the training has 15,000: compiled")
    stored = {decision.steps: decision.reason for decision in decisions_of(store, long.prepared.workload)}
    assert heard == [f"training.compile: auto: {stored[steps]}" for steps in (15, 15_000)]


@pytest.mark.parametrize("value", [True, False])
def test_a_job_that_says_it_is_not_asked(store: Store, bench_of: BenchOf, *, value: bool) -> None:
    bench, heard = bench_of({"compile": value}), Heard()
    assert decided(bench, heard) is as_decided(bench, heard) is bench
    assert (heard, decisions_of(store, bench.prepared.workload)) == ([], ())


def test_a_decision_stays_when_profiles_change(store: Store, bench_of: BenchOf) -> None:
    work = bench_of().prepared.workload
    give(store, work)
    first = decided(bench_of(LONG)).prepared
    give(store, work, compiled=replace(COMPILED, compiled_shares=(("language", 1.0, 0.0),)))
    assert decided(bench_of(LONG)).prepared == first == as_decided(bench_of(LONG)).prepared
    heard = Heard()
    decided(bench_of({"epochs": 1001}), heard)
    assert "take 1.00 of the time, known to 0.00, which is no clear gain: not compiled" in heard[0]


@pytest.mark.ranks
def test_a_decision_is_made_anew_by_new_profiles_alone(store: Store, bench_of: BenchOf) -> None:
    give(store, bench_of().prepared.workload)
    first = decided(bench_of(LONG)).prepared
    with pytest.raises(TrialsKeepFailing, match=r"the layers could not be profiled: .*model folder"):
        decided(bench_of(LONG), fresh=True)  # this job has no model
    assert as_decided(bench_of(LONG)).prepared == first


@pytest.mark.ranks
def test_layers_whose_compiled_profile_fails_are_not_compiled(store: Store, bench_of: BenchOf) -> None:
    give(store, bench_of().prepared.workload, compiled=COSTS)  # there is none of compiled layers
    heard = Heard()
    assert decided(bench_of(LONG), heard).prepared.job.training.compile is False
    assert "compiled layers cannot be profiled (the layers could not be profiled: " in heard[0]  # there is no model
    assert heard[0].endswith(": not compiled")


def test_work_that_measures_nothing_takes_the_last_decision_and_says_of_which_length(
    store: Store, bench_of: BenchOf
) -> None:
    heard = Heard()
    assert as_decided(bench_of(), heard).prepared.job.training.compile is False
    assert "is not decided for this job yet, so layers are not compiled" in heard[0]
    give(store, bench_of().prepared.workload)
    decided(bench_of(LONG))
    assert as_decided(bench_of({"epochs": 999}), heard).prepared.job.training.compile is True
    assert heard[1].endswith("(for 15,000 steps; `autotune tune JOB` decides it for 14,985)")


def check_left(bench: Workbench, why: str) -> None:
    """Decide, by no profile, that layers stay as they are."""
    heard = Heard()
    for resolve in (decided, as_decided):
        resolved = resolve(bench, heard).prepared
        assert (resolved.job.training.compile, resolved.workload) == (False, bench.prepared.workload)
    assert heard == [f"training.compile: auto: {why}: not compiled"] * 2


SHARDED = "ZeRO 3, whose hooks gather weights inside of a layer"


def test_a_named_layout_that_cannot_be_compiled_leaves_layers_as_they_are(bench_of: BenchOf) -> None:
    named = bench_of(LONG, space={"layouts": ["p1-d2-z1", "p1-d2-z3"]})
    check_left(named, f"compiling does not work with {SHARDED} (p1-d2-z3 in search.space.layouts)")


def test_a_current_plan_that_cannot_be_compiled_leaves_layers_as_they_are(bench_of: BenchOf, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(wire.encode(plan_of("5+4", data=2, zero=3)))
    check_left(
        bench_of(LONG, current_plan=file), f"compiling does not work with {SHARDED} (the plan of search.current_plan)"
    )


def test_a_job_that_names_no_such_plan_any_more_is_decided(store: Store, bench_of: BenchOf) -> None:
    give(store, bench_of().prepared.workload)
    decided(bench_of(LONG, space={"layouts": ["p1-d2-z3"]}))
    assert decided(bench_of(LONG)).prepared.job.training.compile is True
    check_left(
        bench_of(LONG, space={"layouts": ["p1-d2-z3"]}),
        f"compiling does not work with {SHARDED} (p1-d2-z3 in search.space.layouts)",
    )


def test_a_machine_without_a_compiler_leaves_layers_as_they_are_also_once_it_has_one(
    bench_of: BenchOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("CXX", "/nonexistent")
        decided(bench_of(LONG))
    check_left(bench_of(LONG), "compiling needs a compiler, and CXX=/nonexistent is none")


@pytest.mark.parametrize("resolve", [decided, as_decided])
def test_a_machine_without_a_compiler_is_refused_where_another_agent_chose_to_compile(
    store: Store, bench_of: BenchOf, monkeypatch: pytest.MonkeyPatch, resolve: Callable[[Workbench], Workbench]
) -> None:
    give(store, bench_of().prepared.workload)
    decided(bench_of(LONG))
    monkeypatch.setenv("CXX", "/nonexistent")
    with pytest.raises(NoCompiler, match=r"training\.compile needs a compiler, and CXX=/nonexistent is none"):
        resolve(bench_of(LONG))


def test_a_search_that_cannot_be_is_refused_before_anything_is_profiled(store: Store, bench_of: BenchOf) -> None:
    with pytest.raises(JobError, match=r"search\.sampler"):
        decided(bench_of(LONG, sampler="nobody"))
    assert store.layer_profiles() == ()


def test_memory_that_only_one_kind_of_layers_fits_decides(store: Store, bench_of: BenchOf) -> None:
    give(store, bench_of().prepared.workload, plain=keeping(8))
    found = dict[str, bool]()
    for power in range(20, 40):
        heard = Heard()
        compiled = decided(bench_of(LONG, memory=1 << power), heard).prepared.job.training.compiles
        found[heard[0].partition(";")[0]] = compiled
        if len(found) == 3:
            break
    nothing, only_compiled, both = found
    assert nothing == "training.compile: auto: no plan that can be compiled fits the memory: not compiled"
    assert only_compiled.endswith("only plans with compiled layers, which keep less, fit the memory: compiled")
    assert "steps with compiled layers take" in both
    assert list(found.values()) == [False, True, True]

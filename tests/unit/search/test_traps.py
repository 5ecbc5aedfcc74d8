"""Traps: found from the numbers of a profile and the environment, each with its seconds of a step and a remedy."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from optuna.storages import InMemoryStorage

from autotune.events import unheard
from autotune.machine.agent import Agent
from autotune.search.assembly import assemble
from autotune.search.execution.ledger import StudyLedger
from autotune.search.traps import Load, trap_findings
from autotune.workbench import Workbench
from storage.store import open_store
from tests.values.search import COSTS, prepared_of, workload_of
from trials import wire
from trials.costs.coefficients import SlowCall
from trials.costs.layer_costs import LayerCosts, LoadCost
from trials.launchers.commands import EXPANDABLE, rank_environments
from trials.launchers.local import LocalLauncher
from trials.run.pool import WarmPool
from trials.sites.local import LocalSite
from trials.workload import Workload

ON_GPU = replace(workload_of(), hardware=replace(workload_of().hardware, cpu_cores=16))
WORK = replace(ON_GPU, hardware=replace(ON_GPU.hardware, accelerator="cpu"))
CONVOLUTION: SlowCall = ("projector", "convolution", (2e-2, 0, 0, 0), (5e-3, 0, 0, 0))


def found(
    work: Workload = WORK,
    costs: LayerCosts | None = COSTS,
    calls: tuple[SlowCall, ...] = (),
    workers: int = 0,
    environment: Mapping[str, str] | None = None,
) -> list[str]:
    return [f"{each.what}; {each.remedy}" for each in trap_findings(work, calls, costs, workers, environment or {})]


def loading(seconds: float) -> LayerCosts:
    """Costs where a pack of a step loads in these times of its layers' seconds."""
    computing = Load.of(WORK).computing(COSTS)
    return replace(COSTS, loading=LoadCost(pixels_seconds=(0, 0, 0, seconds * computing)))


@pytest.mark.parametrize("work", [WORK, ON_GPU], ids=["CPU", "GPU"])
def test_a_usual_job_has_no_traps(work: Workload) -> None:
    assert found(work, workers=4) == []


def test_a_convolution_costs_what_the_product_of_its_patches_saves_in_a_step() -> None:
    units = WORK.data.vision_units / WORK.data.samples * WORK.global_batch_samples / WORK.hardware.devices
    (message,) = found(calls=(CONVOLUTION,))
    assert message.startswith(f"a convolution in the projector that is slow here costs {units * 15:.3g} ms of a step")
    assert "torch.nn.functional.unfold" in message


def test_what_costs_little_of_a_step_is_left_out_where_a_profile_says_how_long_it_takes() -> None:
    little: SlowCall = ("projector", "convolution", (1e-8, 0, 0, 0), (0, 0, 0, 0))
    assert found(calls=(little,)) == []
    assert len(found(calls=(little,), costs=None)) == 1


def test_attention_counts_in_all_layers_and_names_what_keeps_it_from_a_fused_kernel() -> None:
    slow: SlowCall = ("language", "dropout", (0, 0, 1e-7, 0), (0, 0, 4e-8, 0))
    load = Load.of(WORK)
    (message,) = found(calls=(slow,))
    seconds = WORK.model.language_layers * 6e-8 * load.sizes[2]
    assert (
        f"the language layers without a fused kernel, because of its dropout costs {1000 * seconds:.3g} ms" in message
    )
    assert "attention_dropout" in message


def test_a_rank_that_waits_for_its_data_is_told_how_many_processes_load_in_time() -> None:
    (message,) = found(ON_GPU, loading(2.5), workers=1)
    assert "waiting for data" in message
    assert "with 1 loading process costs" in message
    assert "set data.workers to 3" in message
    assert found(ON_GPU, loading(2.5), workers=3) == []
    (message,) = found(ON_GPU, loading(0.2))
    assert "set data.workers to 1" in message


def test_loading_that_no_free_cores_can_take_over_is_a_trap_where_it_takes_longer_than_the_layers() -> None:
    assert found(costs=loading(0.9)) == []
    (message,) = found(costs=loading(1.1))
    assert "smaller" in message
    few = replace(ON_GPU, hardware=replace(ON_GPU.hardware, cpu_cores=4))
    (message,) = found(few, loading(9), workers=1)
    assert "give the ranks more cores" in message


def test_a_frozen_tower_that_runs_backward_is_named() -> None:
    embedding = COSTS["vision_embedding"]
    slow = replace(embedding, frozen_parameters=embedding.parameters, backward_seconds=(1.0, 0, 0, 0))
    costs = replace(COSTS, layers=(("vision_embedding", slow), *COSTS.layers[1:]))
    (message,) = found(costs=costs)
    assert "the backward pass of the patch embedding, though nothing up to there trains, costs" in message
    assert (
        found(
            costs=replace(costs, layers=(("vision_embedding", replace(slow, frozen_parameters=0)), *COSTS.layers[1:]))
        )
        == []
    )


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_an_allocator_without_segments_that_grow_is_named_where_the_environment_sets_it(name: str) -> None:
    (message,) = found(ON_GPU, workers=4, environment={name: "max_split_size_mb:128"})
    assert f"{name}=max_split_size_mb:128 leaves gaps" in message
    assert f"add {EXPANDABLE} to it" in message
    assert found(ON_GPU, workers=4, environment={name: f"max_split_size_mb:128, {EXPANDABLE}"}) == []
    assert found(WORK, environment={name: "max_split_size_mb:128"}) == []


def test_the_first_variable_of_the_allocator_counts() -> None:
    both = {"PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE, "PYTORCH_ALLOC_CONF": "max_split_size_mb:128"}
    (message,) = found(ON_GPU, workers=4, environment=both)
    assert message.startswith("PYTORCH_ALLOC_CONF=")


def test_ranks_on_gpus_have_segments_that_grow_unless_the_environment_sets_their_allocator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert [each["PYTORCH_ALLOC_CONF"] for each in rank_environments(2, "cuda")] == [EXPANDABLE] * 2
    assert all("PYTORCH_ALLOC_CONF" not in each for each in rank_environments(2, "cpu"))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    (own,) = rank_environments(1, "cuda")
    assert "PYTORCH_ALLOC_CONF" not in own
    assert own["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:128"


def test_a_search_names_the_traps_of_its_profile(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prepared = prepared_of(tmp_path)
    work, costs = prepared.workload, replace(COSTS, slow_calls=(CONVOLUTION,))
    with open_store(f"sqlite:///{tmp_path}/autotune.db") as store, Agent(store) as agent:
        study = store.create_study(store.add_workload(work), {}, seed=0)
        store.save_layer_profile(work.hardware.fingerprint, work.model.fingerprint, work.software, wire.encode(costs))
        bench = Workbench(prepared=prepared, store=store, agent=agent, site=LocalSite("cpu"), folder=tmp_path)
        ledger = StudyLedger(store, bench.spool, study, agent, ())
        pool = WarmPool(LocalLauncher(tmp_path, 2, "cpu"))
        optuna = InMemoryStorage()
        assemble(bench, study, ledger, [pool], optuna, current_plan=None, queued={}, warm_start=False, listener=unheard)
    assert [each for each in caplog.messages if "a convolution in the projector that is slow here costs" in each]

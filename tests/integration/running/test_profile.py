"""Real profiling of the layers, and what is stored."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from autotune.cli import main
from autotune.forecast.profile_file import PROFILE_MARK, read_profile
from autotune.machine.hardware import probe_hardware, software
from autotune.model_shape import model_shape
from autotune.output_file import check_output_file
from autotune.search.execution.profiling import layer_costs, profile_layers
from autotune.workload import Prepared
from storage.store import open_store
from tests.contracts.test_families import TINY
from tests.values.exchanges import named
from tests.values.training import job_of, plan_of, prepared_of, variant_of
from trials import plugins, wire
from trials.costs.coefficients import KINDS, LayerKind
from trials.costs.layer_costs import LayerCosts
from trials.data.loader import MicroBatch, PackDataset
from trials.launchers.local import LocalLauncher
from trials.model.skeleton import build_skeleton, count_parameters, load_config
from trials.outcome import Cause
from trials.run.pool import Answers, WarmPool
from trials.tasks.answer import LayerTiming, UpdateTiming
from trials.tasks.profiling import exchanges, layer_profile
from trials.tasks.profiling.caches import Caches
from trials.tasks.profiling.exchanges import Exchanges
from trials.tasks.profiling.layer_profile import run_profile
from trials.tasks.profiling.loading import time_loading
from trials.tasks.profiling.probes import Probe
from trials.tasks.request import ProbeSizes, Profile, Request, Trial

pytestmark = pytest.mark.ranks

DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "first_k_dense_replace": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32,
    "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32, "moe_intermediate_size": 64,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "pad_token_id": 0,
}  # fmt: skip
"""DeepSeek-V3 in small: latent attention, one dense layer, then layers with experts."""


class Asked(Exception):
    """Something is to be measured."""


class NeverAnswers:
    def ask(self, *_: object, **__: object) -> Answers:
        raise Asked


@pytest.mark.long
def test_a_stored_profile_is_taken_and_one_of_another_form_measured_again(
    costs: LayerCosts, prepared: Prepared, tmp_path: Path
) -> None:
    work = prepared.workload
    keys = (work.hardware.fingerprint, work.model.fingerprint, work.software)
    with open_store(f"sqlite:///{tmp_path}/autotune.db") as store:
        store.add_workload(work)
        store.save_layer_profile(*keys, '{"layers": [0.1]}')
        with pytest.raises(Asked):
            layer_costs(prepared, store, NeverAnswers(), Path())
        store.save_layer_profile(*keys, wire.encode(costs))
        assert layer_costs(prepared, store, NeverAnswers(), Path()) == costs


def test_a_profile_says_how_much_of_averages_a_computation_hides(costs: LayerCosts) -> None:
    every, *others = costs.communications
    assert every.bucket_bytes in {1 << 16, 1 << 18, 1 << 20, 1 << 22}
    assert 0 <= every.hidden_share <= 1
    assert {(other.bucket_bytes, other.hidden_share) for other in others} == {(0, 0.0)}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer_costs_time_and_memory(costs: LayerCosts, kind: LayerKind) -> None:
    cost = costs[kind]
    size = (8.0, 500.0, 100_000.0, 1.0)

    def at(coefficients: tuple[float, ...]) -> float:
        return sum(value * coefficient for value, coefficient in zip(size, coefficients, strict=True))

    assert min(at(cost.forward_seconds), at(cost.backward_seconds)) > 0
    assert at(cost.kept_bytes) > 0 < at(cost.output_bytes)
    assert cost.bytes_error < 1e-6
    assert (at(cost.recompute_seconds) > 0) == (kind in ("vision", "language"))
    assert (at(cost.shared_bytes) > 100) == (kind == "language")  # rotary embeddings
    assert cost.can_select == (kind in ("vision", "language"))
    assert at(cost.selective_bytes) < at(cost.selective_peak_bytes) or not cost.can_select
    assert at(cost.selective_bytes) < 0.7 * at(cost.kept_bytes)


def test_links_reduction_and_optimizer_are_timed(costs: LayerCosts) -> None:
    assert 0 < costs.link.latency_seconds < 0.1
    assert 0 <= costs.link.seconds_per_byte < 1e-6  # none where the small message met a busy machine
    (average,) = named(costs, "average")
    assert 0 < average.seconds_per_byte[1] < 1e-6
    copies, stages = costs.communications
    assert (copies.pipeline, copies.data, copies.link.latency_seconds) == (1, 2, 0)
    assert (stages.pipeline, stages.data, stages.link) == (2, 1, costs.link)
    assert (average.pipeline, average.ranks) == (1, 2)
    alone, plain, split = costs.updates
    assert (alone.data_parallel, plain.data_parallel, split.data_parallel) == (1, 2, 2)
    assert (plain.zero, split.zero) == (0, 1)
    assert all(0 < update.seconds_per_parameter < 1e-6 for update in costs.updates)


def test_exchanges_of_two_ranks_are_timed_and_what_they_keep_is_counted(costs: LayerCosts) -> None:
    in_attention, behind_projector = named(costs, "sequence")
    part = np.array((0, 200.0, 30_000.0, 1.0))
    for cost in (in_attention, behind_projector):
        assert 0 < part @ cost.forward_seconds < 0.1
        assert 0 < part @ cost.backward_seconds < 0.1
    assert (in_attention.layer, behind_projector.layer) == ("language", "projector")
    # The two key-value heads go to a rank each, so that all is divided.
    held = in_attention.held(costs["language"])
    assert part @ held.kept_bytes == pytest.approx(part @ costs["language"].kept_bytes, rel=1e-6)
    assert part @ held.shared_bytes == pytest.approx(part @ costs["language"].shared_bytes, rel=1e-6)


def test_exchanges_of_layers_that_two_ranks_hold_are_timed(costs: LayerCosts, prepared: Prepared) -> None:
    (cost,) = named(costs, "tensor")
    part = np.array((0, 200.0, 30_000.0, 1.0))
    assert (cost.ranks, cost.layer) == (2, "language")
    assert min(part @ cost.forward_seconds, part @ cost.backward_seconds) > 0
    skeleton = build_skeleton(load_config(prepared.job.model.path), torch.float32)
    (layer,) = skeleton.modules(skeleton.chain.language_layers[:1])
    norms = sum(parameter.numel() for name, parameter in layer.named_parameters() if "norm" in name)
    assert costs["language"].tensor_parallel_parameters == costs["language"].parameters - norms


def gathering(costs: LayerCosts) -> float:
    """Return the seconds of gathering a layer of each kind."""
    return sum(cost.forward_seconds[-1] for cost in named(costs, "gather"))


def test_gathers_of_weights_that_two_ranks_share_are_timed(costs: LayerCosts) -> None:
    assert [(cost.layer, cost.ranks) for cost in named(costs, "gather")] == [(kind, 2) for kind in KINDS]
    assert gathering(costs) > 0
    (scatter,) = named(costs, "scatter")
    assert scatter.seconds_per_byte[1] > 0
    assert 0 <= scatter.added_share <= 2


@pytest.mark.long
def test_links_and_reductions_of_every_layout_of_four_ranks_are_timed(example: Path, tmp_path: Path) -> None:
    prepared = prepared_of(example, tmp_path, hardware={"devices": 4})
    with WarmPool(LocalLauncher(tmp_path, 4, "cpu")) as pool:
        costs = profile_layers(prepared, pool, tmp_path)
    assert [(cost.pipeline, cost.data) for cost in costs.communications] == [(1, 4), (2, 2), (4, 1)]
    for cost in costs.communications:
        assert (cost.link.latency_seconds > 0) == (cost.pipeline > 1)
    found = named(costs, "average")
    assert [(cost.pipeline, cost.ranks) for cost in found] == [(1, 4), (2, 2)]
    assert min(cost.seconds_per_byte[1] for cost in found) > 0
    assert costs.timed_degrees("sequence") == (2, 4)
    part = np.array((0, 200.0, 30_000.0, 1.0))
    shared = [cost.held(costs["language"]) for cost in named(costs, "sequence") if cost.layer == "language"]
    two, four = (part @ np.array(cost.kept_bytes) for cost in shared)
    assert two == pytest.approx(part @ costs["language"].kept_bytes, rel=1e-6)
    # Each of the two key-value heads, of 12 float32 values for keys and values each, goes to two ranks.
    assert four - two == pytest.approx(200 * 2 * 2 * 12 * 4, rel=1e-3)


class Hurried:
    """Ranks that have no time for the exchanges of a profile, as on a slow link; of packs there are few sizes."""

    def __init__(self, pool: WarmPool) -> None:
        self._pool = pool

    def ask(
        self,
        request: Request,
        timeout_seconds: float,
        on_wait: Callable[[], None] = lambda: None,
        on_step: Callable[[float], bool] | None = None,
    ) -> Answers | Cause:
        assert isinstance(request.task, Profile)
        sizes = ProbeSizes(unit_counts=(1, 2, 3), sample_shapes=((1, 64), (4, 16), (1, 256), (2, 128)))
        task = replace(request.task, sizes=sizes, exchange_seconds=1e-9, repeats=2)
        return self._pool.ask(replace(request, task=task), timeout_seconds, on_wait, on_step)


@pytest.mark.long
def test_over_slow_links_small_exchanges_are_timed_and_a_warning_names_them(
    shallow: Path, pool: WarmPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    costs = profile_layers(prepared_of(shallow, tmp_path), Hurried(pool), tmp_path)
    (warning,) = (text for text in caplog.messages if "links between the ranks are slow" in text)
    for shortened in (
        "messages of 2 stages (1/4096)",
        "averaging of gradients over 2 data ranks (1/256)",
        "exchanges of 2 ranks that share packs (1/16)",
        "exchanges of 2 ranks that hold layers together (1/16)",
        "gathering of language weights (1/",
        "averaging of gradients that are kept in shards (1/",
        "update with ZeRO 0 (computed)",
        "update with ZeRO 1 (computed)",
    ):
        assert shortened in warning
    (average,) = named(costs, "average")
    assert min(costs.link.seconds_per_byte, average.seconds_per_byte[1], gathering(costs)) > 0
    part = np.array((0, 200.0, 30_000.0, 1.0))
    (sharing, _), (tensor,) = named(costs, "sequence"), named(costs, "tensor")
    for coefficients in (sharing.forward_seconds, sharing.backward_seconds, tensor.forward_seconds):
        assert 0 < part @ coefficients < 1
    # What ranks keep is counted with packs of at most 16 tokens, and is as exact.
    kept = sharing.held(costs["language"]).kept_bytes
    assert part @ kept == pytest.approx(part @ costs["language"].kept_bytes, rel=1e-6)
    alone, plain, split = (update.seconds_per_parameter for update in costs.updates)
    of_parameter = gathering(costs) / sum(costs[kind].parameters for kind in KINDS)
    assert plain == alone
    assert split >= 0.999 * (alone / 2 + of_parameter)  # at least: the costs take the faster rank's gathers


@pytest.mark.long
def test_three_ranks_cannot_share_four_heads(shallow: Path, tmp_path: Path) -> None:
    prepared = prepared_of(shallow, tmp_path, hardware={"devices": 3})
    with WarmPool(LocalLauncher(tmp_path, 3, "cpu")) as pool:
        assert not named(profile_layers(prepared, pool, tmp_path), "sequence")


@pytest.mark.parametrize(("spread", "timed"), [(1e9, {1, 2, 5}), (0.0, {1, 2})])
def test_further_sizes_are_timed_where_repeats_agree(
    spread: float, timed: set[int], shallow: Path, tmp_path: Path
) -> None:
    task = Profile(
        sizes=ProbeSizes(unit_counts=(1, 2), sample_shapes=((1, 64), (2, 64))),
        curve_sizes=ProbeSizes(unit_counts=(5,), sample_shapes=((3, 64),)),
        curve_spread=spread,
        zero_stages=(),
        exchange_seconds=None,
        repeats=2,
        of_node=1,
    )
    report = run_profile(prepared_of(shallow, tmp_path).request(plan_of("4+2"), task), task, torch.device("cpu"))
    assert {timing.units for timing in report.timings if timing.layer == "vision"} == timed
    # No time is given for exchanges.
    assert (report.updates, report.communications, report.exchanges) == ((),) * 3


def test_exchanges_are_timed_before_between_and_after_the_layers(
    shallow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, begun = iter((9.0, 0.25, 0.5)), list[str]()
    probing = layer_profile.Profiler.timings

    def time_all(*_: object, **__: object) -> Exchanges:
        begun.append("exchanges")
        update = UpdateTiming(zero=0, data_parallel=1, seconds_per_parameter=next(seconds))
        return Exchanges(communications=(), exchanges=(), updates=(update,), shortened=())

    def timings(profiler: layer_profile.Profiler, probes: Sequence[Probe]) -> tuple[LayerTiming, ...]:
        begun.append("layers")
        return probing(profiler, probes)

    monkeypatch.setattr(exchanges, "time_exchanges", time_all)
    monkeypatch.setattr(layer_profile, "slowest", lambda _, values: [*values])  # as on a single rank
    monkeypatch.setattr(layer_profile.Profiler, "timings", timings)
    sizes = ProbeSizes(unit_counts=(1, 2), sample_shapes=((1, 64), (2, 64)))
    task = Profile(
        sizes=sizes, curve_sizes=sizes, curve_spread=10.0, zero_stages=(), exchange_seconds=60.0, repeats=1, of_node=1
    )
    report = run_profile(prepared_of(shallow, tmp_path).request(plan_of("4+2"), task), task, torch.device("cpu"))
    assert begun == ["exchanges", "layers", "exchanges", "layers", "exchanges"]
    assert [update.seconds_per_parameter for update in report.updates] == [0.5]


def test_packs_are_loaded_in_turns_with_empty_caches_as_in_a_training(
    shallow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[object] = []
    load = PackDataset.__getitem__

    def noted(packs: PackDataset, number: int) -> MicroBatch:
        events.append(number)
        return load(packs, number)

    monkeypatch.setattr(PackDataset, "__getitem__", noted)
    monkeypatch.setattr(Caches, "empty", lambda _: events.append("emptied"))
    task = Trial(warmup_steps=(), timed_steps=(0,))
    time_loading(prepared_of(shallow, tmp_path).request(plan_of("4+2"), task), repeats=2)
    of_round = [event for number in range(6) for event in ("emptied", number)]
    assert events == 2 * 3 * of_round


@pytest.mark.parametrize("loaded", ["pixels_seconds", "labels_seconds"])
def test_loading_takes_time_with_pixels_and_without(costs: LayerCosts, loaded: str) -> None:
    units, tokens, _, constant = getattr(costs.loading, loaded)
    assert units * 8 + tokens * 500 + constant > 0


@pytest.mark.long
def test_dense_layers_before_experts_are_profiled_as_one_of_the_experts(
    shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    def change(config: dict[str, Any]) -> None:
        config["text_config"] = DEEPSEEK | {"vocab_size": config["text_config"]["vocab_size"]}

    prepared = prepared_of(variant_of(shallow, tmp_path / "deepseek", change), tmp_path)
    with open_store(f"sqlite:///{tmp_path}/autotune.db") as store:
        store.add_workload(prepared.workload)
        costs = layer_costs(prepared, store, pool, tmp_path)
    skeleton = build_skeleton(load_config(prepared.job.model.path), torch.float32)
    dense, *experts = (count_parameters(skeleton.model, [path]) for path in skeleton.chain.language_layers)
    assert dense != experts[0] == experts[1] == costs["language"].parameters
    assert costs["language"].bytes_error < 1e-6
    assert len(costs.updates) == 3


@pytest.mark.long
def test_a_tower_whose_states_behind_several_layers_are_taken_is_profiled(
    shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    plugins.load(TINY, "llava-siglip").make(tmp_path / "model")
    prepared = prepared_of(shallow, tmp_path, model={"path": str(tmp_path / "model")})
    with open_store(f"sqlite:///{tmp_path}/autotune.db") as store:
        store.add_workload(prepared.workload)
        costs = layer_costs(prepared, store, pool, tmp_path)
    skeleton = build_skeleton(load_config(prepared.job.model.path), torch.float32)
    assert len(skeleton.chain.kept) == 2
    sizes = {count_parameters(skeleton.model, [path]) for path in skeleton.chain.vision_layers}
    assert sizes == {costs["vision"].parameters}
    assert costs["projector"].parameters == count_parameters(skeleton.model, skeleton.chain.projector)


@pytest.mark.usefixtures("home", "brief_profiles")
def test_profile_on_one_rank_prints_and_writes_the_costs(example: Path, tmp_path: Path) -> None:
    job = job_of(example, tmp_path / "output", hardware={"devices": 1})
    (tmp_path / "job.json").write_text(json.dumps(job.model_dump(mode="json", exclude_none=True)))
    out = tmp_path / "costs.json"
    done = CliRunner().invoke(main, ["profile", str(tmp_path / "job.json"), "--json", "--out", str(out)])
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    check_output_file(out, (".json",), PROFILE_MARK)  # a later profile may replace it
    written = read_profile(out)
    assert document["costs"] == wire.to_document(written.costs)
    assert written.hardware == probe_hardware(job.hardware.devices)
    assert (written.model, written.software) == (model_shape(job.model), software())
    assert abs(datetime.now(UTC) - written.created) < timedelta(minutes=5)
    assert document["file"] == str(out)
    assert set(document["at_typical_pack"]) == set(KINDS)
    assert written.costs.link.latency_seconds == 0
    assert not named(written.costs, "average")
    assert not named(written.costs, "sequence")

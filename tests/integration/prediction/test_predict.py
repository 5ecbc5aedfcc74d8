"""`autotune predict`: forecasts of plans without running them."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from filelock import FileLock

from autotune import predict
from autotune.cli import main
from autotune.events import Event, PhaseBegan
from autotune.forecast.profile_file import ProfiledCosts
from autotune.machine.devices import lock_file
from storage.store import open_store
from tests.programs.plots import drawn_texts, overlaps
from tests.programs.users import JobFile, databases, document, refusal
from tests.values.exchanges import around_layers, averages, copies, exchanging, of_weights, without
from tests.values.forecast import PLAN, store_profile
from tests.values.storage import WORKLOAD, best_of, concluded
from tests.values.training import PACKED, offloading, plan_of
from trials import wire
from trials.costs.coefficients import KINDS, NOTHING
from trials.costs.layer_costs import LayerCosts, LinkCost
from trials.costs.profiled_sizes import ProfiledSizes
from trials.plan import Layout, Levelled, Packed, Plan
from trials.stage import Recomputed, Stage

pytestmark = pytest.mark.usefixtures("home")


def predicted(*arguments: str | Path) -> dict[str, Any]:
    return document("predict", *arguments)


def test_a_profile_of_data_with_other_sizes_is_named(
    job: JobFile, profiled: ProfiledCosts, profile: Path, plan_file: Callable[[Plan], Path]
) -> None:
    options = (job.path, "--device-profile", profile, "--plan", plan_file(PLAN))
    usual = predicted(*options)["extrapolated"]
    sizes = ProfiledSizes(units=24, image_units=0, tokens=1024)
    profile.write_text(wire.encode(replace(profiled, costs=replace(profiled.costs, sizes=sizes))))
    assert predicted(*options)["extrapolated"] == [
        *usual,
        "the layers' times and bytes to other sizes: the profile is of data without images, of which these data have "
        "some; `autotune profile JOB` measures them",
    ]


def test_a_plan_whose_packs_ranks_share_is_predicted(
    job: JobFile, profile: Path, plan_file: Callable[[Plan], Path]
) -> None:
    options = (job.path, "--device-profile", profile, "--devices", "4", "--plan")
    shared = replace(PLAN, layout=replace(PLAN.layout, data=2), packing=replace(PACKED, sequence=2))
    (alone,), (other,) = (predicted(*options, plan_file(each))["plans"] for each in (PLAN, shared))
    assert other["parts"]["communication"] > alone["parts"]["communication"]
    assert other["parts"]["ideal"] == pytest.approx(alone["parts"]["ideal"] / 2)
    kept = [[stage["expected"] - stage["static"] for stage in each["stages"]] for each in (alone, other)]
    assert all(one > 1.5 * half for one, half in zip(*kept, strict=True))


def test_a_plan_whose_layers_ranks_hold_together_is_predicted(
    job: JobFile, profiled: ProfiledCosts, plan_file: Callable[[Plan], Path], tmp_path: Path
) -> None:
    parameters = profiled.costs["language"].parameters
    layers = tuple(
        (kind, replace(cost, tensor_parallel_parameters=parameters // 2 if kind == "language" else 0))
        for kind, cost in profiled.costs.layers
    )
    around = around_layers(2, (0, 1e-6, 0, 1e-4), (0, 1e-6, 0, 1e-4))
    costs = exchanging(replace(profiled.costs, layers=layers), around)
    path = tmp_path / "cut.json"
    path.write_text(wire.encode(replace(profiled, costs=costs)))
    options = (job.path, "--device-profile", path, "--devices", "4", "--plan")
    cut = replace(PLAN, layout=replace(PLAN.layout, tensor=2))
    (alone,), (other,) = (predicted(*options, plan_file(each))["plans"] for each in (PLAN, cut))
    assert other["parts"]["communication"] > alone["parts"]["communication"]
    assert other["parts"]["ideal"] == pytest.approx(alone["parts"]["ideal"] / 2)
    static = [[stage["static"] for stage in each["stages"]] for each in (alone, other)]
    assert static[1][0] == static[0][0]
    # Weights, gradients and moments of the layers' slices on the other rank.
    assert static[0][1] - static[1][1] == pytest.approx(16 * 8 * (parameters // 2) / 2)
    text = CliRunner().invoke(main, ["predict", *map(str, options), str(plan_file(cut))])
    assert "pipeline 2 x data 1 x tensor 2, ZeRO 0" in text.stdout


def test_a_plan_with_zero_3_is_predicted_once_the_profile_knows_what_is_gathered(
    job: JobFile, profiled: ProfiledCosts, profile: Path, plan_file: Callable[[Plan], Path], tmp_path: Path
) -> None:
    costs = exchanging(profiled.costs, *of_weights(4, (0.01,) * 5, 1e-9))
    path = tmp_path / "gathered.json"
    path.write_text(wire.encode(replace(profiled, costs=costs)))
    split = Layout(pipeline=1, data=4, zero=1)
    stage = Stage(vision=12, language=8)
    plans = [Plan(packing=PACKED, layout=replace(split, zero=zero), stages=(stage,)) for zero in (1, 3)]
    options = (job.path, "--devices", "4", "--device-profile")
    (alone,), (other,) = (predicted(*options, path, "--plan", plan_file(each))["plans"] for each in plans)
    assert other["parts"]["communication"] > alone["parts"]["communication"]
    # Shares of the weights and of the gradients, 4 bytes each.
    parameters = sum(
        count * profiled.costs[kind].parameters for kind, count in zip(KINDS, (1, 12, 1, 8, 1), strict=True)
    )
    assert alone["stages"][0]["static"] - other["stages"][0]["static"] == pytest.approx(8 * parameters * 3 / 4)
    text = CliRunner().invoke(main, ["predict", *map(str, (*options, path, "--plan", plan_file(plans[1])))])
    assert "pipeline 1 x data 4, ZeRO 3" in text.stdout
    _, said = refusal("predict", *options, profile, "--plan", plan_file(plans[1]))
    assert "no times of what ranks exchange that hold gradients or weights in shards (ZeRO 3)" in said


def test_a_plan_whose_layers_offload_is_predicted_once_the_profile_knows_copies(
    job: JobFile, profiled: ProfiledCosts, profile: Path, plan_file: Callable[[Plan], Path], tmp_path: Path
) -> None:
    def profile_with(ram_bytes: int) -> Path:
        path = tmp_path / f"copies-{ram_bytes}.json"
        costs = exchanging(profiled.costs, copies(1e-12, 1e-12))
        hardware = replace(profiled.hardware, ram_bytes=ram_bytes)
        path.write_text(wire.encode(replace(profiled, costs=costs, hardware=hardware)))
        return path

    recomputing = plan_of("12+0r12,0", "0+8r0,8", packing=PACKED)
    plan = offloading(recomputing, "both")
    (other,), (found,) = (
        predicted(job.path, "--device-profile", profile_with(1 << 40), "--plan", plan_file(each))["plans"]
        for each in (recomputing, plan)
    )
    assert other["parts"]["recompute"] > 0
    assert found["parts"]["recompute"] == pytest.approx(0, abs=1e-9)
    assert found["fits"]
    hosts = [[stage["host"] for stage in each["stages"]] for each in (other, found)]
    assert hosts[0] == [0, 0]
    assert min(hosts[1]) > 0
    few = profile_with(round(max(hosts[1])))
    arguments = ["predict", str(job.path), "--device-profile", str(few), "--plan", str(plan_file(plan))]
    text = CliRunner().invoke(main, arguments).stdout
    assert "ZeRO 0, layers offload; split 12v+0l | 0v+8l; offload 12v+0l | 0v+8l" in text
    assert "DOES NOT FIT: a rank is expected to offload more than the host has for it; offload fewer layers" in text
    assert re.search(r"^stage  layers  +offload +idle .* host MiB$", text, re.MULTILINE)
    _, said = refusal("predict", job.path, "--device-profile", profile, "--plan", plan_file(plan))
    assert "the profile has no times of copies of what layers keep to the host's memory" in said


def test_a_plan_with_levels_is_predicted(job: JobFile, profile: Path, plan_file: Callable[[Plan], Path]) -> None:
    levels = (replace(PACKED, qt=150, qt_min=0), replace(PACKED, qv=12, qt=600, sequence=2))
    stages = tuple(replace(stage, further_levels=(Recomputed(vision=0, language=0),)) for stage in PLAN.stages)
    layout = replace(PLAN.layout, data=2)
    levelled = Plan(packing=Levelled(levels=levels), layout=layout, stages=stages)
    arguments = (job.path, "--device-profile", profile, "--devices", "4", "--plan", plan_file(levelled))
    (only,) = predicted(*arguments)["plans"]
    assert (only["id"], only["plan"]) == (levelled.id, wire.to_document(levelled))
    assert sum(only["parts"].values()) == pytest.approx(only["epoch_seconds"])
    text = CliRunner().invoke(main, ["predict", *map(str, arguments)])
    assert "level 2 packs of Qv 12, Qt 600" in text.stdout
    assert "stage 0 |" in text.stdout


def test_a_plan_is_predicted_from_a_profile_without_devices_and_database(
    job: JobFile, profile: Path, plan_file: Callable[[Plan], Path], home: Path
) -> None:
    lock = lock_file()
    lock.parent.mkdir(parents=True)
    with FileLock(lock):
        found = predicted(job.path, "--device-profile", profile, "--plan", plan_file(PLAN))
    assert databases(home) == []
    (only,) = found["plans"]
    assert (only["id"], only["plan"]) == (PLAN.id, wire.to_document(PLAN))
    assert sum(only["parts"].values()) == pytest.approx(only["epoch_seconds"])
    assert found["samples"] / only["epoch_seconds"] == pytest.approx(only["predicted_samples_per_second"])
    assert only["parts"]["communication"] > 0
    assert [stage["low"] <= stage["expected"] <= stage["high"] for stage in only["stages"]] == [True, True]
    assert max(end for _, end in only["step"]["update"]) == pytest.approx(only["step"]["seconds"], abs=1e-5)
    assert found["extrapolated"] == []


def test_the_function_predicts_what_the_command_does(
    job: JobFile, profile: Path, plan_file: Callable[[Plan], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    heard: list[Event] = []
    (found,) = predict(job.path, device_profile=profile, plan=PLAN, listener=heard.append)
    assert [event.text for event in heard if isinstance(event, PhaseBegan)] == ["Reading the data"]
    assert capfd.readouterr() == ("", "")
    assert predict(str(job.path), device_profile=str(profile), plan=plan_file(PLAN))[0].parts == found.parts
    (shown,) = predicted(job.path, "--device-profile", profile, "--plan", plan_file(PLAN))["plans"]
    assert (shown["id"], shown["epoch_seconds"]) == (found.plan.id, pytest.approx(found.prediction.epoch_seconds))
    first, second = predict(job.path, device_profile=profile, top=2, memory_limit="1GiB")
    assert first.prediction.epoch_seconds <= second.prediction.epoch_seconds
    assert first.memory_limit_bytes == 1 << 30


def test_the_text_shows_parts_memory_and_a_chart_of_100_columns(
    job: JobFile, profile: Path, plan_file: Callable[[Plan], Path]
) -> None:
    arguments = ["predict", str(job.path), "--device-profile", str(profile), "--plan", str(plan_file(PLAN))]
    answer = CliRunner().invoke(main, arguments)
    assert answer.exit_code == 0, answer.stderr
    output = answer.stdout
    assert f"Plan {PLAN.id}\n  pipeline 2 x data 1" in output
    assert re.search(r"epoch \d+\.\d \+- \d+\.\d s in \d+ steps, \d+\.\d+ samples/s, idle \d+\.\d%", output)
    assert re.search(r"^useful work +\d+\.\d\d +\d+\.\d% ", output, re.MULTILINE)
    assert re.search(r"^stage imbalance +\d+\.\d\d +\d+\.\d% ", output, re.MULTILINE)
    assert re.search(r"^0 +8v\+0l +2v\+0l +\d+\.\d% +\d+ ", output, re.MULTILINE)
    chart = re.findall(r"^stage [01] \|[0-9A-J.#]+\|$", output, re.MULTILINE)
    assert list(map(len, chart)) == [100, 100]
    assert "A typical step" in output


def test_without_a_plan_the_best_solved_ones_are_ranked_and_fit(job: JobFile, profile: Path) -> None:
    found = predicted(job.path, "--device-profile", profile, "--top", "3", "--memory", "130MiB")
    seconds = [plan["epoch_seconds"] for plan in found["plans"]]
    assert seconds == sorted(seconds)
    plans = [plan["plan"] for plan in found["plans"]]
    distinct = {(json.dumps(plan["layout"]), plan["packing"]["qv"], plan["packing"]["qt"]) for plan in plans}
    assert len(distinct) == 3
    assert all(plan["fits"] and plan["keeps_batch"] for plan in found["plans"])
    assert max(stage["expected"] for plan in found["plans"] for stage in plan["stages"]) <= 130 << 20


def test_a_stored_profile_of_these_devices_is_found_and_more_devices_are_extrapolated(
    job: JobFile, costs: LayerCosts, plan_file: Callable[[Plan], Path]
) -> None:
    store_profile(job, costs)
    here = predicted(job.path, "--plan", plan_file(PLAN))
    assert here["devices"] == {**here["devices"], "count": 2, "memory_limit_bytes": 200 << 20}
    assert re.match(r"the layers' times and bytes, sends and reductions, on 2 CPU ranks \(", here["measured"])
    assert here["extrapolated"] == []
    wide = replace(PLAN, layout=replace(PLAN.layout, data=4))
    more = predicted(job.path, "--plan", plan_file(wide), "--devices", "8", "--memory", "1024GiB")
    assert more["devices"] == {**more["devices"], "count": 8, "memory_limit_bytes": 1 << 40}
    reductions, cores, memory = more["extrapolated"]
    assert cores == "the time of 8 CPU ranks, as if each had as many cores as the 2 that were profiled"
    assert reductions.startswith("reductions over 8 devices, from those over 2 as on a ring")
    assert memory.startswith("a memory limit of 1024 GiB, above the ")


def test_ranks_of_trials_side_by_side_have_the_cores_and_the_memory_of_a_group(
    job: JobFile, costs: LayerCosts, plan_file: Callable[[Plan], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    job.spoil(hardware={"devices": 2})
    commands = [(job.path, "--plan", plan_file(PLAN), *options) for options in ((), ("--devices", "2"))]
    store_profile(job, costs, cpu_cores=4)
    whole, _ = (predicted(*each) for each in commands)
    job.spoil(search__parallel=2)
    for each in commands:
        assert predicted(*each)["extrapolated"] == ["the time of 2 CPU ranks with 2 cores, from that with 4"]
    store_profile(job, replace(costs, link=LinkCost(latency_seconds=1.0, seconds_per_byte=1e-9)), cpu_cores=2)
    for half in (predicted(*each) for each in commands):
        assert half["extrapolated"] == []
        assert half["plans"][0]["epoch_seconds"] > whole["plans"][0]["epoch_seconds"]
        assert half["devices"]["memory_limit_bytes"] == whole["devices"]["memory_limit_bytes"] // 2


def test_a_job_that_names_no_devices_is_predicted_for_those_that_it_has_here(
    job: JobFile, costs: LayerCosts, plan_file: Callable[[Plan], Path]
) -> None:
    store_profile(job, costs, devices=1)
    job.spoil(hardware__devices=None)
    found = predicted(job.path, "--plan", plan_file(PLAN))
    assert found["devices"]["count"] == 2
    assert any("2 CPU ranks, as if each had as many cores as the 1 that" in text for text in found["extrapolated"])


def test_the_best_plans_are_the_first_of_all(job: JobFile, profile: Path) -> None:
    def best(count: int) -> list[tuple[float, bool]]:
        found = predict(job.path, device_profile=profile, devices=4, top=count)
        return [(each.prediction.epoch_seconds, each.fits) for each in found]

    every = best(10_000)
    assert len(every) > 20
    for count in (1, 3, 10):
        assert best(count) == every[:count]


def test_a_profile_file_describes_its_devices_like_a_stored_profile(
    job: JobFile, profile: Path, plan_file: Callable[[Plan], Path]
) -> None:
    job.spoil(hardware={})
    found = predicted(job.path, "--device-profile", profile, "--plan", plan_file(PLAN))
    assert found["devices"] == {"name": "NVIDIA A100-SXM4-80GB", "count": 2, "memory_limit_bytes": 76 << 30}
    assert found["measured"].endswith(f"on 2 x NVIDIA A100-SXM4-80GB, 2026-11-20 12:00 UTC, read from {profile}")
    wide = replace(PLAN, layout=replace(PLAN.layout, data=4))
    more = predicted(job.path, "--device-profile", profile, "--plan", plan_file(wide), "--devices", "8")
    assert [text.partition(",")[0] for text in more["extrapolated"]] == ["reductions over 8 devices"]


def test_reductions_over_more_devices_are_those_of_a_ring(
    job: JobFile, profiled: ProfiledCosts, plan_file: Callable[[Plan], Path], tmp_path: Path
) -> None:
    file, seconds = plan_file(plan_of("12+8", data=8, packing=PACKED)), []
    for devices in (2, 8):
        path = tmp_path / f"{devices}.json"
        hardware, timed = replace(profiled.hardware, devices=devices), averages(1e-9, devices)
        costs = replace(profiled.costs, exchanges=(timed,))
        path.write_text(wire.encode(replace(profiled, hardware=hardware, costs=costs)))
        found = predicted(job.path, "--plan", file, "--devices", "8", "--device-profile", path)
        seconds.append(found["plans"][0]["parts"]["communication"])
    assert seconds[0] == pytest.approx(seconds[1] * (7 / 8) / (1 / 2))


def test_reductions_of_data_ranks_that_tensor_ranks_spread_over_nodes_are_extrapolated(
    job: JobFile, profiled: ProfiledCosts, plan_file: Callable[[Plan], Path], tmp_path: Path
) -> None:
    costs = exchanging(replace(profiled.costs, of_node=1), around_layers(2, NOTHING, NOTHING))
    path = tmp_path / "nodes.json"
    path.write_text(wire.encode(replace(profiled, costs=costs)))
    (found,) = predicted(job.path, "--plan", plan_file(PLAN), "--device-profile", path)["extrapolated"]
    assert found.startswith("reductions of data ranks that tensor ranks spread over more nodes, from those over all")


def test_fewer_devices_than_were_profiled_are_on_as_many_nodes_as_they_need(
    job: JobFile, profiled: ProfiledCosts, plan_file: Callable[[Plan], Path], tmp_path: Path
) -> None:
    path = tmp_path / "nodes.json"
    path.write_text(wire.encode(replace(profiled, hardware=replace(profiled.hardware, devices=8, nodes=4))))
    file = plan_file(plan_of("12+8", packing=PACKED))
    for devices, shown in ((1, "1 x"), (2, "2 x"), (6, "6 x NVIDIA A100-SXM4-80GB on 3 nodes")):
        options = (job.path, "--plan", file, "--device-profile", path, "--devices", devices)
        result = CliRunner().invoke(main, ["predict", *map(str, options)])
        assert f"float32 on {shown}" in result.stdout
        assert (" nodes, limit" in result.stdout) is (devices > 2)


def test_ranks_on_more_devices_than_were_profiled_load_data_as_those_of_the_job_would(
    job: JobFile, profiled: ProfiledCosts, plan_file: Callable[[Plan], Path], tmp_path: Path
) -> None:
    path, wide = tmp_path / "one.json", replace(PLAN, layout=replace(PLAN.layout, data=4))
    path.write_text(wire.encode(replace(profiled, hardware=replace(profiled.hardware, devices=1, cpu_cores=8))))
    seconds = []
    for workers in (None, 0, 1):  # on 8 cores one rank has a core for workers, and 8 ranks have none
        job.spoil(data__workers=workers)
        options = (job.path, "--plan", plan_file(wide), "--device-profile", path, "--devices", "8")
        seconds.append(predicted(*options)["plans"][0]["epoch_seconds"])
    assert seconds[0] == seconds[1] > seconds[2]


def test_the_name_of_a_model_changes_nothing(
    job: JobFile, profiled: ProfiledCosts, plan_file: Callable[[Plan], Path], tmp_path: Path
) -> None:
    renamed = replace(profiled, model=replace(profiled.model, name="a copy"))
    path = tmp_path / "renamed.json"
    path.write_text(wire.encode(renamed))
    assert predicted(job.path, "--plan", plan_file(PLAN), "--device-profile", path)["model"]["name"] != "a copy"


def test_hardware_that_is_not_here_is_found_by_a_part_of_its_name(
    job: JobFile, costs: LayerCosts, plan_file: Callable[[Plan], Path]
) -> None:
    store_profile(job, costs, device_name="NVIDIA H100 80GB HBM3", accelerator="cuda", devices=1)
    found = predicted(job.path, "--plan", plan_file(PLAN), "--device-profile", "h100")
    assert found["devices"]["name"] == "NVIDIA H100 80GB HBM3"
    assert found["extrapolated"] == []
    free = replace(without(costs, "average"), link=LinkCost(latency_seconds=0, seconds_per_byte=0))
    store_profile(job, free, device_name="NVIDIA H100 80GB HBM3", accelerator="cuda", devices=1)
    found = predicted(job.path, "--plan", plan_file(PLAN), "--device-profile", "h100")
    assert found["extrapolated"] == ["sends and reductions are assumed to take no time: only one device was profiled"]


def test_hardware_whose_name_is_part_of_anothers_is_found_by_its_whole_name(
    job: JobFile, costs: LayerCosts, plan_file: Callable[[Plan], Path]
) -> None:
    # The later profile, for as many devices as the job has, would be nearer.
    for name, devices in (("NVIDIA L4", 1), ("NVIDIA L40S", 2)):
        store_profile(job, costs, device_name=name, accelerator="cuda", devices=devices)
    for asked, name in (("nvidia l4", "NVIDIA L4"), ("l40", "NVIDIA L40S"), ("L4", "NVIDIA L40S")):
        found = predicted(job.path, "--plan", plan_file(PLAN), "--device-profile", asked)
        assert found["devices"]["name"] == name


def test_a_known_plan_is_named_by_the_beginning_of_its_id(job: JobFile, profile: Path) -> None:
    with open_store() as store:
        study = store.create_study(store.add_workload(WORKLOAD), {}, seed=0)
        concluded(store, best_of(study.id, plan=PLAN))
    assert predicted(job.path, "--device-profile", profile, "--plan", PLAN.id[:5])["plans"][0]["id"] == PLAN.id


def test_a_plan_that_does_not_fit_or_misses_the_batch_is_marked(
    job: JobFile, profile: Path, plan_file: Callable[[Plan], Path]
) -> None:
    whole = Packed(qv=500, qt=50_000, qv_min=500, qt_min=50_000)
    file = plan_file(replace(PLAN, packing=whole))
    arguments = ["predict", str(job.path), "--device-profile", str(profile), "--plan", str(file)]
    output = CliRunner().invoke(main, arguments).stdout
    assert "DOES NOT FIT" in output
    assert "MISSES THE BATCH" in output


def test_a_step_is_drawn(job: JobFile, profile: Path, plan_file: Callable[[Plan], Path], tmp_path: Path) -> None:
    picture = tmp_path / "step.svg"
    predicted(job.path, "--device-profile", profile, "--plan", plan_file(PLAN), "--plot", picture)
    texts = drawn_texts(picture)
    shown = {text for text, *_ in texts}
    assert {"stage 0", "stage 1", "MiB", "seconds from the beginning of the step"} <= shown
    assert {"forward", "reduction and optimizer", "kept for backward passes", "peak of the epoch", "limit"} <= shown
    assert overlaps(texts) == []

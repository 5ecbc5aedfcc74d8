"""`autotune predict`: what it tells of plans without running them, and what it refuses."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from filelock import FileLock

from autotune.cli import main
from autotune.hardware import probe_hardware, software
from autotune.job_file import load_job
from autotune.predict.costs import LayerCosts, LinkCost
from storage.store import open_store
from tests.search_values import COSTS
from tests.storage_values import WORKLOAD, best_of
from tests.training_values import PACKED, plan_of
from tests.users import JobFile, databases, refusal
from trials import wire
from trials.job import HardwareSection
from trials.model.shape import model_shape
from trials.plan import Packed, Plan

PLAN = plan_of("8+0r2,0", "4+8", packing=PACKED)
LINK = LinkCost(latency_seconds=1e-3, seconds_per_byte=1e-9)

pytestmark = pytest.mark.usefixtures("home")


def predicted(*arguments: str | Path) -> dict[str, Any]:
    answer = CliRunner().invoke(main, ["predict", *map(str, arguments), "--json"])
    assert answer.exit_code == 0, answer.stderr
    document: dict[str, Any] = json.loads(answer.stdout)
    return document


@pytest.fixture
def costs(job: JobFile) -> LayerCosts:
    """Of the example's model; for its size, the embedding holds all parameters."""
    job.spoil(hardware={"devices": 2, "memory_limit": "200MiB"})
    parameters = model_shape(load_job(job.path).model).parameters
    layers = tuple((kind, replace(cost, parameters=0)) for kind, cost in COSTS.layers)
    kind, first = layers[0]
    return replace(COSTS, layers=((kind, replace(first, parameters=parameters)), *layers[1:]), link=LINK)


@pytest.fixture
def profile(costs: LayerCosts, tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    path.write_text(wire.encode(costs))
    return path


@pytest.fixture
def plan(tmp_path: Path) -> Callable[[Plan], Path]:
    def written(plan: Plan) -> Path:
        path = tmp_path / "plan.json"
        path.write_text(wire.encode(plan))
        return path

    return written


def store_profile(job: JobFile, costs: LayerCosts, **hardware: Any) -> None:
    """A profile of the job's model on this machine, or on other hardware."""
    here = replace(probe_hardware(HardwareSection(devices=2)), **hardware)
    workload = replace(WORKLOAD, model=model_shape(load_job(job.path).model), hardware=here, software=software())
    with open_store() as store:
        store.add_workload(workload)
        store.save_layer_profile(here.fingerprint, workload.model.fingerprint, workload.software, wire.encode(costs))


# --- what it tells ---


def test_a_plan_is_predicted_from_a_profile_without_devices_and_database(
    job: JobFile, profile: Path, plan: Callable[[Plan], Path], home: Path
) -> None:
    (home / "data" / "autotune").mkdir(parents=True)
    with FileLock(home / "data" / "autotune" / "devices.lock"):
        found = predicted(job.path, "--device-profile", profile, "--plan", plan(PLAN))
    assert databases(home) == []
    (only,) = found["plans"]
    assert (only["id"], only["plan"]) == (PLAN.id, wire.to_document(PLAN))
    assert sum(only["parts"].values()) == pytest.approx(only["epoch_seconds"])
    assert found["samples"] / only["epoch_seconds"] == pytest.approx(only["samples_per_second"])
    assert only["parts"]["communication"] > 0
    assert [stage["low"] <= stage["expected"] <= stage["high"] for stage in only["stages"]] == [True, True]
    assert max(end for _, end in only["step"]["update"]) == pytest.approx(only["step"]["seconds"], abs=1e-5)
    assert found["extrapolated"] == []


def test_the_text_shows_parts_memory_and_a_chart_of_100_columns(
    job: JobFile, profile: Path, plan: Callable[[Plan], Path]
) -> None:
    arguments = ["predict", str(job.path), "--device-profile", str(profile), "--plan", str(plan(PLAN))]
    answer = CliRunner().invoke(main, arguments)
    assert answer.exit_code == 0, answer.stderr
    told = answer.stdout
    assert f"Plan {PLAN.id}\n  pipeline 2 x data 1" in told
    assert re.search(r"epoch \d+\.\d s in \d+ steps, \d+\.\d samples/s, idle \d+\.\d%", told)
    assert re.search(r"^stage imbalance +\d+\.\d\d +\d+\.\d% ", told, re.MULTILINE)
    assert re.search(r"^0 +8v\+0l +2v\+0l +\d+\.\d% +\d+ ", told, re.MULTILINE)
    chart = re.findall(r"^stage [01] \|[0-9A-J.#]+\|$", told, re.MULTILINE)
    assert list(map(len, chart)) == [100, 100]
    assert "A typical step" in told


def test_without_a_plan_the_best_solved_ones_are_ranked_and_fit(job: JobFile, profile: Path) -> None:
    found = predicted(job.path, "--device-profile", profile, "--top", "3", "--memory", "130MiB")
    seconds = [plan["epoch_seconds"] for plan in found["plans"]]
    assert seconds == sorted(seconds)
    packings = [plan["plan"]["packing"] for plan in found["plans"]]
    assert len({(packing["qv"], packing["qt"]) for packing in packings}) == 3
    assert all(plan["fits"] and plan["keeps_batch"] for plan in found["plans"])
    assert max(stage["expected"] for plan in found["plans"] for stage in plan["stages"]) <= 130 << 20


def test_a_stored_profile_of_these_devices_is_found_and_more_devices_are_extrapolated(
    job: JobFile, costs: LayerCosts, plan: Callable[[Plan], Path]
) -> None:
    store_profile(job, costs)
    here = predicted(job.path, "--plan", plan(PLAN))
    assert here["devices"] == {**here["devices"], "count": 2, "memory_limit_bytes": 200 << 20}
    assert re.match(r"the layers' times and bytes, sends and reductions, on 2 x ", here["measured"])
    assert here["extrapolated"] == []
    wide = replace(PLAN, layout=replace(PLAN.layout, data=4))
    more = predicted(job.path, "--plan", plan(wide), "--devices", "8", "--memory", "1024GiB")
    assert more["devices"] == {**more["devices"], "count": 8, "memory_limit_bytes": 1 << 40}
    reductions, cores, memory = more["extrapolated"]
    assert cores == "the time of 8 CPU ranks, as if each had as many cores as the 2 that were profiled"
    assert reductions.startswith("reductions over 8 devices, from those over 2 as on a ring")
    assert memory.startswith("a memory limit of 1024 GiB, above the ")


def test_reductions_over_more_devices_are_those_of_a_ring(
    job: JobFile, costs: LayerCosts, profile: Path, plan: Callable[[Plan], Path]
) -> None:
    store_profile(job, costs)
    file = plan(plan_of("12+8", data=8, packing=PACKED))
    seconds = [
        predicted(job.path, "--plan", file, "--devices", "8", *options)["plans"][0]["parts"]["communication"]
        for options in ((), ("--device-profile", profile))
    ]
    assert seconds[0] == pytest.approx(seconds[1] * (7 / 8) / (1 / 2))


def test_hardware_that_is_not_here_is_found_by_a_part_of_its_name(
    job: JobFile, costs: LayerCosts, plan: Callable[[Plan], Path]
) -> None:
    store_profile(job, costs, device_name="NVIDIA H100 80GB HBM3", accelerator="cuda", devices=1)
    found = predicted(job.path, "--plan", plan(PLAN), "--device-profile", "h100")
    assert found["devices"]["name"] == "NVIDIA H100 80GB HBM3"
    assert found["extrapolated"] == []
    free = replace(costs, link=LinkCost(latency_seconds=0, seconds_per_byte=0), reduce_seconds_per_byte=0.0)
    store_profile(job, free, device_name="NVIDIA H100 80GB HBM3", accelerator="cuda", devices=1)
    found = predicted(job.path, "--plan", plan(PLAN), "--device-profile", "h100")
    assert found["extrapolated"] == ["sends and reductions count nothing: one device was profiled"]


def test_a_known_plan_is_named_by_the_beginning_of_its_id(job: JobFile, profile: Path) -> None:
    with open_store() as store:
        study = store.create_study(store.add_workload(WORKLOAD), {}, seed=0)
        store.save_best(best_of(study.id, plan=PLAN))
    assert predicted(job.path, "--device-profile", profile, "--plan", PLAN.id[:5])["plans"][0]["id"] == PLAN.id


def test_a_plan_that_does_not_fit_or_misses_the_batch_is_marked(
    job: JobFile, profile: Path, plan: Callable[[Plan], Path]
) -> None:
    whole = Packed(qv=500, qt=50_000, qv_min=500, qt_min=50_000)
    file = plan(replace(PLAN, packing=whole))
    arguments = ["predict", str(job.path), "--device-profile", str(profile), "--plan", str(file)]
    told = CliRunner().invoke(main, arguments).stdout
    assert "DOES NOT FIT" in told
    assert "MISSES THE BATCH" in told


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_step_is_drawn(
    job: JobFile, profile: Path, plan: Callable[[Plan], Path], tmp_path: Path, suffix: str
) -> None:
    picture = tmp_path / f"step.{suffix}"
    predicted(job.path, "--device-profile", profile, "--plan", plan(PLAN), "--plot", picture)
    assert picture.read_bytes()[:4] in (b"\x89PNG", b"<?xm")


# --- what it refuses ---


def test_a_plan_of_another_model_or_for_more_devices_or_packs_is_refused(
    job: JobFile, profile: Path, plan: Callable[[Plan], Path]
) -> None:
    def refused(spoilt: Plan, *options: str) -> str:
        code, told = refusal("predict", job.path, "--device-profile", profile, "--plan", plan(spoilt), *options)
        assert code == 2
        return told

    assert "hold 7 language layers but the model has 8; add 1" in refused(plan_of("8+0", "4+7", packing=PACKED))
    too_many = plan_of(*["1+0"] * 12, *["0+1"] * 9, packing=PACKED)
    assert "hold 9 language layers but the model has 8; remove 1" in refused(too_many, "--devices", "21")
    wide = replace(PLAN, layout=replace(PLAN.layout, data=4))
    assert "pipeline 2 x data 4 = 8 devices but 2 are given; give --devices 8" in refused(wide)
    wider = replace(PLAN, layout=replace(PLAN.layout, data=400))
    assert re.search(r"400 data ranks but the epoch only \d+ packs", refused(wider, "--devices", "800"))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda text: text.replace("0.001,", "NaN,", 1), "cannot read a LayerCosts"),
        (lambda text: text.replace("0.001,", "-0.001,", 1), "forward_seconds is -0.001, which no measurement gives"),
        (lambda text: text.replace('"parameters":', '"parameters":1', 1), "is of another model"),
        (lambda text: re.sub(r'"parameters":\d+', '"parameters":7', text), "is of another model"),
        (lambda text: re.sub(r'\["head",\{.*?\}\]', "", text).replace(",]", "]"), "holds no costs of head"),
        (lambda text: text[:-9], "cannot read a LayerCosts"),
        (lambda text: "{}", "cannot read a LayerCosts"),
    ],
    ids=["nan", "negative", "a larger model", "a smaller model", "a kind missing", "cut off", "empty"],
)
def test_a_profile_that_no_measurement_gives_is_refused(
    job: JobFile, profile: Path, spoil: Callable[[str], str], reason: str
) -> None:
    profile.write_text(spoil(profile.read_text()))
    code, told = refusal("predict", job.path, "--device-profile", profile)
    assert code == 2
    assert str(profile) in told
    assert reason in told


def test_a_profile_of_other_devices_another_dtype_or_none_is_refused(job: JobFile, costs: LayerCosts) -> None:
    code, told = refusal("predict", job.path)
    assert code == 3
    assert "no profile of the layers is stored for" in told
    assert "`autotune profile JOB` or `autotune tune JOB`" in told
    store_profile(job, costs, device_name="NVIDIA A100-SXM4-80GB", accelerator="cuda")
    code, told = refusal("predict", job.path)
    assert code == 3
    assert "profiles are stored for NVIDIA A100-SXM4-80GB" in told
    assert refusal("predict", job.path, "--device-profile", "H100")[0] == 3
    job.spoil(model__dtype="bfloat16")
    code, told = refusal("predict", job.path, "--device-profile", "a100")
    assert code == 2
    assert "in bfloat16 were not profiled on devices called 'a100', only those of model in float32" in told


def test_costs_alone_need_devices_and_memory_from_somewhere(job: JobFile, profile: Path) -> None:
    job.spoil(hardware={})
    code, told = refusal("predict", job.path, "--device-profile", profile)
    assert (code, "give --devices, or hardware.devices in the job" in told) == (2, True)
    code, told = refusal("predict", job.path, "--device-profile", profile, "--devices", "2")
    assert (code, "give --memory, or hardware.memory_limit in the job" in told) == (2, True)


def test_no_plan_fits_too_little_memory(job: JobFile, profile: Path) -> None:
    code, told = refusal("predict", job.path, "--device-profile", profile, "--memory", "1MiB")
    assert code == 3
    assert re.search(r"no plan fits 1 MiB per rank: .* give more --memory or --devices", told)


@pytest.mark.parametrize("arguments", [("--memory", "80 bananas"), ("--memory", "0GiB"), ("--devices", "0")])
def test_wrong_options_are_refused_before_anything_is_read(tmp_path: Path, arguments: tuple[str, str]) -> None:
    answer = CliRunner().invoke(main, ["predict", str(tmp_path / "none.yaml"), *arguments])
    assert answer.exit_code == 2
    assert "Invalid value" in answer.stderr

"""Recommendations of devices that are not here."""

import json
import math
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from click.testing import CliRunner

from autotune import predict, recommend
from autotune.advice.data_sheets import DATA_SHEETS, DataSheet
from autotune.advice.operations import HOST_SECONDS, LINK_SHARE, MEMORY_SHARE, META, PRODUCT_SHARE, SheetProfiler
from autotune.advice.recommendation import SPREAD
from autotune.advice.recommendation_report import recommendation_document, recommendation_text
from autotune.advice.sheet_costs import SheetCosts, allocated_stage
from autotune.cli import main
from autotune.cli.recommend import job_values
from autotune.errors import ProfileError, RecommendError
from autotune.machine.hardware import software
from autotune.prediction.features import COSTS as FACTORS
from autotune.prediction.features import scaled
from autotune.prediction.updates import update_seconds_per_parameter
from tests.contracts.test_families import TINY
from tests.programs.users import JobFile, document
from tests.values.forecast import store_profile
from tests.values.parameters import parameters
from trials import plugins
from trials.costs.coefficients import LayerKind
from trials.costs.exchange import Exchange
from trials.costs.layer_costs import LayerCosts, LinkCost
from trials.job import ModelSection, TrainingSection
from trials.plan import Layout
from trials.tasks.profiling.layer_profile import Profiler
from trials.tasks.profiling.one_of_each import OneOfEach, one_of_each
from trials.tasks.profiling.probes import Probe, ProbeBytes, probes
from trials.tasks.request import ProbeSizes

SIZES = ProbeSizes(unit_counts=(3,), sample_shapes=((2, 32),))
TRAINED: dict[LayerKind, bool] = {
    "vision_embedding": False, "vision": True, "projector": True, "language": True, "head": True
}  # fmt: skip
NAMES = [name for name in plugins.names(TINY) if name != "glm4v-moe"]


def profiled(stage: OneOfEach, profiler: Profiler) -> list[tuple[Probe, ProbeBytes]]:
    return [(probe, profiler.sizes(probe)) for probe in probes(stage, SIZES, profiler.device)]


@pytest.mark.parametrize("name", parameters({name: name for name in NAMES}, short=("internvl", "qwen2-5-vl")))
def test_layers_without_values_keep_the_bytes_of_layers_with_them(name: str, tmp_path: Path) -> None:
    plugins.load(TINY, name).make(tmp_path)
    # In float32, torch does not describe the product of experts without values.
    dtype: Literal["float32", "bfloat16"] = "bfloat16" if "experts" in name or "moe" in name else "float32"
    model, training, cpu = ModelSection(path=str(tmp_path), dtype=dtype), TrainingSection(), torch.device("cpu")
    real = one_of_each(model, training, cpu)
    without = allocated_stage(model, training)
    measured = profiled(real, Profiler(real, TRAINED, cpu, repeats=1))
    computed = profiled(without, SheetProfiler(without, TRAINED, DATA_SHEETS["h100"]))
    for (probe, expected), (_, found) in zip(measured, computed, strict=True):
        # In bfloat16 the kernel of CPUs keeps half as many bytes of each row of scores as those of devices.
        tolerance = 0 if dtype == "float32" else 0.01
        assert asdict(found) == pytest.approx(asdict(expected), rel=tolerance), probe.layer


@pytest.mark.usefixtures("home")
def test_times_are_those_of_the_products_or_of_the_memory(example: Path) -> None:
    model, training = ModelSection(path=str(example / "model"), dtype="bfloat16"), TrainingSection()
    stage, sheet = allocated_stage(model, training), DATA_SHEETS["h100"]
    language = next(probes(stage, ProbeSizes(sample_shapes=((1, 256),)), META))
    assert language.layer == "language"
    layer = stage.model.get_submodule(stage.chain.language_layers[0])
    matrices = sum(each.numel() for each in layer.parameters() if each.dim() == 2)
    config = stage.model.config.get_text_config()
    scores = 4 * config.hidden_size * 256**2 / 2

    def seconds(sheet: DataSheet) -> float:
        (timing,) = SheetProfiler(stage, TRAINED, sheet).timings((language,))
        assert timing.recompute_seconds == pytest.approx(timing.forward_seconds, rel=0.1)
        assert 0 <= timing.selective_seconds < timing.recompute_seconds
        return timing.forward_seconds + timing.backward_seconds

    products = seconds(replace(sheet, memory_bytes_per_second=1e30)) * PRODUCT_SHARE * sheet.flops
    # Forward, gradients of inputs and of weights; FlashAttention has five products backward for two forward.
    assert products == pytest.approx(6 * matrices * 256 + 3.5 * scores, rel=1e-9)
    moved = seconds(replace(sheet, flops=1e30)) * MEMORY_SHARE * sheet.memory_bytes_per_second
    assert moved > 3 * 2 * matrices


@pytest.fixture
def inputs(example: Path) -> tuple[Path, Path]:
    return example / "model", example / "data" / "train.jsonl"


@pytest.mark.usefixtures("home")
def test_the_fewest_devices_within_the_deadline_are_named_with_their_plan(inputs: tuple[Path, Path]) -> None:
    job = {**job_values(str(inputs[0]), [str(inputs[1])]), "training": {"global_batch_samples": 16}}
    found = recommend(job, device="a10", devices=(4, 1))
    one, four = found.choices
    slow, fast = map(found.training_seconds, found.choices)
    assert (one.devices, four.devices, found.advised) == (1, 4, one)
    assert slow > fast > slow / 4
    assert four.forecast is not None
    text = recommendation_text(replace(found, deadline_seconds=math.sqrt(slow * fast)), 1.5)
    assert f"The fewest that end within 0 s: 4\nPlan {four.forecast.plan.id}: " in text
    assert "1, 4: analytic, from the data sheet, and 2 ms or more for a layer, in which the host" in text
    assert "times may be off by 40%" in text
    assert re.search(r"<0\.01 +<0\.01", text)  # device-hours and price of a tiny job
    assert "None of these ends within 0 s: the nearest is 4 devices" in recommendation_text(
        replace(found, deadline_seconds=fast / 2), None
    )
    assert recommendation_document(found, 1.5)["choices"][1]["price"] == pytest.approx(1.5 * 4 * fast / 3600)


@pytest.mark.usefixtures("home")
def test_a_layer_takes_at_least_as_long_as_the_host_to_launch_it(inputs: tuple[Path, Path]) -> None:
    found = recommend(job_values(str(inputs[0]), [str(inputs[1])]), device="h100", devices=(1,))
    (choice,) = found.choices
    assert choice.forecast is not None
    line = choice.forecast.timeline
    packs, stages, _ = line.forward.shape
    layers = packs * (found.shape.vision_layers + found.shape.language_layers) / stages
    assert line.seconds > 0.99 * layers * HOST_SECONDS
    assert "and 2 ms or more for a layer" in recommendation_text(found, None)


@pytest.mark.usefixtures("home")
def test_a_training_has_the_steps_of_the_job_and_an_epoch_the_repeats(inputs: tuple[Path, Path]) -> None:
    values = job_values(str(inputs[0]), [])
    job = {
        **values,
        "data": {"sources": [{"path": str(inputs[1]), "repeat": 2}]},
        "training": {"global_batch_samples": 16, "epochs": 3, "max_steps": 7},
        "evaluation": {"samples": 8},
    }
    found = recommend(job, device="a10", devices=(1,))
    (choice,) = found.choices
    assert choice.forecast is not None
    prediction = choice.forecast.prediction
    assert found.training_seconds(choice) == pytest.approx(7 * prediction.epoch_seconds / len(prediction.step_seconds))
    assert found.samples == 2 * (48 - 8)
    text = recommendation_text(found, None)
    assert "80 samples an epoch, 3 epochs, at most 7 steps, global batch 16; without the time of evaluations" in text
    longer = replace(found, job=found.job.model_copy(update={"training": TrainingSection(epochs=3, max_steps=1000)}))
    assert longer.training_seconds(choice) == pytest.approx(3 * prediction.epoch_seconds)


@pytest.mark.usefixtures("home")
def test_what_the_database_knows_of_a_device_is_measured(job: JobFile, costs: LayerCosts) -> None:
    store_profile(job, costs, device_name="NVIDIA H100 80GB HBM3", accelerator="cuda", device_memory_bytes=80 << 30)
    found = recommend(job.path, device="h100", devices=(2, 4))
    assert [each.origin for each in found.choices] == ["measured", "measured"]
    for choice in found.choices:
        (expected,) = predict(job.path, device_profile="H100", devices=choice.devices, top=1)
        assert choice.forecast is not None
        assert choice.forecast.plan == expected.plan
        assert choice.forecast.prediction.epoch_seconds == expected.prediction.epoch_seconds
        assert choice.relative_error == expected.relative_error
    text = recommendation_text(found, None)
    asked = document("recommend", job.path, "--device", "h100", "--devices", "2", "--devices", "4")
    assert asked["choices"] == recommendation_document(found, None)["choices"]
    assert "2, 4: measured, from the profile of the model's layers; times may be off by " in text
    assert "Profile: 2 x NVIDIA H100 80GB HBM3" in text
    # Only two devices were profiled.
    assert found.choices[0].extrapolated == ()
    assert "  Not measured: reductions over 4 devices, from those over 2 as on a ring" in text


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    "name", parameters({name: name for name in ("recommend", "predict", "export", "pack")}, short=("predict",))
)
def test_every_answer_from_data_names_and_counts_skipped_lines(
    name: str,
    job: JobFile,
    inputs: tuple[Path, Path],
    costs: LayerCosts,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = job.path.parent
    shown, asked = (
        {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": "yes"}]}
        for question in ("<image>\nso?", "so?")
    )
    lost = folder / "lost.jsonl"
    lost.write_text(json.dumps({**shown, "image": "gone.png"}) + "\n" + json.dumps(asked) + "\n")
    model, *files = (*inputs, lost)
    job.spoil(data__sources=[{"path": str(each)} for each in files])
    store_profile(job, costs, device_name="NVIDIA H100 80GB HBM3", accelerator="cuda")
    arguments: dict[str, tuple[str | Path, ...]] = {
        "recommend": (model, *files, "--device", "h100", "--devices", "1"),
        "predict": (job.path, "--device-profile", "H100", "--top", "1"),
        "export": (job.path, "--device-profile", "H100", "--to", "ms-swift", "--out", folder / "exported"),
        "pack": (job.path, "--what-if", "cutoff=512"),
    }
    found = document(name, *arguments[name])
    assert found.get("variants", [found])[0]["skipped_lines"] == 1
    (warning,) = (each for each in caplog.messages if "dataset lines" in each)
    assert warning.startswith("1 of 50 dataset lines are skipped")
    assert warning.endswith(f"{lost}:1: image {folder / 'gone.png'} does not exist")


@pytest.mark.usefixtures("home")
def test_with_the_profile_of_one_device_exchanges_are_those_of_the_data_sheet(
    job: JobFile, costs: LayerCosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.spoil(hardware={"memory_limit": "60GiB"}, model__dtype="bfloat16")
    alone = replace(costs, exchanges=(), link=LinkCost(latency_seconds=0.0, seconds_per_byte=0.0))
    store_profile(job, alone, device_name="NVIDIA H100 80GB HBM3", accelerator="cuda", devices=1)
    one, two = recommend(job.path, device="h100", devices=(1, 2)).choices
    assert (one.origin, two.origin) == ("measured", "measured layers, analytic links")
    (expected,) = predict(job.path, device_profile="H100", devices=1, top=1)
    assert one.forecast is not None
    assert two.forecast is not None
    assert one.forecast.prediction.epoch_seconds == expected.prediction.epoch_seconds
    ideal = two.forecast.prediction.breakdown.totals["ideal"]
    assert ideal == pytest.approx(one.forecast.prediction.breakdown.totals["ideal"] / 2, rel=0.05)
    assert two.relative_error == SPREAD
    assert not any("no time" in each for each in two.extrapolated)
    monkeypatch.setitem(DATA_SHEETS, "h100", replace(DATA_SHEETS["h100"], link_bytes_per_second=1e6))
    (slow,) = recommend(job.path, device="h100", devices=(2,)).choices
    assert slow.forecast is not None
    assert slow.forecast.prediction.epoch_seconds > 1.5 * two.forecast.prediction.epoch_seconds


@pytest.mark.usefixtures("home")
def test_the_profile_of_a_device_whose_name_is_longer_is_not_that_of_the_data_sheet(
    job: JobFile, costs: LayerCosts
) -> None:
    job.spoil(hardware={})
    store_profile(job, costs, device_name="NVIDIA A100-SXM4-80GB", accelerator="cuda", device_memory_bytes=80 << 30)
    other, one = (recommend(job.path, device=device, devices=(2,)) for device in ("a10", "a100-80gb"))
    assert [each.choices[0].origin for each in (other, one)] == ["analytic", "measured"]
    assert other.choices[0].memory_limit_bytes < 24 << 30
    assert (other.profiled, one.profiled is None) == (None, False)


@pytest.mark.usefixtures("home")
def test_each_number_of_devices_has_the_most_similar_of_the_profiles(
    job: JobFile, costs: LayerCosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    h100 = {"device_name": "NVIDIA H100 80GB HBM3", "accelerator": "cuda"}
    store_profile(job, costs, **h100, devices=4)
    store_profile(job, costs, **h100, devices=1)
    slow = scaled(costs, [9.0] * len(FACTORS))
    here = software()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("tests.values.forecast.software", lambda: replace(here, torch="1.0"))
        store_profile(job, slow, **h100, devices=1)
        store_profile(job, slow, **h100, devices=4)
    found = recommend(job.path, device="h100", devices=(1, 2, 8))
    assert [each.origin for each in found.choices] == ["measured"] * 3
    assert [bool(each.extrapolated) for each in found.choices] == [False, False, True]
    assert found.profiled is not None
    assert [each[:8] for each in found.profiled.split("; ")] == ["1 x NVID", "4 x NVID"]


@pytest.mark.usefixtures("home")
def test_a_device_without_a_data_sheet_is_one_that_was_profiled(job: JobFile, costs: LayerCosts) -> None:
    store_profile(job, costs, device_name="Own Device 7")
    described = recommendation_document(recommend(job.path, device="own device", devices=(2,)), None)
    assert described["device"] == "Own Device 7"
    assert described["data_sheet"] is None
    assert described["choices"][0]["origin"] == "measured"
    job.spoil(model__dtype="bfloat16")
    with pytest.raises(
        ProfileError, match="on devices called 'own device', only those of model with dtype float32, not bfloat16"
    ):
        recommend(job.path, device="own device", devices=(2,))


@pytest.mark.usefixtures("home")
def test_where_nothing_fits_the_least_memory_is_named(inputs: tuple[Path, Path]) -> None:
    options = ("--device", "a10", "--devices", 1, "--set", "hardware.memory_limit=1MiB", "--db", "sqlite:///nowhere.db")
    tolerance = ("--set", "training.batch_tolerance=0.02")
    answer = CliRunner().invoke(main, ["recommend", *map(str, (*inputs, *options, *tolerance))])
    assert answer.exit_code == 0, answer.output
    assert "does not fit" in answer.stdout
    assert "Nothing that was measured is known: the database" in answer.stderr
    assert "No plan fits: no plan that keeps the global batch" in answer.stdout
    assert "within 2 % (training.batch_tolerance) fits 1 MiB per rank" in answer.stdout


@pytest.mark.usefixtures("home")
def test_what_nobody_can_recommend_for_is_refused(inputs: tuple[Path, Path]) -> None:
    for arguments, code, message in (
        ((*inputs, "--device", "h1000"), 2, "there is no data sheet of a device 'h1000', only of a10, "),
        ((*inputs, "--device", "h100", "--devices", "0"), 2, "0 is not in the range"),
        ((*inputs, "--device", "h100", "--deadline", "1 week"), 2, "'1 week' is not a time"),
        ((inputs[0], "nowhere.jsonl", "--device", "h100"), 1, "nowhere.jsonl does not exist"),
        ((*inputs, "--device", "h100", "--set", "training.epoch=2"), 2, "training.epoch"),
        ((*inputs, "--device", "h100", "--set", "hardware.devices=2"), 2, "depends on model., data., "),
        ((*inputs, "--device", "h100", "--set", "training.compile=true"), 2, "as they are, not as a compiler makes"),
    ):
        answer = CliRunner().invoke(main, ["recommend", *map(str, arguments)])
        assert answer.exit_code == code, answer.output
        assert message in answer.output
    with pytest.raises(RecommendError, match="deadline: "):
        recommend(job_values(str(inputs[0]), [str(inputs[1])]), device="h100", deadline="soon")
    for devices in (4, "4"):
        with pytest.raises(RecommendError, match=r"devices must be a list of whole numbers, not '?4'?; give"):
            recommend(job_values(str(inputs[0]), [str(inputs[1])]), device="h100", devices=devices)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "data", "device"),
    [("./gone", "train.jsonl", "h100"), ("model", "gone.jsonl", "h100"), ("model", "train.jsonl", "h1000")],
    ids=["model", "data", "device"],
)
def test_what_is_not_there_is_named_before_torch_is_imported(
    model: str, data: str, device: str, tmp_path: Path, inputs: tuple[Path, Path]
) -> None:
    (tmp_path / "model").symlink_to(inputs[0])
    (tmp_path / "train.jsonl").symlink_to(inputs[1])
    arguments = ["recommend", model, data, "--device", device, "--db", f"sqlite:///{tmp_path}/none.db"]
    code = f"import sys, autotune.cli as cli; cli.main({arguments}, standalone_mode=False)"
    program = f"try:\n    {code}\nexcept SystemExit as end:\n    print(end.code, 'torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["2" if device == "h1000" else "1", "False"], answer.stderr
    assert "gone" in answer.stderr or "h1000" in answer.stderr
    assert ("none.db does not exist" in answer.stderr) == (device == "h1000")


@pytest.mark.parametrize("sheet", DATA_SHEETS.values(), ids=DATA_SHEETS)
def test_a_data_sheet_has_figures_of_one_device_and_their_source(sheet: DataSheet) -> None:
    assert 10e12 < sheet.float32_flops < sheet.flops < 1e16
    assert 1e11 < sheet.memory_bytes_per_second < 1e13
    assert sheet.network_bytes_per_second < sheet.link_bytes_per_second < sheet.memory_bytes_per_second
    assert "nvidia.com" in sheet.source or "white paper" in sheet.source


def test_the_memory_of_a_data_sheet_is_no_more_than_torch_has_seen() -> None:
    """Error correction takes a sixteenth of GDDR6, of which the L40S has 48 GiB and the A10 24 GiB."""
    seen = {
        "a10": 22.18,
        "a100-40gb": 39.5,
        "a100-80gb": 79.25,
        "b200": 178.36,
        "h100": 79.2,
        "h200": 139.81,
        "l40s": 44.42,
        "rtx-4090": 23.65,
    }
    assert seen.keys() == DATA_SHEETS.keys()
    for name, gibi in seen.items():
        assert 0.98 * gibi < DATA_SHEETS[name].memory_bytes / (1 << 30) <= gibi, name


@pytest.mark.usefixtures("home")
def test_links_of_a_data_sheet_join_what_a_single_device_has(example: Path) -> None:
    sheet, model = DATA_SHEETS["l40s"], ModelSection(path=str(example / "model"), dtype="bfloat16")
    sizes = ProbeSizes(unit_counts=(1, 2, 3, 4, 6, 9), sample_shapes=((1, 32), (1, 128), (4, 32), (1, 320), (8, 32)))
    analytic = SheetCosts.of(sheet, model, TrainingSection(), sizes)
    copy = Exchange.of_bytes("copy", 1, 1e-10, 2e-10)
    alone = replace(analytic.layers, exchanges=(copy,))
    assert analytic.linked(alone, 1).updates == alone.updates
    for devices, rate in ((8, sheet.link_bytes_per_second), (16, sheet.network_bytes_per_second)):
        linked = analytic.linked(alone, devices)
        assert linked.exchange("copy") == copy
        # Ranks of ZeRO 1 and 2 update a share of the weights, and gather them all, of 2 bytes each.
        gather = 2 * (1 - 1 / devices) / (LINK_SHARE * rate)
        expected = alone.updates[0].seconds_per_parameter / devices + gather
        for zero in (1, 2):
            layout = Layout(pipeline=1, data=devices, zero=zero)
            assert update_seconds_per_parameter(linked, layout) == pytest.approx(expected)


def bytes_of_language_layer(folder: Path, **rope: object) -> dict[str, int]:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["rope_parameters"] |= rope
    (folder / "config.json").write_text(json.dumps(config))
    stage = allocated_stage(ModelSection(path=str(folder), dtype="float32"), TrainingSection())
    probe = next(probes(stage, ProbeSizes(sample_shapes=((2, 32),)), META))
    return asdict(SheetProfiler(stage, TRAINED, DATA_SHEETS["h100"]).sizes(probe))


def test_rotary_frequencies_that_depend_on_positions_have_the_shapes_of_others(tmp_path: Path) -> None:
    """As of InternVL3: they would be read from positions, which have no values here."""
    plugins.load(TINY, "internvl").make(tmp_path)
    usual = bytes_of_language_layer(tmp_path)
    assert bytes_of_language_layer(tmp_path, rope_type="dynamic", factor=2.0) == usual


def test_experts_in_float32_are_refused_with_the_remedy(tmp_path: Path) -> None:
    plugins.load(TINY, "text-experts").make(tmp_path)
    model = ModelSection(path=str(tmp_path), dtype="float32")
    with pytest.raises(RecommendError, match=r"cannot be computed without a device: .*; set model\.dtype to bfloat16"):
        SheetCosts.of(DATA_SHEETS["h100"], model, TrainingSection(), SIZES)

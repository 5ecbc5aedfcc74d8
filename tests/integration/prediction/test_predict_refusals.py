"""Plans, profiles, options and data that `autotune predict` refuses, data as other commands do."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.programs.users import JobFile, document, refusal
from tests.tiny_models import qwen2_5_vl
from tests.values.forecast import PLAN, store_profile
from tests.values.training import PACKED, plan_of
from trials.costs.layer_costs import LayerCosts, UpdateCost
from trials.plan import Levelled, Packed, Plan
from trials.stage import Recomputed

pytestmark = pytest.mark.usefixtures("home")


def test_a_plan_of_another_model_or_for_more_devices_or_packs_is_refused(
    job: JobFile, profile: Path, plan_file: Callable[[Plan], Path]
) -> None:
    def refused(spoilt: Plan, *options: str) -> str:
        code, message = refusal("predict", job.path, "--device-profile", profile, "--plan", plan_file(spoilt), *options)
        assert code == 2
        return message

    assert "hold 7 language layers but the model has 8; add 1" in refused(plan_of("8+0", "4+7", packing=PACKED))
    too_many = plan_of(*["1+0"] * 12, *["0+1"] * 9, packing=PACKED)
    assert "hold 9 language layers but the model has 8; remove 1" in refused(too_many, "--devices", "21")
    by_three = replace(PLAN, layout=replace(PLAN.layout, data=3), packing=replace(PACKED, sequence=3))
    assert "sequence degree 3 cannot share the 4 attention heads" in refused(by_three, "--devices", "6")
    cut = replace(PLAN, layout=replace(PLAN.layout, tensor=2))
    assert "no times of what 2 ranks exchange that hold layers together" in refused(cut, "--devices", "4")
    cut = replace(PLAN, layout=replace(PLAN.layout, tensor=4))
    assert "tensor degree 4 cannot cut the 2 key-value heads" in refused(cut, "--devices", "8")
    levels = Levelled(levels=(replace(PACKED, qt=900), replace(PACKED, qt=90_000)))
    stages = tuple(replace(stage, further_levels=(Recomputed(vision=0, language=0),)) for stage in PLAN.stages)
    empty = refused(replace(PLAN, packing=levels, stages=stages))
    assert re.search(r"level 2 with qv=10 qt=90000 holds no sample: .* which level 1 holds", empty)
    wide = replace(PLAN, layout=replace(PLAN.layout, data=4))
    assert "pipeline 2 x data 4 = 8 devices but 2 are given; give --devices 8" in refused(wide)
    wider = replace(PLAN, layout=replace(PLAN.layout, data=400))
    assert re.search(r"400 data ranks but the epoch only \d+ packs", refused(wider, "--devices", "800"))


SPOILT: tuple[tuple[Callable[[str], str], str], ...] = (
    (
        lambda text: text.replace("0.001,", "NaN,", 1),
        "costs.layers.1.1.forward_seconds.0: Input should be a finite number",
    ),
    (
        lambda text: re.sub(r'(?<="seconds_per_parameter":)[^}]+', "1e308", text),
        "costs.updates.0.seconds_per_parameter: Input should be less than or equal to 1000000000000000, not 1e+308",
    ),
    (
        lambda text: text.replace("0.001,", "-0.001,", 1),
        "forward_seconds is -0.001, which cannot be a measured value",
    ),
    (lambda text: text.replace('"float32"', '"bfloat16"'), "model with dtype bfloat16, not float32"),
    (lambda text: text.replace('_layers":12', '_layers":45'), "model with vision_layers 45, not 12"),
    (lambda text: re.sub(r',\["head",\{.*?\}\]', "", text), "there are no costs of head"),
    (lambda text: text.replace('"devices":2', '"devices":0'), "hardware.devices is 0, but has to be at least 1"),
    (lambda text: json.dumps(json.loads(text)["costs"]), "hardware: Field required"),
    (lambda text: text.replace("00.123456Z", "00"), "created: "),
    (lambda text: text[:-9], "cannot read a ProfiledCosts"),
    (lambda _: "{}", "cannot read a ProfiledCosts"),
)


def test_a_profile_that_no_measurement_gives_or_of_another_model_is_refused(job: JobFile, profile: Path) -> None:
    before = profile.read_text()
    for spoil, reason in SPOILT:
        profile.write_text(spoil(before))
        assert profile.read_text() != before
        code, message = refusal("predict", job.path, "--device-profile", profile)
        assert code == 2
        assert str(profile) in message
        assert reason in message
        assert "`autotune profile JOB --out FILE`" in message


def test_a_profile_that_is_no_text_or_not_there_is_refused(job: JobFile, tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    for name, reason in (
        ("binary.json", "it is not a text file"),
        ("none.json", "No such file"),
        (".", "no profile of"),
    ):
        code, message = refusal("predict", job.path, "--device-profile", tmp_path / name)
        assert code in (2, 3)
        assert reason in message


def test_a_profile_without_end_is_refused(job: JobFile, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "zeros.json").symlink_to("/dev/zero")
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(1 << 30)
    for name, reason in (("pipe", "a named pipe"), ("zeros", "a device"), ("large", "larger than 1 MiB")):
        code, message = refusal("predict", job.path, "--device-profile", tmp_path / f"{name}.json")
        assert code == 2
        assert reason in message


def test_a_profile_of_other_devices_another_dtype_or_none_is_refused(job: JobFile, costs: LayerCosts) -> None:
    code, message = refusal("predict", job.path)
    assert code == 3
    assert "no profile of the layers is stored for" in message
    assert "`autotune profile JOB` or `autotune tune JOB`" in message
    store_profile(job, costs, device_name="NVIDIA A100-SXM4-80GB", accelerator="cuda")
    code, message = refusal("predict", job.path)
    assert code == 3
    assert "profiles are stored for NVIDIA A100-SXM4-80GB" in message
    assert refusal("predict", job.path, "--device-profile", "H100")[0] == 3
    job.spoil(model__dtype="bfloat16")
    code, message = refusal("predict", job.path, "--device-profile", "a100")
    assert code == 2
    assert (
        "in bfloat16 were not profiled on devices called 'a100', only those of model with dtype float32, not bfloat16; "
        "set model.dtype to float32, or `autotune profile JOB`" in message
    )


def test_profiles_of_other_families_are_not_listed(job: JobFile, costs: LayerCosts, tmp_path: Path) -> None:
    store_profile(job, costs)
    qwen2_5_vl.make(tmp_path / "qwen")
    job.spoil(model__path=str(tmp_path / "qwen"))
    code, message = refusal("predict", job.path)
    assert code == 2
    assert "the layers of qwen in float32 were not profiled on" in message
    assert ", only those of models of other families; `autotune profile JOB`" in message


def test_a_plan_without_packs_is_refused(job: JobFile, profile: Path, plan_file: Callable[[Plan], Path]) -> None:
    job.spoil(data__oversize="skip")
    nothing = replace(PLAN, packing=Packed(qv=0, qt=1, qv_min=0, qt_min=0))
    code, message = refusal("predict", job.path, "--device-profile", profile, "--plan", plan_file(nothing))
    assert code == 2
    assert "the plan cannot pack the data: every sample is above qv=0 qt=1 and skipped; raise them" in message


def test_a_stored_profile_of_another_version_is_refused(job: JobFile, costs: LayerCosts) -> None:
    store_profile(job, costs, document='{"layers": []}')
    code, message = refusal("predict", job.path)
    assert code == 3
    assert "cannot be read" in message
    assert "measure it again with `autotune profile JOB`" in message


def test_a_profile_without_exchanges_cannot_predict_shared_packs(
    job: JobFile, costs: LayerCosts, plan_file: Callable[[Plan], Path]
) -> None:
    older = UpdateCost(zero=1, data_parallel=2, seconds_per_parameter=1e-9)
    store_profile(job, replace(costs, updates=(*costs.updates, older)))
    packing = Packed(qv=10, qt=500, qv_min=0, qt_min=0, sequence=2)
    shared = plan_file(plan_of("12+8", data=2, packing=packing))
    code, message = refusal("predict", job.path, "--plan", shared)
    assert code == 2
    assert "the profile has no times of what 2 ranks exchange that share a pack" in message
    assert "on 2 devices or more with `autotune profile JOB --fresh`" in message


def test_no_plan_fits_too_little_memory(job: JobFile, profile: Path) -> None:
    code, message = refusal("predict", job.path, "--device-profile", profile, "--memory", "1MiB")
    assert code == 3
    assert re.search(r"no plan .* fits 1 MiB per rank: .* give more --memory or --devices", message)


@pytest.mark.parametrize("arguments", [("--memory", "80 bananas"), ("--memory", "0GiB"), ("--devices", "0")])
def test_wrong_options_are_refused_before_anything_is_read(tmp_path: Path, arguments: tuple[str, str]) -> None:
    code, message = refusal("predict", tmp_path / "none.yaml", *arguments)
    assert (code, "Invalid value" in message) == (2, True)


def test_no_answer_is_about_the_text_that_is_left_where_every_image_is_lost(
    job: JobFile, example: Path, costs: LayerCosts
) -> None:
    folder, whole = job.path.parent, example / "data" / "train.jsonl"
    moved = folder / "moved.jsonl"  # away from its images; some records have none
    moved.write_text(whole.read_text())
    job.spoil(data__sources=[{"path": str(moved)}])
    store_profile(job, costs, device_name="NVIDIA H100 80GB HBM3", accelerator="cuda")
    recommended = ("recommend", example / "model", moved, "--device", "h100", "--devices", "1")
    commands: tuple[tuple[str | Path, ...], ...] = (
        recommended,
        ("predict", job.path, "--device-profile", "H100", "--top", "1"),
        ("export", job.path, "--device-profile", "H100", "--to", "ms-swift", "--out", folder / "exported"),
        ("pack", job.path),
        ("pack", job.path, "--what-if", "cutoff=512"),
        ("plans", "--like", job.path),
    )
    for command in commands:
        code, text = refusal(*command)
        assert (code, text.partition(": ")[0]) == (1, "no image or video is left to train on"), command
    # What the message says can be typed.
    option = "--set data.sources.0.images="
    assert f"correct `images` of the source, as by `{option}FOLDER`" in text
    assert document(*recommended, *f"{option}{whole.parent}".split())["skipped_lines"] == 0

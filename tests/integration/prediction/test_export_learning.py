"""What an exported training learns: in the trainer as in the job, or said or refused."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from autotune.draft.arguments import read_arguments
from autotune.errors import ExportError
from autotune.exporting.trainers import llama_factory, target_regex, zero_configuration
from autotune.forecast.profile_file import ProfiledCosts
from autotune.job_file import load_job
from autotune.model_shape import model_shape
from tests.contracts.test_families import TINY
from tests.programs.users import JobFile, refusal
from tests.tiny_models import qwen2_5_vl, qwen2_vl
from tests.values.data import record, write_records
from tests.values.training import PACKED, job_of, plan_of
from trials import plugins, wire
from trials.model.skeleton import build_skeleton, load_config
from trials.plan import Padded, Plan
from trials.workload import ModelShape

Exported = Callable[..., tuple[dict[str, Any], Path]]
HELD_BY_ALL = plan_of("12+8", data=2, packing=Padded(samples=2))
RECOMPUTED = plan_of("12+8r12,8", data=2, packing=Padded(samples=2))
ONE_LEVEL = plan_of("12+8r12,8", data=2, packing=replace(PACKED, sequence=1))

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def training(job: JobFile, profiled: ProfiledCosts, profile: Path) -> Callable[..., ModelShape]:
    """Change the job, with a profile of what it trains then."""

    def change(**changes: Any) -> ModelShape:
        job.spoil(**changes)
        read = load_job(job.path)
        shape = model_shape(read.model, read.training)
        profile.write_text(wire.encode(replace(profiled, model=shape)))
        return shape

    return change


def test_internvl_is_told_to_train_and_for_how_many_steps(job: JobFile, exported: Exported) -> None:
    document, out = exported("internvl", ONE_LEVEL)
    arguments = read_arguments(out / "sft.sh").values
    assert arguments["do_train"] == "True"
    assert "\nexport LAUNCHER=pytorch\n" in (out / "sft.sh").read_text()
    read = load_job(job.path)
    records = [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]
    of_step = int(arguments["gradient_accumulation_steps"]) * 2
    # Its packs have no length, so that Trainer asks for a number of steps: here those of the job's epochs.
    assert 0 < int(arguments["max_steps"]) <= read.training.epochs * len(records) / of_step
    assert int(arguments["max_steps"]) % read.training.epochs == 0
    assert (arguments["loss_reduction"], arguments["loss_reduction_all_gather"]) == ("token", "True")
    job.spoil(training__max_steps=3, training__loss_weighting="square")
    document, out = exported("internvl", ONE_LEVEL)
    arguments = read_arguments(out / "sft.sh").values
    assert (arguments["max_steps"], arguments["loss_reduction"]) == ("3", "square")
    assert not any("loss_weighting" in each for each in document["left_out"])


def test_no_sample_is_larger_than_a_pack_of_internvl_where_text_alone_counts_as_an_image(
    job: JobFile, exported: Exported
) -> None:
    job.spoil(data__oversize="own-pack")
    tight = replace(PACKED, sequence=1, qv=3, qv_min=3, qt=300, qt_min=300)
    document, out = exported("internvl", replace(ONE_LEVEL, packing=tight))
    assert document["plan"]["packing"]["qt"] == 300
    assert any(
        each.startswith("The predicted time of an epoch is that of the plan's packs") for each in document["notes"]
    )
    arguments = read_arguments(out / "sft.sh").values
    records = [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]
    assert int(arguments["max_packed_tokens"]) > max(record["length"] for record in records) > 300
    assert int(arguments["num_images_expected"]) > 3


def test_internvl_gets_a_place_for_each_sample_of_text_alone(job: JobFile, exported: Exported, tmp_path: Path) -> None:
    data = write_records(tmp_path / "texts.jsonl", *(record("Hello?", f"World {number}.") for number in range(48)))
    job.spoil(data__sources=[{"path": str(data)}])
    document, out = exported("internvl", ONE_LEVEL)
    steps, packs = int(read_arguments(out / "sft.sh").values["max_steps"]), 2
    images = int(read_arguments(out / "sft.sh").values["num_images_expected"])
    assert images * packs * steps >= 48
    assert images > 1
    assert f"its own packer fills packs up to {images} images" in " ".join(document["left_out"])


@pytest.mark.parametrize("trainer", ["llama-factory", "internvl"])
def test_a_mean_over_micro_batches_is_named(trainer: str, exported: Exported) -> None:
    document, out = exported(trainer, RECOMPUTED)
    file = "sft.sh" if trainer == "internvl" else "sft.yaml"
    averaged = 2 * int(read_arguments(out / file).values["gradient_accumulation_steps"])
    assert any(f"the loss is the mean of {averaged} micro-batches there" in each for each in document["left_out"])


def test_ms_swift_averages_over_all_tokens_of_a_step(job: JobFile, exported: Exported) -> None:
    assert not any("micro-batches there" in each for each in exported("ms-swift", HELD_BY_ALL)[0]["left_out"])
    job.spoil(training__loss_weighting="sample")
    left_out = exported("ms-swift", HELD_BY_ALL)[0]["left_out"]
    assert "training.loss_weighting: sample; every target token counts alike there" in left_out


@pytest.mark.parametrize("family", ["internvl", "qwen2-5-vl", "qwen3-vl"])
@pytest.mark.parametrize("parts", [("language",), ("vision",), ("projector", "language")])
def test_a_pattern_for_adapters_is_that_of_layers_in_their_parts_alone(
    family: str, parts: tuple[Any, ...], tmp_path: Path
) -> None:
    plugins.load(TINY, family).make(tmp_path / "model")
    skeleton = build_skeleton(load_config(str(tmp_path / "model")), torch.float32)
    names = [name for name, module in skeleton.model.named_modules() if isinstance(module, nn.Linear)]
    targets = sorted({name.rpartition(".")[2] for name in names} - {"lm_head"})
    found = {name for name in names if re.fullmatch(target_regex(parts, targets), name)}
    towers = re.compile("visual|vision_tower")
    projectors = re.compile("merger|multi_modal_projector")

    def part_of(name: str) -> str:
        if projectors.search(name):
            return "projector"
        return "vision" if towers.search(name) else "language"

    assert found == {name for name in names if part_of(name) in parts and not name.endswith("lm_head")}


def test_ms_swift_gets_adapters_by_name_in_the_parts_of_the_job_alone(
    training: Callable[..., ModelShape], exported: Exported
) -> None:
    training(training__lora={"rank": 4, "targets": ["q_proj", "v_proj"]})
    configuration = yaml.safe_load((exported("ms-swift", HELD_BY_ALL)[1] / "sft.yaml").read_text())
    pattern = configuration["target_regex"]
    assert re.fullmatch(pattern, "model.language_model.layers.0.self_attn.q_proj")
    assert not re.fullmatch(pattern, "model.vision_tower.encoder.layer.0.attention.q_proj")
    training(training__lora={"rank": 4})
    configuration = yaml.safe_load((exported("ms-swift", HELD_BY_ALL)[1] / "sft.yaml").read_text())
    assert "target_regex" not in configuration


@pytest.mark.parametrize(
    ("trainer", "key"), [("ms-swift", "freeze_aligner"), ("llama-factory", "freeze_multi_modal_projector")]
)
def test_a_projector_that_trains_along_with_adapters_gets_none(
    trainer: str, key: str, training: Callable[..., ModelShape], exported: Exported
) -> None:
    training(training__lora={"rank": 4, "train_projector": True})
    document, out = exported(trainer, HELD_BY_ALL)
    assert yaml.safe_load((out / "sft.yaml").read_text())[key] is True
    assert any(each.startswith("training.lora.train_projector: ") for each in document["left_out"])


def test_the_type_of_frozen_weights_in_llama_factory_is_named(
    training: Callable[..., ModelShape], exported: Exported
) -> None:
    cases: tuple[tuple[dict[str, Any], bool], ...] = (
        ({}, False),
        ({"training__freeze": ["vision"]}, True),
        ({"training__freeze": [], "training__lora": {"rank": 4}}, True),
    )
    for changes, named in cases:
        training(**changes)
        document, _ = exported("llama-factory", HELD_BY_ALL)
        assert any("are in the checkpoint's bfloat16 there" in each for each in document["left_out"]) == named


def test_what_a_present_configuration_would_change_is_not_kept_and_the_rest_is_named(
    exported: Exported, tmp_path: Path
) -> None:
    own: dict[str, Any] = {
        "model_name_or_path": "m",
        "finetuning_type": "full",
        "dataset": "d",
        "template": "intern_vl",
    }
    own |= {"tokenized_path": "old", "mask_history": True, "report_to": "none"}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(own))
    document, out = exported("llama-factory", HELD_BY_ALL, "--from", tmp_path / "own.yaml")
    written = yaml.safe_load((out / "sft.yaml").read_text())
    assert "tokenized_path" not in written
    assert (written["mask_history"], written["report_to"]) == (True, "none")
    notes = "\n".join(document["notes"])
    assert "Not kept of the configuration, since the exported data and plan replace them: tokenized_path" in notes
    assert "so the training differs: mask_history: True" in notes
    assert "as they are; check that none changes data or training: report_to, template" in notes
    own = {"model": "m", "tuner_type": "full", "dataset": ["d"], "max_length": 64, "truncation_strategy": "left"}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(own))
    document, _ = exported("ms-swift", HELD_BY_ALL, "--from", tmp_path / "own.yaml")
    assert "Kept of the configuration" not in "".join(document["notes"])  # the export decides both
    assert "Taken from the configuration" not in "".join(document["notes"])


def test_a_prompt_of_the_configuration_that_is_kept_unread_has_a_warning_of_its_own(
    job: JobFile, model: Path, exported: Exported, tmp_path: Path
) -> None:
    job.spoil(model__path=str(model))
    own: dict[str, dict[str, Any]] = {
        "llama-factory": {"model_name_or_path": "m", "finetuning_type": "full", "dataset": "d"},
        "ms-swift": {"model": "m", "tuner_type": "full", "dataset": ["d"]},
        "internvl": {"model_name_or_path": "m", "meta_path": "d"},
    }
    cases = (
        ("llama-factory", {"template": "mine"}, "template: mine"),
        ("llama-factory", {"template": "intern_vl"}, None),
        ("ms-swift", {"template": "mine", "system": "Hi."}, "template: mine, system: Hi."),
        ("ms-swift", {"system": ""}, None),
        ("internvl", {"conv_style": "phi3-chat"}, "conv_style: phi3-chat"),
        ("internvl", {"conv_style": "internvl2_5"}, None),
    )
    for trainer, prompt, named in cases:
        (tmp_path / "own.yaml").write_text(yaml.safe_dump(own[trainer] | prompt))
        document, _ = exported(trainer, HELD_BY_ALL, "--from", tmp_path / "own.yaml")
        warnings = [note for note in document["notes"] if note.startswith("WARNING")]
        assert len(warnings) == (named is not None), (trainer, prompt, warnings)
        assert all(f"WARNING: {named} of the configuration is kept unread; whether" in each for each in warnings)


@pytest.mark.parametrize(
    ("trainer", "own", "name"),
    [
        ("ms-swift", {"model": "m", "tuner_type": "full", "dataset": ["d"], "ENV": {"MAX_PIXELS": "3136"}}, "ENV"),
        (
            "llama-factory",
            {"model_name_or_path": "m", "finetuning_type": "full", "dataset": "d", "image_max_pixels": 3136},
            "image_max_pixels",
        ),
    ],
)
def test_limits_of_images_of_a_present_configuration_are_named(
    trainer: str, own: dict[str, Any], name: str, exported: Exported, tmp_path: Path
) -> None:
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(own))
    document, out = exported(trainer, HELD_BY_ALL, "--from", tmp_path / "own.yaml")
    assert "3136" in str(yaml.safe_load((out / "sft.yaml").read_text())[name])
    assert any(
        each.startswith("Taken from the configuration, ") and each.endswith(f"changes data or training: {name}")
        for each in document["notes"]
    )


def test_llama_factory_makes_no_image_smaller_than_the_model_s_processor_does(exported: Exported) -> None:
    written = yaml.safe_load((exported("llama-factory", HELD_BY_ALL)[1] / "sft.yaml").read_text())
    assert (written["image_max_pixels"], written["image_min_pixels"]) == (1_000_000_000, 1)


def test_turns_that_llama_factory_would_leave_out_are_refused(job: JobFile, profile: Path, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "One."}, {"role": "user", "content": "Two?"}]
    lines = [{"messages": [*turns, {"role": "assistant", "content": f"{number}."}]} for number in range(48)]
    data = tmp_path / "turns.jsonl"
    data.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    job.spoil(data__sources=[{"path": str(data)}])
    options = ("--device-profile", profile, "--out", tmp_path / "new")
    code, message = refusal("export", job.path, "--to", "llama-factory", *options)
    assert (code, "turns of user and assistant that do not alternate" in message) == (2, True), message


def test_what_llama_factory_cuts_otherwise_is_named(job: JobFile, exported: Exported) -> None:
    job.spoil(data__oversize="truncate", data__max_tokens=4000)
    document, _ = exported("llama-factory", HELD_BY_ALL)
    assert any("questions are cut there along with answers" in each for each in document["left_out"])


@pytest.mark.parametrize("plan", [RECOMPUTED, ONE_LEVEL], ids=["padded", "packed"])
def test_internvl_cuts_samples_where_the_job_does(plan: Plan, job: JobFile, exported: Exported, tmp_path: Path) -> None:
    words = " ".join(map(str, range(200)))
    data = write_records(tmp_path / "texts.jsonl", *(record("Count.", words) for _ in range(48)))
    job.spoil(data__sources=[{"path": str(data)}], data__oversize="truncate", data__max_tokens=200)
    document, out = exported("internvl", plan)
    lengths = {json.loads(line)["length"] for line in (out / "train.jsonl").read_text().splitlines()}
    assert lengths == {200}
    assert read_arguments(out / "sft.sh").values["max_seq_length"] == "200"
    assert not any("truncate" in each for each in document["left_out"])


def test_qwen_vl_cuts_samples_where_the_job_does_but_in_packs(
    training: Callable[..., ModelShape], exported: Exported, tmp_path: Path
) -> None:
    qwen2_5_vl.make(tmp_path / "qwen2.5-vl")
    path = str(tmp_path / "qwen2.5-vl")
    shape = training(model__path=path, model__dtype="bfloat16", data__oversize="truncate", data__max_tokens=4000)
    layers = f"{shape.vision_layers}+{shape.language_layers}"
    for packing, named in (Padded(samples=2), False), (replace(PACKED, sequence=1), True):
        document, out = exported("qwen-vl", plan_of(layers, data=2, zero=1, packing=packing))
        assert read_arguments(out / "sft.sh").values["model_max_length"] == "4000"
        assert any("longer samples are not cut in packs there" in each for each in document["left_out"]) == named


def test_adapters_that_llama_factory_would_not_have_are_refused(
    training: Callable[..., ModelShape], job: JobFile, profile: Path, tmp_path: Path
) -> None:
    training(training__lora={"rank": 4, "parts": ["language", "projector"]})
    options = ("--device-profile", profile, "--out", tmp_path / "new")
    code, message = refusal("export", job.path, "--to", "llama-factory", *options)
    assert (code, "only on layers that training.lora.targets names" in message) == (2, True), message


def test_targets_that_llama_factory_would_find_in_further_names_are_refused(tmp_path: Path) -> None:
    """It has adapters on each layer with a target anywhere in its name, such as proj in q_proj."""
    qwen2_vl.make(tmp_path / "model")

    def check(*targets: str, **changes: Any) -> None:
        lora = {"rank": 4, "parts": ["vision", "language"], "targets": targets}
        llama_factory.check(job_of(tmp_path, tmp_path, training={"lora": lora | changes}), "qwen2_vl")

    check("qkv", "attn.proj", "q_proj", "v_proj")
    check("proj", parts=["vision"])
    with pytest.raises(ExportError, match=r"targets: proj is also a part of \S+o_proj, and LLaMA-Factory has adapters"):
        check("qkv", "proj", "q_proj", "v_proj", "k_proj")


def test_qwen_vl_gets_both_rates_where_one_differs_and_no_dropout(
    training: Callable[..., ModelShape], exported: Exported, tmp_path: Path
) -> None:
    qwen2_5_vl.make(tmp_path / "qwen2.5-vl")
    shape = training(
        model__path=str(tmp_path / "qwen2.5-vl"), model__dtype="bfloat16", training__learning_rates={"vision": 1e-4}
    )
    layers = f"{shape.vision_layers}+{shape.language_layers}"
    plan = plan_of(layers, data=2, zero=1, packing=replace(PACKED, sequence=1))
    arguments = read_arguments(exported("qwen-vl", plan)[1] / "sft.sh").values
    assert (float(arguments["vision_tower_lr"]), float(arguments["mm_projector_lr"])) == (1e-4, 1e-3)
    training(training__learning_rates={}, training__lora={"rank": 4})
    arguments = read_arguments(exported("qwen-vl", plan)[1] / "sft.sh").values
    # It takes 0 for its default of 0.05.
    assert 0 < float(arguments["lora_dropout"]) < 1e-6
    assert "vision_tower_lr" not in arguments
    (tmp_path / "qwen2.5-vl").rename(tmp_path / "mine")
    training(model__path=str(tmp_path / "mine"))
    options = ("--device-profile", tmp_path / "costs.json", "--out", tmp_path / "new")
    code, message = refusal("export", tmp_path / "job.yaml", "--to", "qwen-vl", *options)
    assert (code, "would load" in message and "as qwen2_vl and not as qwen2_5_vl" in message) == (2, True), message


def test_sharded_weights_are_gathered_when_they_are_saved() -> None:
    assert zero_configuration(3)["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True
    assert "stage3_gather_16bit_weights_on_model_save" not in zero_configuration(1)["zero_optimization"]

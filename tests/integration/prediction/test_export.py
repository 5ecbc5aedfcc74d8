"""`autotune export`: plans as data and configurations of other trainers."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from transformers import TrainingArguments

from autotune import export
from autotune.cli import main
from autotune.draft.arguments import read_arguments
from autotune.forecast.forecast import ForecastData
from autotune.forecast.profile_file import ProfiledCosts
from autotune.job_file import load_job
from autotune.model_shape import model_shape
from autotune.plan_file import read_plan
from tests.programs.users import JobFile, refusal
from tests.tiny_models import qwen2_5_vl
from tests.values.forecast import IN_BFLOAT16, PLAN
from tests.values.training import PACKED, plan_of
from trials import wire
from trials.data.index import DatasetIndex
from trials.job import EvaluationSection, Job, Source
from trials.plan import Padded, Plan
from trials.workload import ModelShape

QWEN_VL_FIELDS = """
    model_name_or_path tune_mm_llm tune_mm_mlp tune_mm_vision lora_enable lora_r lora_alpha lora_dropout dataset_use
    video_max_frames video_min_frames video_fps video_max_pixels video_min_pixels
    data_flatten data_packing base_interval max_pixels min_pixels cache_dir optim
    model_max_length mm_projector_lr vision_tower_lr
"""
"""Names in qwenvl/train/argument.py of qwen-vl-finetune, besides those of transformers."""
INTERNVL_FIELDS = """
    model_name_or_path freeze_llm freeze_backbone freeze_mlp unfreeze_vit_layers vision_select_layer use_backbone_lora
    use_llm_lora unfreeze_lm_head grad_checkpoint drop_path_rate ps_version use_fast_tokenizer max_seq_length
    force_image_size down_sample_ratio pad2square conv_style meta_path use_data_resampling dynamic_image_size
    use_thumbnail min_dynamic_patch max_dynamic_patch normalize_type use_packed_ds num_images_expected
    max_packed_tokens max_buffer_size log_freq strict_mode replacement allow_overflow loss_reduction
    loss_reduction_all_gather
"""
"""Names in internvl/train/internvl_chat_finetune.py, besides those of transformers."""
OF_TRANSFORMERS = {field.name for field in fields(TrainingArguments)}

HELD_BY_ALL = plan_of("12+8", data=2, packing=Padded(samples=2))
"""A plan within the limits of every trainer."""

pytestmark = pytest.mark.usefixtures("home")


def measured(job: Job, file: Path) -> DatasetIndex:
    """The samples of an exported file, in its order."""
    data = job.data.model_copy(update={"sources": (Source(path=file, images=file.parent),)})
    return ForecastData.of(job.model_copy(update={"data": data, "evaluation": EvaluationSection()})).index


def samples_of(index: DatasetIndex) -> list[str]:
    samples = map(index.sample, range(len(index)))
    return sorted(repr((sample.turns, sample.images)) for sample in samples)


def check_folder_of_checkpoints(out: Path, file: str) -> None:
    """A trainer writes them to a folder of their own; a relative one is inside of that where the command starts."""
    assert out / read_arguments(out / file).values["output_dir"] == out / "output"
    assert not (out / "output").exists()


@pytest.mark.usefixtures("in_bfloat16")
def test_the_best_plan_within_the_limits_of_ms_swift_is_written_with_its_packs(
    job: JobFile, exported: Callable[..., tuple[dict[str, Any], Path]]
) -> None:
    document, out = exported("ms-swift", IN_BFLOAT16)
    assert document["missing"] == ["a pipeline of 2 stages", "2 of 8 vision layers recomputed in stage 0"]
    plan = document["plan"]
    assert plan["layout"] | {"pipeline": 1, "data": 2} == plan["layout"]
    configuration = yaml.safe_load((out / "sft.yaml").read_text())
    assert (configuration["packing_strategy"], configuration["train_dataloader_shuffle"]) == ("sequential", False)
    read = load_job(job.path)
    index = measured(read, out / "train.jsonl")
    assert samples_of(index) == samples_of(ForecastData.of(read).index)
    packs = [0]
    for tokens in index.text_tokens.tolist():
        if packs[-1] and packs[-1] + tokens > configuration["packing_length"]:
            packs.append(0)
        packs[-1] += tokens
    rows, left = divmod(len(packs), 2)
    assert left == 0
    assert rows % configuration["gradient_accumulation_steps"] == 0
    price = document["price"]
    assert price["over_wanted"] == pytest.approx(prod(price["parts"].values()))
    assert price["epoch_seconds"] == pytest.approx(price["over_wanted"] * price["wanted_epoch_seconds"])
    assert price["over_present"] is None
    assert document["starts_in"] == str(out)


def test_in_float32_ms_swift_gets_padded_micro_batches(exported: Callable[..., tuple[dict[str, Any], Path]]) -> None:
    document, out = exported("ms-swift", replace(HELD_BY_ALL, packing=replace(PACKED, sequence=1)))
    assert document["missing"] == [
        "packs in float32, which FlashAttention does not take: model.dtype: bfloat16 would allow them"
    ]
    assert isinstance(wire.decode(Plan, json.dumps(document["plan"])).packing, Padded)
    assert yaml.safe_load((out / "sft.yaml").read_text())["packing"] is False


def test_a_plan_that_the_trainer_holds_is_the_one_that_is_written_also_by_a_program(
    job: JobFile, profile: Path, exported: Callable[..., tuple[dict[str, Any], Path]], tmp_path: Path
) -> None:
    document, out = exported("ms-swift", HELD_BY_ALL)
    assert (document["missing"], document["plan_id"]) == ([], HELD_BY_ALL.id)
    assert set(document["price"]["parts"].values()) == {1.0}
    configuration = yaml.safe_load((out / "sft.yaml").read_text())
    assert (configuration["packing"], configuration["per_device_train_batch_size"]) == (False, 2)
    assert [configuration[name] for name in ("torch_dtype", "bf16", "fp16")] == ["float32", False, False]
    check_folder_of_checkpoints(out, "sft.yaml")
    found = export(job.path, "ms-swift", tmp_path / "by-hand", plan=HELD_BY_ALL, device_profile=profile)
    assert (found.plan.id, found.command) == (document["plan_id"], document["command"])
    for name in found.files:
        assert (found.folder / name).read_bytes() == (out / name).read_bytes()


def test_a_present_configuration_is_kept_and_compared(
    exported: Callable[..., tuple[dict[str, Any], Path]], tmp_path: Path
) -> None:
    own = {"model": "org/model", "train_type": "full", "dataset": "mine.jsonl", "per_device_train_batch_size": 1}
    own |= {"learning_rate": 0.5, "system": "Be brief.", "report_to": "wandb", "lazy_tokenize": True}
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump(own))
    document, out = exported("ms-swift", PLAN, "--from", file)
    configuration = yaml.safe_load((out / "sft.yaml").read_text())
    assert {name: configuration.get(name) for name in ("system", "report_to")} == {
        "system": "Be brief.",
        "report_to": "wandb",
    }
    assert not {"train_type", "lazy_tokenize"} & configuration.keys()
    assert configuration["learning_rate"] == 1e-3
    assert document["price"]["over_present"] < 1


def test_held_out_samples_are_a_file_of_their_own(
    job: JobFile, exported: Callable[..., tuple[dict[str, Any], Path]]
) -> None:
    job.spoil(evaluation={"samples": 6, "every": 3})
    _, out = exported("ms-swift", HELD_BY_ALL)
    configuration = yaml.safe_load((out / "sft.yaml").read_text())
    assert (configuration["eval_strategy"], configuration["eval_steps"]) == ("steps", 3)
    read = load_job(job.path)
    held, trained = (measured(read, out / name) for name in ("val.jsonl", "train.jsonl"))
    assert len(held) == 6
    assert not {*samples_of(held)} & {*samples_of(trained)}


def test_llama_factory_gets_padded_micro_batches_that_init_reads_again(
    exported: Callable[..., tuple[dict[str, Any], Path]], tmp_path: Path
) -> None:
    document, out = exported("llama-factory", PLAN)
    plan = wire.decode(Plan, json.dumps(document["plan"]))
    assert isinstance(plan.packing, Padded)
    assert "packs of samples with images" in document["missing"]
    assert len(json.loads((out / "train.json").read_text())) == 48
    described = json.loads((out / "dataset_info.json").read_text())
    assert described["train"]["file_name"] == "train.json"
    job = tmp_path / "again.yaml"
    answer = CliRunner().invoke(main, ["init", "--from", str(out / "sft.yaml"), "--devices", "2", "--out", str(job)])
    assert answer.exit_code == 0, answer.stderr
    assert read_plan(tmp_path / "again-current-plan.json") == plan


@pytest.mark.parametrize(("trainer", "key"), [("llama-factory", "cutoff_len"), ("ms-swift", "max_length")])
def test_samples_are_cut_where_the_job_cuts_them_and_not_at_the_longest(
    trainer: str, key: str, job: JobFile, exported: Callable[..., tuple[dict[str, Any], Path]]
) -> None:
    """A trainer that counts a token more would cut the last word of the longest sample."""
    for settings, least in ({"oversize": "truncate", "max_tokens": 4000}, 4000), ({"oversize": "own-pack"}, 64):
        job.spoil(data__oversize=settings["oversize"], data__max_tokens=settings.get("max_tokens"))
        _, out = exported(trainer, HELD_BY_ALL)
        file = next(out.glob("train.json*"))
        longest = int(measured(load_job(job.path), file).text_tokens.max())
        length = read_arguments(out / "sft.yaml").values[key]
        assert length == (least if least == 4000 else longest + least)


def test_llama_factory_trains_the_model_s_own_prompt(
    job: JobFile,
    model: Path,
    profile: Path,
    exported: Callable[..., tuple[dict[str, Any], Path]],
    tmp_path: Path,
) -> None:
    job.spoil(model__path=str(model))
    _, out = exported("llama-factory", HELD_BY_ALL)
    chosen = yaml.safe_load((out / "sft.yaml").read_text())
    assert (chosen["template"], chosen["default_system"]) == ("intern_vl", "")
    check_folder_of_checkpoints(out, "sft.yaml")
    chat = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text(chat.replace("<|im_start|>", "### "))
    options = ("--device-profile", profile, "--out", tmp_path / "new")
    code, message = refusal("export", job.path, "--to", "llama-factory", *options)
    assert (code, "writes other turns than LLaMA-Factory's for internvl (intern_vl)" in message) == (2, True), message
    own, present = tmp_path / "own.yaml", {"model_name_or_path": "m", "finetuning_type": "full", "dataset": "d"}
    own.write_text(yaml.safe_dump(present | {"template": "intern_vl"}))
    code, message = refusal("export", job.path, "--to", "llama-factory", "--from", own, *options)
    assert (code, "template: intern_vl of the configuration writes other turns than the" in message) == (2, True)
    own.write_text(yaml.safe_dump(present | {"template": "mine"}))
    _, out = exported("llama-factory", HELD_BY_ALL, "--from", own)
    kept = yaml.safe_load((out / "sft.yaml").read_text())
    assert (kept["template"], "default_system" in kept) == ("mine", False)
    (model / "chat_template.jinja").write_text(f"<|im_start|>system\nBe brief.<|im_end|>\n{chat}")
    own.write_text(yaml.safe_dump(present | {"template": "intern_vl"}))
    _, out = exported("llama-factory", HELD_BY_ALL, "--from", own)
    assert yaml.safe_load((out / "sft.yaml").read_text())["default_system"] == "Be brief."
    own.write_text(yaml.safe_dump(present | {"template": "intern_vl", "default_system": ""}))
    code, message = refusal("export", job.path, "--to", "llama-factory", "--from", own, *options)
    assert (code, "default_system: '' of the configuration is not the system prompt of the" in message) == (2, True)


def test_internvl_trains_the_model_s_own_prompt(job: JobFile, model: Path, profile: Path, tmp_path: Path) -> None:
    job.spoil(model__path=str(model))
    chat = model / "chat_template.jinja"
    chat.write_text("<|im_start|>system\nBe brief.<|im_end|>\n" + chat.read_text())
    options = ("--device-profile", profile, "--out", tmp_path / "new")
    code, message = refusal("export", job.path, "--to", "internvl", *options)
    assert (code, "the style internvl2_5, or a system prompt of its own" in message) == (2, True), message


def test_ms_swift_gets_the_system_prompt_of_the_model_s_own_template(
    job: JobFile, model: Path, exported: Callable[..., tuple[dict[str, Any], Path]]
) -> None:
    job.spoil(model__path=str(model))
    _, out = exported("ms-swift", HELD_BY_ALL)
    assert yaml.safe_load((out / "sft.yaml").read_text())["system"] == ""
    chat = model / "chat_template.jinja"
    chat.write_text("<|im_start|>system\nBe brief.<|im_end|>\n" + chat.read_text())
    _, out = exported("ms-swift", HELD_BY_ALL)
    assert yaml.safe_load((out / "sft.yaml").read_text())["system"] == "Be brief."
    chat.write_text(chat.read_text().replace("<|im_start|>", "### "))
    _, out = exported("ms-swift", HELD_BY_ALL)
    assert "system" not in yaml.safe_load((out / "sft.yaml").read_text())


def test_internvl_gets_the_capacities_of_packs(
    job: JobFile, exported: Callable[..., tuple[dict[str, Any], Path]]
) -> None:
    document, out = exported("internvl", PLAN)
    packing, script = document["plan"]["packing"], (out / "sft.sh").read_text()
    assert f"--max_packed_tokens {packing['qt']} " in script
    assert document["price"]["parts"]["balance"] >= 1
    meta = json.loads((out / "meta.json").read_text())
    assert next(iter(meta.values()))["annotation"] == str(out / "train.jsonl")
    records = [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]
    # Without such a turn its own code writes a system prompt.
    assert {json.dumps(record["conversations"][0]) for record in records} == {'{"from": "system", "value": null}'}
    read = load_job(job.path)
    assert samples_of(measured(read, out / "train.jsonl")) == samples_of(ForecastData.of(read).index)
    arguments = read_arguments(out / "sft.sh")
    assert arguments.devices == 2
    check_folder_of_checkpoints(out, "sft.sh")
    assert arguments.values["use_packed_ds"] == "True"
    assert "model.dtype: float32; its script loads all weights in bfloat16" in document["left_out"]
    assert arguments.values.keys() <= OF_TRANSFORMERS | {*INTERNVL_FIELDS.split()}


def test_ranks_wait_in_the_present_configuration_too_where_the_trainer_orders_the_packs(
    job: JobFile, exported: Callable[..., tuple[dict[str, Any], Path]], plan_file: Callable[[Plan], Path]
) -> None:
    plan = plan_of("12+8r12,0", data=2, packing=PACKED)
    job.spoil(search={"current_plan": str(plan_file(plan))})
    document, _ = exported("internvl", plan)
    assert (document["missing"], document["plan_id"]) == ([], plan.id)
    assert abs(document["price"]["parts"]["balance"] - 1) > 0.01
    assert document["price"]["over_present"] == pytest.approx(1)


def test_qwen_vl_gets_packs_as_items(
    job: JobFile, profiled: ProfiledCosts, exported: Callable[..., tuple[dict[str, Any], Path]], tmp_path: Path
) -> None:
    """Rules of its format: an item is a list of samples with `conversations` from human and gpt in turns, and as many
    `<image>` as images."""
    qwen2_5_vl.make(tmp_path / "qwen2.5-vl")
    job.spoil(model__path=str(tmp_path / "qwen2.5-vl"))

    def profile() -> tuple[ModelShape, Path]:
        shape = model_shape(load_job(job.path).model)
        costs = tmp_path / "costs.json"
        costs.write_text(wire.encode(replace(profiled, model=shape)))
        return shape, costs

    _, costs = profile()
    new = ("--device-profile", costs, "--out", tmp_path / "new")
    code, message = refusal("export", job.path, "--to", "qwen-vl", *new)
    assert (code, "model.dtype: float32, which the attention of Qwen-VL's" in message) == (2, True), message
    job.spoil(model__dtype="bfloat16")
    shape, _ = profile()
    plan = plan_of(
        f"{shape.vision_layers}+{shape.language_layers}", data=2, zero=1, packing=replace(PACKED, sequence=1)
    )
    document, out = exported("qwen-vl", plan)
    assert document["plan_id"] == plan.id
    assert any("its published rules were followed" in note for note in document["notes"])
    assert document["starts_in"] == "qwen-vl-finetune of its repository"
    items = json.loads((out / "train.json").read_text())
    assert len({id(item) for item in items}) == len(items)
    samples = [sample for item in items for sample in item]
    assert len(samples) == len(ForecastData.of(load_job(job.path)).index)
    for sample in samples:
        turns = sample["conversations"]
        assert [turn["from"] for turn in turns] == ["human", "gpt"] * (len(turns) // 2)
        assert sum(turn["value"].count("<image>") for turn in turns) == len(sample.get("image", ()))
        assert all(Path(image).is_file() for image in sample.get("image", ()))
    arguments = read_arguments(out / "sft.sh").values
    flags = ("data_packing", "data_flatten", "per_device_train_batch_size")
    assert [arguments[flag] for flag in flags] == ["True", "True", "1"]
    assert arguments["output_dir"] == str(out / "output")
    assert arguments.keys() <= OF_TRANSFORMERS | {*QWEN_VL_FIELDS.split()}
    assert "data_dict[" in (out / "data_dict.py").read_text()


@pytest.mark.parametrize(
    "case",
    [
        ("qwen-vl", {}, "trains Qwen's models alone, and this is a model of type internvl"),
        ("llama-factory", {"training__learning_rates": {"vision": 1e-5}}, "one rate for all parts"),
        ("internvl", {"training__learning_rates": {"projector": 1e-5}}, "scripts have one rate for all parts"),
    ],
)
def test_what_a_trainer_cannot_train_as_the_job_says_is_refused(
    job: JobFile, profile: Path, tmp_path: Path, case: tuple[str, dict[str, Any], str]
) -> None:
    trainer, spoilt, reason = case
    job.spoil(**spoilt)
    options = ("--device-profile", profile, "--out", tmp_path / "new")
    code, message = refusal("export", job.path, "--to", trainer, *options)
    assert (code, reason in message) == (2, True), message
    assert not (tmp_path / "new").exists()


def test_impossible_exports_are_refused_with_what_is_possible(
    job: JobFile, profile: Path, plan_file: Callable[[Plan], Path], tmp_path: Path
) -> None:
    plan = plan_file(PLAN)

    def refused(*options: str | Path) -> str:
        code, message = refusal("export", job.path, "--device-profile", profile, *options)
        assert code == 2
        return message

    assert "plans are exported to" in refused("--to", "trl")
    (tmp_path / "mine").mkdir()
    assert "exists and is not overwritten" in refused("--to", "ms-swift", "--out", tmp_path / "mine")
    assert "is no folder" in refused("--to", "ms-swift", "--out", tmp_path / "no" / "where")
    new = ("--to", "ms-swift", "--out", tmp_path / "new")
    (tmp_path / "broken.json").write_text("{")
    assert "broken.json" in refused(*new, "--plan", tmp_path / "broken.json")
    other = tmp_path / "other.yaml"
    other.write_text(yaml.safe_dump({"model_name_or_path": "m", "finetuning_type": "full", "dataset": "d"}))
    assert "not one of ms-swift" in refused(*new, "--plan", plan, "--from", other)
    wide = replace(PLAN, layout=replace(PLAN.layout, data=4))
    assert "8 devices but 2 are given" in refused(*new, "--plan", plan_file(wide))
    assert not (tmp_path / "new").exists()


def test_nothing_is_left_of_an_export_that_fails(
    job: JobFile, profile: Path, plan_file: Callable[[Plan], Path], tmp_path: Path
) -> None:
    options = ("--device-profile", profile, "--plan", plan_file(PLAN), "--memory", "1MiB", "--out", tmp_path / "new")
    before = sorted(path.name for path in tmp_path.iterdir())
    code, message = refusal("export", job.path, "--to", "ms-swift", *options)
    assert (code, "no plan that the trainer can hold fits the memory" in message) == (2, True)
    assert sorted({path.name for path in tmp_path.iterdir()} - {"home"}) == before


def test_a_wrong_trainer_is_refused_without_heavy_imports() -> None:
    heavy = "import sys, autotune.cli.export; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", heavy], check=False).returncode == 0

"""What `init --from` says of arguments that a job does not have, and where a trainer's defaults are others."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from autotune.cli import main
from autotune.draft import leftovers
from autotune.job_file import load_job
from tests.programs.users import refusal
from trials.job import Job, TrainingSection

SWIFT = "NPROC_PER_NODE=8 swift sft --model MODEL --dataset train.jsonl --train_type full"
FACTORY = "llamafactory-cli train --model_name_or_path MODEL --dataset d --stage sft --finetuning_type full"
TRAINER = "torchrun --nproc_per_node 2 train.py --model_name_or_path MODEL --data_path train.jsonl"
INTERNVL = f"{TRAINER} --conv_style internvl2_5"
MEGATRON = "NPROC_PER_NODE=2 megatron sft --model MODEL --dataset train.jsonl --global_batch_size 4"
NEVER_OFF = {"unfreeze_vit_layers", "use_backbone_lora", "loraplus_lr_ratio", "lorap_lr_ratio", "neftune_noise_alpha"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's folder with a model and data; it is the current one."""
    (tmp_path / "MODEL").mkdir()
    (tmp_path / "train.jsonl").write_text("{}\n")
    (tmp_path / "ds.json").write_text('{"scheduler":\t{"type": "WarmupLR", "params": {}}}')
    monkeypatch.chdir(tmp_path)


def converted(script: str, *arguments: str) -> tuple[Job, str]:
    """The job that `init` writes, and its notes."""
    Path("run.sh").write_text(script)
    Path("job.yaml").unlink(missing_ok=True)
    answer = CliRunner().invoke(main, ["init", "--json", *arguments, "--from", "run.sh"])
    assert answer.exit_code == 0, answer.output
    return load_job(Path("job.yaml")), "\n".join(json.loads(answer.stdout)["notes"])


@pytest.mark.parametrize("name", sorted(NEVER_OFF))
@pytest.mark.parametrize("value", ["16", 16, 16.0, "-1"])
def test_a_number_turns_off_only_what_has_it_as_none(name: str, value: Any) -> None:
    assert leftovers.learning_text({name: value}) == f"{name}: {value}"


@pytest.mark.parametrize(
    ("name", "value"),
    [("bits", 16), ("num_lora_modules", -1), ("use_backbone_lora", "0"), ("drop_path_rate", "0.00"),
     ("loss_scale", "default"), ("init_weights", True), ("truncation_strategy", "delete"), ("dataset_shuffle", "true"),
     ("adam_epsilon", "1e-8"), ("mix_strategy", "concat"), ("average_tokens_across_devices", True)],
)  # fmt: skip
def test_a_value_that_is_what_a_job_does_is_not_named(name: str, value: Any) -> None:
    assert leftovers.learning_text({name: value}) == ""


@pytest.mark.parametrize(
    ("script", "note"),
    [
        (f"{INTERNVL} --use_backbone_lora 16", "the training differs: use_backbone_lora: 16"),
        (f"{SWIFT} --adam_epsilon 1e-6", "the training differs: adam_epsilon: 1e-6"),
        (f"{SWIFT} --interleave_prob 0.5 0.5", "the training differs: interleave_prob: ['0.5', '0.5']"),
        (f"{SWIFT} --average_tokens_across_devices false", "differs: average_tokens_across_devices: false"),
        (f"{SWIFT} --dataset_shuffle false --max_epochs 2", "differs: dataset_shuffle: false, max_epochs: 2"),
        (SWIFT, "before ms-swift 4 it is the mean of those of the devices unless average_tokens_across_devices"),
        (f"{TRAINER} --max_samples 500", "the training differs: max_samples: 500"),
        (f"{SWIFT} --save_strategy no", "The configuration writes no checkpoints, and the job one at the end of each"),
        (f"{TRAINER} --save_total_limit 0", "The configuration keeps all checkpoints"),
        (f"{TRAINER} --deepspeed ds.json", "deepspeed: scheduler.type: WarmupLR replaces that of the arguments there"),
        (INTERNVL, "setting: conv_style: internvl2_5, dynamic_image_size: False (default there), use_thumbnail: False"),
    ],
)  # fmt: skip
def test_what_a_job_does_otherwise_is_named(script: str, note: str) -> None:
    assert note in converted(script)[1]


def test_devices_that_share_samples_are_counted_once() -> None:
    script = f"{SWIFT} --per_device_train_batch_size 1 --gradient_accumulation_steps 2 --sequence_parallel_size 8"
    job, notes = converted(script)
    assert job.training.global_batch_samples == 2
    assert "A step has 2 samples: 1 per device x 2 accumulation steps x 8 devices / 8 (sequence_parallel_size)" in notes
    unknown, notes = converted(script.replace("size 8", "size $SP"))
    assert unknown.training.global_batch_samples == TrainingSection.model_fields["global_batch_samples"].default
    assert "not that of the script, which does not set sequence_parallel_size" in notes
    Path("odd.sh").write_text(script.replace("size 8", "size 3"))
    message = "sequence_parallel_size: 3: 8 devices cannot be split into groups of 3"
    assert message in refusal("init", "--from", "odd.sh", "--out", "b.yaml")[1]


def test_alpha_is_that_of_the_trainer_or_named() -> None:
    lora = FACTORY.replace("finetuning_type full", "finetuning_type lora --lora_rank 12")
    assert converted(lora, "MODEL")[0].training.lora.alpha == 24
    assert converted(f"{INTERNVL} --use_llm_lora 16")[0].training.lora.alpha == 32
    job, notes = converted(f"{TRAINER} --use_lora true --lora_r 64")
    assert job.training.lora.alpha == 8
    assert "The alpha of the adapters is not given; training.lora.alpha is 8, the default of peft" in notes
    Path("odd.sh").write_text(f"{TRAINER} --use_lora true --lora_alpha 8.5")
    assert "lora_alpha: 8.5 is not a count" in refusal("init", "--from", "odd.sh", "--out", "b.yaml")[1]


def test_the_type_of_megatrons_weights_is_that_of_torch_dtype() -> None:
    assert converted(MEGATRON)[0].model.dtype == "bfloat16"
    assert converted(f"{MEGATRON} --torch_dtype float32")[0].model.dtype == "float32"
    assert "float16 is not supported" in converted(f"{MEGATRON} --fp16 true")[1]


def test_flags_that_turn_off_a_default_and_texts_for_none_are_read() -> None:
    assert converted(f"{FACTORY} --no_freeze_vision_tower")[0].training.freeze == ("projector",)
    assert converted(f"{FACTORY} --train_mm_proj_only true")[0].training.freeze == ("vision", "language")
    trl = "trl sft --model_name_or_path MODEL --dataset_name train.jsonl --max_length None"
    assert converted(trl)[0].data.oversize == "own-pack"


def test_a_pattern_of_ms_swift_is_that_of_the_adapters() -> None:
    pattern = r"^model\.language_model\.layers\.\d+\.self_attn\.(q|v)_proj$"
    lora = converted(f"{SWIFT.replace('full', 'lora')} --target_regex '{pattern}'")[0].training.lora
    assert (lora.parts, lora.targets) == (("language",), ("self_attn.q_proj", "self_attn.v_proj"))


def test_arguments_in_a_file_of_ms_swift_are_refused() -> None:
    Path("run.sh").write_text(f"{SWIFT} --config a.yaml --learning_rate 1e-5")
    assert "config: a.yaml has further arguments, which are not read" in refusal("init", "--from", "run.sh")[1]


def test_what_a_configuration_says_of_its_data_is_named_where_other_data_are_given() -> None:
    _, notes = converted(SWIFT.replace("train.jsonl", "old.jsonl#500"), "MODEL", "train.jsonl")
    assert "For DATA, settings of the sources in run.sh are left out: sampling: exactly:500" in notes


def test_ms_swift_evaluates_when_it_saves() -> None:
    script = f"{SWIFT} --val_dataset train.jsonl --save_steps 40"
    assert converted(script)[0].evaluation.every == 40
    assert converted(f"{script} --eval_strategy epoch")[0].evaluation.every is None


@pytest.mark.parametrize("script", [SWIFT, MEGATRON], ids=["ms-swift", "Megatron-SWIFT"])
@pytest.mark.parametrize("line", ["export ROOT_IMAGE_DIR=pictures\n", "ROOT_IMAGE_DIR=pictures "])
def test_the_folder_of_images_that_ms_swift_reads_from_the_environment_is_that_of_the_sources(
    script: str, line: str
) -> None:
    Path("pictures").mkdir()
    job, notes = converted(line + script.replace("--dataset", "--val_dataset train.jsonl --dataset"))
    folder = Path("pictures").absolute()
    assert [source.images for source in (*job.data.sources, *(job.evaluation.sources or ()))] == [folder, folder]
    assert "pictures" not in notes
    assert (
        "Not known, since the script does not set them: images"
        in converted(line.replace("pictures", "$PICTURES") + script)[1]
    )


def test_a_configuration_of_ms_swift_names_the_folder_of_images_among_its_variables() -> None:
    Path("sft.yaml").write_text(
        "model: MODEL\ndataset: train.jsonl\ntrain_type: full\nENV: {ROOT_IMAGE_DIR: pictures, MAX_PIXELS: 3136}\n"
    )
    answer = CliRunner().invoke(main, ["init", "--json", "--from", "sft.yaml"])
    assert answer.exit_code == 0, answer.output
    assert [source.images for source in load_job(Path("job.yaml")).data.sources] == [Path("pictures").absolute()]
    assert 'such a setting: max_pixels: 3136"' in answer.stdout


def test_settings_of_videos_are_lines_for_the_file_of_the_model_folder() -> None:
    lines = {"fps": 2, "min_frames": 4, "max_frames": 12, "size": {"shortest_edge": 3136, "longest_edge": 37632}}
    variables = {"FPS": 2, "FPS_MIN_FRAMES": 4, "FPS_MAX_FRAMES": 12, "VIDEO_MAX_PIXELS": 37632}
    variables |= {"VIDEO_MIN_PIXELS": 3136, "MAX_PIXELS": 50176}
    before = " ".join(f"{name}={value}" for name, value in variables.items())
    text = f"write {json.dumps(lines)} into video_preprocessor_config.json of the model folder"
    _, notes = converted(f"{before} {SWIFT}")
    assert text in notes
    assert "fps_max_frames is max_frames" in notes
    assert "video_max_pixels is size.longest_edge" in notes
    assert "such a setting: max_pixels: 50176\n" in notes
    Path("sft.yaml").write_text(f"model: MODEL\ndataset: train.jsonl\ntrain_type: full\nENV: {json.dumps(variables)}\n")
    answer = CliRunner().invoke(main, ["init", "--json", "--from", "sft.yaml", "--out", "of-yaml.yaml"])
    assert any(text in note for note in json.loads(answer.stdout)["notes"])
    _, notes = converted(f"{FACTORY} --video_fps 0.5 --video_maxlen 8 --video_max_pixels 50000")
    assert 'write {"fps": 0.5, "max_frames": 8, "size": {"longest_edge": 50000}} into' in notes
    assert "Videos" not in converted(FACTORY)[1]


def test_variables_that_a_trainer_reads_and_a_job_does_not_have_are_named() -> None:
    variables = "export VIDEO_MAX_NUM=2 MAX_RATIO=100\nSAMPLING_RATE=8000 "
    assert "such a setting: max_pixels: 1003520, max_ratio: 100, video_max_num: 2" in (
        notes := converted(variables + SWIFT.replace("swift", "MAX_PIXELS=1003520 swift", 1))[1]
    )
    assert "Not taken over: sampling_rate" in notes
    notes = converted("export ACCELERATE_MIXED_PRECISION=bf16 MODEL_SEQ_LEN=4096 WANDB_MODE=offline\n" + TRAINER)[1]
    assert "Not taken over: ACCELERATE_MIXED_PRECISION, MODEL_SEQ_LEN" in notes

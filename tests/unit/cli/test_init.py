"""Job files that `autotune init` writes, from a model and data and from configurations of other trainers."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from autotune.cli import init, main
from autotune.job_file import load_job
from autotune.machine.hardware import probe_hardware
from tests.programs.users import refusal
from trials.job import Job, Source

LLAMA_FACTORY = """
### model
model_name_or_path: MODEL
image_max_pixels: 262144
trust_remote_code: true
### method
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_target: q_proj,v_proj
deepspeed: examples/deepspeed/ds_z3_config.json
### dataset
dataset: mllm_demo, identity
template: qwen2_vl
cutoff_len: 4096
### output
output_dir: saves/qwen
save_steps: 500
overwrite_output_dir: true
### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
### eval
val_size: 0.1
eval_strategy: steps
eval_steps: 500
"""

INTERNVL = r"""
set -x
GPUS=${GPUS:-8}
BATCH_SIZE=${BATCH_SIZE:-128}
PER_DEVICE_BATCH_SIZE=${PER_DEVICE_BATCH_SIZE:-4}
GRADIENT_ACC=$((BATCH_SIZE / PER_DEVICE_BATCH_SIZE / GPUS))
export PYTHONPATH="${PYTHONPATH}:$(pwd)"
export MASTER_PORT=34229
OUTPUT_DIR='work_dirs/finetune'
if [ ! -d "$OUTPUT_DIR" ]; then
  mkdir -p "$OUTPUT_DIR"
fi
# number of gpus: 8
torchrun \
  --nnodes=1 \
  --nproc_per_node=${GPUS} \
  --master_port=${MASTER_PORT} \
  internvl/train/internvl_chat_finetune.py \
  --model_name_or_path "MODEL" \
  --conv_style "internvl2_5" \
  --output_dir ${OUTPUT_DIR} \
  --meta_path "./shell/data/custom.json" \
  --freeze_llm False \
  --freeze_mlp False \
  --freeze_backbone True \
  --bf16 True \
  --num_train_epochs 1 \
  --per_device_train_batch_size ${PER_DEVICE_BATCH_SIZE} \
  --gradient_accumulation_steps ${GRADIENT_ACC} \
  --save_steps 200 \
  --save_total_limit 1 \
  --learning_rate 4e-5 \
  --weight_decay 0.05 \
  --warmup_ratio 0.03 \
  --lr_scheduler_type "cosine" \
  --max_seq_length 8192 \
  --grad_checkpoint True \
  --deepspeed "zero_stage1_config.json" \
  2>&1 | tee -a "${OUTPUT_DIR}/training_log.txt"
"""

SWIFT = r"""
nproc_per_node=2
CUDA_VISIBLE_DEVICES=0,1 \
NPROC_PER_NODE=$nproc_per_node \
swift sft \
    --model MODEL \
    --train_type lora \
    --dataset 'train.jsonl#500' \
              'more.jsonl' \
    --val_dataset held.jsonl \
    --torch_dtype bfloat16 \
    --num_train_epochs 1 \
    --per_device_train_batch_size 1 \
    --learning_rate 1e-4 \
    --lora_rank 8 \
    --lora_alpha 32 \
    --target_modules all-linear \
    --freeze_vit true \
    --gradient_accumulation_steps $(expr 16 / $nproc_per_node) \
    --eval_steps 50 \
    --max_length 2048 \
    --model_author swift
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a model and data; it is the current one."""
    (tmp_path / "MODEL").mkdir()
    (tmp_path / "MODEL" / "model.safetensors").touch()
    for name in ("train.jsonl", "more.jsonl", "held.jsonl"):
        (tmp_path / name).write_text('{"messages": [{"role": "user", "content": "Hello?"}]}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def draft(*arguments: str) -> tuple[Job, list[str]]:
    """The job that `init` writes, and its notes."""
    answer = CliRunner().invoke(main, ["init", "--json", *arguments])
    assert answer.exit_code == 0, answer.output
    return load_job(Path("job.yaml")), json.loads(answer.stdout)["notes"]


def converted(name: str, content: str, *arguments: str) -> tuple[Job, list[str]]:
    Path(name).write_text(content)
    return draft("--from", name, *arguments)


def test_a_job_is_written_for_a_model_and_data(folder: Path) -> None:
    job, notes = draft("MODEL", "train.jsonl", "more.jsonl", "--devices", "2")
    assert job.model.path == str(folder / "MODEL")
    assert [source.path for source in job.data.sources] == [folder / "train.jsonl", folder / "more.jsonl"]
    assert job.hardware.devices == 2
    assert job.training == Job.model_validate(job.model_dump()).training
    assert len(notes) <= 1  # of the machine


def test_a_model_without_weights_is_named_with_what_to_do(folder: Path) -> None:
    (folder / "MODEL" / "model.safetensors").unlink()
    job, notes = draft("MODEL", "train.jsonl")
    assert job.model.weights == "pretrained"
    said = f"{folder}/MODEL has no model.safetensors; save the weights there as safetensors, or set "
    assert [note.startswith(said) for note in notes].count(True) == 1


@pytest.mark.parametrize(("accelerator", "dtype", "notes"), [("cuda", "bfloat16", 0), ("cpu", "float32", 1)])
def test_a_machine_without_a_gpu_gets_float32_and_is_told_so(
    accelerator: str, dtype: str, notes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hardware = replace(probe_hardware(), accelerator=accelerator)
    monkeypatch.setattr(init, "probe_hardware", lambda: hardware)
    job, printed = draft("MODEL", "train.jsonl")
    assert (job.model.dtype, len(printed)) == (dtype, notes)
    assert all("model.dtype is float32; set it to bfloat16" in note for note in printed)


def test_the_keys_of_a_source_stand_above_the_sources() -> None:
    draft("MODEL", "train.jsonl")
    above = Path("job.yaml").read_text().partition("  sources:")[0]
    assert all(f"`{name}`" in above for name in Source.model_fields)


@pytest.mark.parametrize(
    "model", [*(pytest.param(name, marks=pytest.mark.long) for name in ("MODLE", "models/MODLE/base")), "local/MODLE"]
)
def test_a_model_that_is_neither_a_folder_nor_a_hub_id_is_refused(model: str) -> None:
    Path("local").mkdir()
    code, message = refusal("init", model, "train.jsonl")
    assert (code, message) == (2, f"{model}: no such folder; give a local folder or a hub id such as org/name")
    assert not Path("job.yaml").exists()


def test_every_key_of_the_job_stands_in_the_file_with_its_meaning() -> None:
    draft("MODEL", "train.jsonl")
    text = Path("job.yaml").read_text()
    for name, field in type(load_job(Path("job.yaml")).training).model_fields.items():
        assert f" {name}:" in text
        assert not field.description or field.description.split()[0] in text


def test_the_keys_that_are_set_stand_before_the_others_of_their_sections() -> None:
    draft("MODEL", "train.jsonl")
    found = dict[str, list[str]]()
    for line in Path("job.yaml").read_text().splitlines():
        if section := re.fullmatch(r"(\w+):", line):
            keys = found[section[1]] = []
        elif key := re.fullmatch(r"  (# ---|(?:# )?\w+:).*", line):
            keys.append(key[1])
    assert [*found] == ["model", "data", "hardware", "training", "search"]
    for keys in found.values():
        divider = keys.index("# ---")
        assert divider > 0
        assert [key.startswith("# ") for key in keys] == [number >= divider for number in range(len(keys))]


def test_a_commented_default_can_be_turned_on() -> None:
    draft("MODEL", "train.jsonl")
    text = Path("job.yaml").read_text()
    Path("job.yaml").write_text(text.replace("  # epochs: 1", "  epochs: 7").replace("  # seed: 0", "  seed: 3"))
    assert (load_job(Path("job.yaml")).training.epochs, load_job(Path("job.yaml")).training.seed) == (7, 3)


def test_times_are_written_with_their_units() -> None:
    draft("MODEL", "train.jsonl")
    text = Path("job.yaml").read_text()
    assert "\n  time_limit: 10min\n" in text
    assert "\n  # trial_timeout: 5min\n" in text


def test_a_file_of_llama_factory_becomes_a_job() -> None:
    job, notes = converted("sft.yaml", LLAMA_FACTORY, "--devices", "4")
    training = job.training
    assert (training.global_batch_samples, training.learning_rate, training.epochs) == (32, 1e-4, 3)
    assert (training.schedule, training.warmup, training.checkpoint_every) == ("cosine", 0.1, 500)
    assert (training.weight_decay, training.clip_norm, training.seed) == (0.0, 1.0, 42)
    assert (training.lora.rank, training.lora.alpha, training.lora.parts) == (16, 32, ("language",))
    assert training.lora.targets == ("q_proj", "v_proj")
    assert job.data.sources[0].path.name == "dataset_info.json"
    assert job.data.sources[0].names == ("mllm_demo", "identity")
    assert (job.data.oversize, job.data.max_tokens) == ("truncate", 4096)
    assert (job.evaluation.samples, job.evaluation.every) == (0.1, 500)
    assert job.model.dtype == "bfloat16"
    assert not job.model.trust_remote_code
    assert all(each in " ".join(notes) for each in ("Left to the search for a plan: deepspeed", "template"))


def test_a_launch_script_of_internvl_becomes_a_job() -> None:
    job, notes = converted("finetune.sh", INTERNVL)
    training = job.training
    assert (job.hardware.devices, training.global_batch_samples) == (8, 128)
    assert (training.learning_rate, training.weight_decay, training.warmup) == (4e-5, 0.05, 0.03)
    assert (training.freeze, training.output.name) == (("vision",), "finetune")
    assert job.data.sources[0].path.name == "custom.json"
    assert any("grad_checkpoint" in note for note in notes)


def test_the_loss_reduction_of_a_script_of_internvl_is_that_of_its_packs() -> None:
    packed = INTERNVL.replace(
        "--bf16", "--use_packed_ds True --loss_reduction square --loss_reduction_all_gather True --bf16"
    )
    job, notes = converted("packed.sh", packed)
    assert job.training.loss_weighting == "square"
    assert any("Left to the search for a plan: deepspeed, grad_checkpoint, use_packed_ds" in note for note in notes)
    assert any(note.startswith("The loss is normalised over all samples of a step") for note in notes)
    Path("job.yaml").unlink()
    job, notes = converted("padded.sh", packed.replace("ds True", "ds False"))
    assert job.training.loss_weighting == "token"
    assert "loss_reduction is left out: it means nothing there without use_packed_ds" in notes


def test_adapters_of_a_script_of_internvl_are_those_of_the_language_model() -> None:
    script = INTERNVL.replace("freeze_llm False", "freeze_llm True --use_llm_lora 16")
    for flags, trains_projector in (script.replace("mlp False", "mlp True"), False), (script, True):
        Path("job.yaml").unlink(missing_ok=True)
        lora = converted("lora.sh", flags)[0].training.lora
        assert (lora.rank, lora.parts, lora.train_projector) == (16, ("language",), trains_projector)


def test_the_learning_rate_of_a_frozen_part_is_left_out() -> None:
    job, notes = converted(
        "finetune.sh", INTERNVL.replace("--bf16", "--vision_tower_lr 1e-6 --mm_projector_lr 1e-5 --bf16")
    )
    assert job.training.learning_rates.vision is None
    assert job.training.learning_rates.projector == 1e-5
    assert "The learning rate of the part vision is left out: its weights are frozen" in notes


def test_a_script_of_ms_swift_becomes_a_job(folder: Path) -> None:
    job, notes = converted("train.sh", SWIFT, "--devices", "2")
    assert [(source.path.name, source.sampling) for source in job.data.sources] == [
        ("train.jsonl", "exactly:500"),
        ("more.jsonl", "all"),
    ]
    assert job.evaluation.sources is not None
    assert job.evaluation.sources[0].path == folder / "held.jsonl"
    assert (job.training.weight_decay, job.training.betas, job.training.schedule) == (0.1, (0.9, 0.95), "cosine")
    assert job.training.global_batch_samples == 16
    assert any(note.startswith("The job has nothing for these") and "max_length: 2048" in note for note in notes)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.yaml", "model_name_or_path: [", "line 1"),
        ("a.yaml", "model_name_or_path: MODEL\n", "DATA is missing"),
        ("a.yaml", "x: 1\n", "the arguments are not those of a known trainer: axolotl, DeepSpeed"),
        ("a.yaml", "[1, 2]\n", "holds no settings"),
        (
            "a.yaml",
            LLAMA_FACTORY.replace("stage: sft", "stage: dpo"),
            "stage: dpo is not supported, only supervised fine-tuning is",
        ),
        ("a.yaml", LLAMA_FACTORY.replace("1.0e-4", "fast"), "learning_rate: 'fast' is not a number"),
        ("a.yaml", LLAMA_FACTORY.replace("1.0e-4", "-1.0"), "training.learning_rate"),
        ("a.yaml", LLAMA_FACTORY + "fp16: true\n", "bf16 and fp16 are both on"),
        ("a.yaml", LLAMA_FACTORY.replace("finetuning_type: lora", "finetuning_type: oft"), "finetuning_type: oft"),
        ("a.sh", INTERNVL.replace("--bf16", "--loss_reduction sum --bf16"), "loss_reduction: sum is not supported"),
        ("a.sh", "echo 'never ends", "a quote does not end"),
        ("a.sh", "echo hello\n", "no command with options"),
        ("a.sh", "swift rlhf --model MODEL --rlhf_type dpo --train_type lora", "only supervised fine-tuning"),
        ("a.toml", "x = 1", "not a kind of configuration"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_refused(name: str, content: str, message: str) -> None:
    Path(name).write_text(content)
    code, text = refusal("init", "--from", name, "--devices", "2")
    assert code == 2
    assert message in text
    assert not Path("job.yaml").exists()


def test_a_script_that_freezes_everything_is_refused_before_anything_is_written() -> None:
    Path("a.sh").write_text(re.sub(r"(--freeze_\w+) False", r"\1 True", INTERNVL))
    # Nothing can be written into a folder that is not there.
    code, text = refusal("init", "--from", "a.sh", "--out", "nowhere/job.yaml")
    assert code == 2
    assert text.startswith("nowhere/job.yaml is not written: the job: training.freeze: freezes every part")


def test_nothing_is_overwritten_and_missing_data_is_named() -> None:
    Path("job.yaml").write_text("mine")
    assert "job.yaml exists and is not overwritten" in refusal("init", "MODEL", "train.jsonl")[1]
    assert Path("job.yaml").read_text() == "mine"
    assert "nowhere.jsonl: no such file" in refusal("init", "MODEL", "nowhere.jsonl", "--out", "b.yaml")[1]
    assert "MODEL is missing" in refusal("init", "--out", "b.yaml")[1]
    assert "there is no folder " in refusal("init", "MODEL", "train.jsonl", "--out", "none/job.yaml")[1]


def test_a_folder_in_place_of_its_files_is_refused_with_their_names() -> None:
    Path("data").mkdir()
    Path("data/train.jsonl").touch()
    assert "did not write; name a file of records" in refusal("init", "MODEL", "data")[1]
    assert "(files in it: train.jsonl)" in refusal("init", "MODEL", "data")[1]
    assert not Path("job.yaml").exists()


def test_data_in_no_known_form_are_named_with_the_setting_that_may_mend_it() -> None:
    Path("other.jsonl").write_text('{"left": 1, "right": 2}\n')
    answer = CliRunner().invoke(main, ["init", "MODEL", "other.jsonl", "--json"])
    assert any("other.jsonl is in no format known here" in note for note in json.loads(answer.stdout)["notes"])
    assert Path("job.yaml").exists()


def test_a_script_is_read_and_never_run(folder: Path) -> None:
    script = "touch ran\nX=$(touch ran)\ntouch `touch ran`\n" + INTERNVL
    converted("finetune.sh", script)
    assert not (folder / "ran").exists()

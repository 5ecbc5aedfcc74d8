"""What `init --from` makes of Qwen-VL-Series-Finetune's scripts and of axolotl's files."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from autotune.cli import main
from autotune.job_file import load_job
from tests.programs.users import refusal
from trials.job import Job, TrainingSection

SERIES = r"""
MODEL_NAME="MODEL"
GLOBAL_BATCH_SIZE=128
BATCH_PER_DEVICE=4
NUM_DEVICES=8
GRAD_ACCUM_STEPS=$((GLOBAL_BATCH_SIZE / (BATCH_PER_DEVICE * NUM_DEVICES)))
deepspeed src/train/train_sft.py \
    --deepspeed scripts/zero3.json --use_liger True \
    --model_id $MODEL_NAME \
    --data_path train.json --image_folder pictures \
    --eval_path held.json --eval_image_folder held_pictures \
    --freeze_vision_tower False --freeze_llm False --freeze_merger False \
    --bf16 True --fp16 False \
    --per_device_train_batch_size $BATCH_PER_DEVICE --gradient_accumulation_steps $GRAD_ACCUM_STEPS \
    --image_min_pixels $((512 * 28 * 28)) --image_max_pixels $((1280 * 28 * 28)) \
    --learning_rate 1e-5 --merger_lr 1e-6 --vision_lr 2e-6 \
    --weight_decay 0.1 --warmup_ratio 0.03 --lr_scheduler_type "cosine" \
    --save_strategy "steps" --save_steps 200 --save_total_limit 10 --max_seq_length 4096
"""

ADAPTERS = SERIES.replace(
    "--freeze_llm False",
    "--freeze_llm True --lora_enable True --lora_namespan_exclude \"['lm_head', 'embed_tokens']\" "
    "--lora_rank 32 --lora_alpha 64 --num_lora_modules -1",
)

AXOLOTL = r"""
base_model: MODEL
processor_type: AutoProcessor
strict: false
skip_prepare_dataset: true
remove_unused_columns: false
sample_packing: false
chat_template: qwen2_vl
datasets:
  - path: train.json
    type: chat_template
    field_messages: messages
val_set_size: 0.1
output_dir: ./outputs/out
adapter: lora
lora_model_dir:
sequence_len: 8192
pad_to_sequence_len: false
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_modules: 'model.language_model.layers.[\d]+.(mlp|cross_attn|self_attn).(up|down|gate|q|k|v|o)_proj'
wandb_project:
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 2
optimizer: adamw_torch_fused
lr_scheduler: cosine
learning_rate: 0.0002
train_on_inputs: false
bf16: true
fp16:
gradient_checkpointing: true
warmup_ratio: 0.1
evals_per_epoch: 1
saves_per_epoch: 1
weight_decay: 0.0
deepspeed:
special_tokens:
  pad_token: <pad>
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's folder with a model and data; it is the current one."""
    (tmp_path / "MODEL").mkdir()
    for name in ("train.json", "held.json"):
        (tmp_path / name).write_text("[]\n")
    monkeypatch.chdir(tmp_path)


def converted(content: str, name: str = "run.sh") -> tuple[Job, str]:
    """The job that `init` writes, and its notes."""
    Path(name).write_text(content)
    Path("job.yaml").unlink(missing_ok=True)
    answer = CliRunner().invoke(main, ["init", "--json", "--devices", "2", "--from", name])
    assert answer.exit_code == 0, answer.output
    return load_job(Path("job.yaml")), "\n".join(json.loads(answer.stdout)["notes"])


def training(content: str) -> TrainingSection:
    return converted(content)[0].training


def test_a_script_of_qwen_vl_series_becomes_a_job() -> None:
    job, notes = converted(SERIES)
    assert job.model.path == str(Path("MODEL").absolute())
    assert (job.training.freeze, job.training.lora.rank) == ((), None)
    rates = job.training.learning_rates
    assert (job.training.learning_rate, rates.vision, rates.projector, rates.language) == (1e-5, 2e-6, 1e-6, None)
    assert (job.training.checkpoint_every, job.training.keep_checkpoints, job.training.epochs) == (200, 10, 3)
    assert (job.training.schedule, job.training.warmup, job.training.betas) == ("cosine", 0.03, (0.9, 0.999))
    assert job.evaluation.sources is not None
    assert [source.images and source.images.name for source in (*job.data.sources, *job.evaluation.sources)] == [
        "pictures",
        "held_pictures",
    ]
    assert (job.data.oversize, job.data.max_tokens) == ("own-pack", None)
    assert "lora_namespan_exclude" not in converted(f"{SERIES.rstrip()} --lora_namespan_exclude \"['lm_head']\"")[1]
    limits = "image_max_pixels: 1003520, image_min_pixels: 401408, video_max_pixels: 602112 (default there)"
    assert f"change these there, if they have such a setting: {limits}" in notes
    assert "Not taken over: max_seq_length (it cuts no sample there), use_liger" in notes
    assert "differs" not in notes


def test_the_batch_of_qwen_vl_series_is_that_of_the_devices_that_its_script_names() -> None:
    job, notes = converted(SERIES)
    assert (job.hardware.devices, job.training.global_batch_samples) == (2, 128)
    assert "A step has 128 samples: 4 per device x 4 accumulation steps x 8 devices" in notes
    started = converted(SERIES.replace("deepspeed src", "deepspeed --num_gpus 4 src"))[1]
    assert "A step has 64 samples: 4 per device x 4 accumulation steps x 4 devices" in started
    job, notes = converted(SERIES.replace("NUM_DEVICES=8", "NUM_DEVICES=$(nvidia-smi -L | wc -l)"))
    assert job.training.global_batch_samples == 32
    assert "not that of the script, which does not set gradient_accumulation_steps" in notes


@pytest.mark.parametrize(
    ("vision", "language", "merger", "frozen"),
    [
        (True, False, False, ("vision",)),
        (True, True, False, ("vision", "language")),
        (False, False, True, ("projector",)),
    ],
)
def test_the_parts_that_qwen_vl_series_freezes_are_frozen(
    vision: bool, language: bool, merger: bool, frozen: tuple[str, ...]
) -> None:
    flags = f"--freeze_vision_tower {vision} --freeze_llm {language} --freeze_merger {merger}"
    found = training(SERIES.replace("--freeze_vision_tower False --freeze_llm False --freeze_merger False", flags))
    assert found.freeze == frozen
    assert (found.learning_rates.vision is None) == vision


def test_with_adapters_the_merger_trains_whole_and_the_tower_that_would_is_named() -> None:
    job, notes = converted(ADAPTERS)
    lora, rates = job.training.lora, job.training.learning_rates
    assert (lora.rank, lora.alpha, lora.parts, lora.train_projector) == (32, 64, ("language",), True)
    assert (lora.targets, rates.projector, rates.vision) == (None, 1e-6, None)
    assert "The vision tower's own weights train there along with the adapters; here they are frozen" in notes
    assert "The learning rate of the part vision is left out" in notes
    assert "A dropout of 0.05" in notes
    assert "differs" not in notes


@pytest.mark.parametrize(
    ("merger", "parts", "is_whole"),
    [(True, ("vision", "projector", "language"), False), (False, ("vision", "language"), True)],
)
def test_adapters_in_the_tower_are_in_the_merger_unless_that_trains_whole(
    merger: bool, parts: tuple[str, ...], is_whole: bool
) -> None:
    flags = f"--freeze_vision_tower True --vision_lora True --freeze_merger {merger}"
    script = ADAPTERS.replace("--freeze_vision_tower False", flags).replace("--freeze_merger False", "")
    found = training(script)
    assert (found.lora.parts, found.lora.train_projector) == (parts, is_whole)
    assert (found.learning_rates.vision, found.learning_rates.projector) == (2e-6, 1e-6)


def test_a_frozen_tower_has_the_projector_frozen_with_adapters_in_the_language_model() -> None:
    found = training(ADAPTERS.replace("vision_tower False", "vision_tower True").replace("merger False", "merger True"))
    assert (found.lora.parts, found.lora.train_projector) == (("language",), False)


def test_the_merger_of_older_versions_is_tuned_by_a_flag_of_its_own() -> None:
    assert training(SERIES.replace("--freeze_merger False", "--tune_merger False")).freeze == ("projector",)
    older = ADAPTERS.replace("--freeze_merger False", "--tune_merger False").replace("tower False", "tower True")
    assert not training(older).lora.train_projector


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ("--num_lora_modules 10", "num_lora_modules: 10"),
        ("--use_dora True", "use_dora: True"),
        ("--bits 4", "bits: 4"),
        ("--optim adamw_bnb_8bit", "optim: adamw_bnb_8bit"),
        ("--unfreeze_topk_llm 4", "unfreeze_topk_llm: 4"),
        ("--lora_weight_path old", "lora_weight_path: old"),
        (
            "--lora_namespan_exclude \"['mlp']\"",
            "lora_namespan_exclude: [mlp], where embed_tokens and lm_head are left",
        ),
    ],
)
def test_what_qwen_vl_series_learns_otherwise_is_named(options: str, note: str) -> None:
    assert f"so the training differs: {note}" in converted(f"{ADAPTERS.rstrip()} {options}")[1]


def test_adapters_of_embeddings_are_named() -> None:
    script = ADAPTERS.replace("--lora_namespan_exclude \"['lm_head', 'embed_tokens']\"", "")
    assert "lora_namespan_exclude: [], where embed_tokens and lm_head are left out here" in converted(script)[1]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (SERIES.replace("train_sft", "train_cls"), "train_cls trains a classifier"),
        (SERIES.replace("merger_lr", "projector_lr"), "the arguments are not those of a known trainer"),
        (SERIES.replace("train_sft", "train_grpo"), "only supervised fine-tuning can be trained here, not GRPO"),
        (f"{ADAPTERS.rstrip()} --vision_lora True", "freeze_vision_tower has to be True"),
        (f"{ADAPTERS.rstrip()} --lora_namespan_exclude mlp", "lora_namespan_exclude: 'mlp' is not a list of names"),
    ],
)
def test_what_cannot_be_trained_here_is_refused(script: str, message: str) -> None:
    Path("run.sh").write_text(script)
    code, text = refusal("init", "--from", "run.sh")
    assert code == 2
    assert message in text
    assert not Path("job.yaml").exists()


def test_checkpoints_are_not_said_to_be_kept_where_none_are_written() -> None:
    kept = "The configuration keeps all checkpoints"
    without_limit = SERIES.replace("--save_total_limit 10", "")
    assert kept in converted(without_limit)[1]
    assert kept not in converted(without_limit.replace('--save_strategy "steps"', "--save_strategy no"))[1]


def test_a_configuration_is_read_without_torch() -> None:
    heavy = "import sys, autotune.cli.init; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", heavy], check=False).returncode == 0


def axolotl(content: str) -> tuple[Job, str]:
    return converted(content, "lora.yaml")


def test_a_file_of_axolotl_becomes_a_job() -> None:
    job, notes = axolotl(AXOLOTL)
    lora = job.training.lora
    assert (job.training.global_batch_samples, job.training.learning_rate, job.training.epochs) == (16, 2e-4, 2)
    assert (lora.rank, lora.alpha, lora.parts, lora.train_projector) == (32, 16, ("language",), False)
    assert lora.targets == tuple(f"{name}_proj" for name in ("up", "down", "gate", "q", "k", "v", "o"))
    assert (job.training.schedule, job.training.warmup, job.training.weight_decay) == ("cosine", 0.1, 0.0)
    assert (job.training.keep_checkpoints, job.training.seed, job.training.checkpoint_every) == (4, 42, None)
    assert [source.path.name for source in job.data.sources] == ["train.json"]
    assert (job.evaluation.samples, job.evaluation.every, job.data.oversize) == (0.1, None, "own-pack")
    assert "Left to the search for a plan: gradient_checkpointing, pad_to_sequence_len, sample_packing" in notes
    assert "chat_template: qwen2_vl, special_tokens: {'pad_token': '<pad>'}" in notes
    assert "sequence_len (it cuts no sample of such a model there)" in notes
    for silent in ("differs", "wandb", "deepspeed", "saves_per_epoch", "datasets"):
        assert silent not in notes


def test_defaults_of_axolotl_are_its_own() -> None:
    job, notes = axolotl(
        "base_model: MODEL\nlearning_rate: 1e-5\nmicro_batch_size: 1\ndatasets: [{path: train.json}]\n"
    )
    assert (job.training.epochs, job.training.schedule, job.training.warmup) == (1, "cosine", 0.03)
    assert (job.training.global_batch_samples, job.training.lora.rank, job.training.freeze) == (2, None, ())
    assert "`auto`, so decided by a script or a model that was not read; check them in the job: bf16" in notes
    assert "axolotl has one of 3 % of the steps, but of at most 100" in notes


def test_what_axolotl_learns_of_prompts_depends_on_its_version() -> None:
    assert "With processor_type, axolotl learns prompts as well before" in axolotl(AXOLOTL)[1]
    assert "learns prompts" not in axolotl(AXOLOTL.replace("processor_type: AutoProcessor\n", ""))[1]


@pytest.mark.parametrize(
    ("targets", "parts", "names"),
    [
        ("lora_target_linear: true", ("vision", "projector", "language"), None),
        ("lora_target_linear: true\nfreeze_mm_modules: true", ("language",), None),
        ("lora_target_modules: [q_proj, v_proj]", ("vision", "projector", "language"), ("q_proj", "v_proj")),
    ],
)
def test_adapters_of_axolotl_are_in_the_parts_that_it_does_not_freeze(
    targets: str, parts: tuple[str, ...], names: tuple[str, ...] | None
) -> None:
    lora = axolotl(re.sub(r"lora_target_modules.*", targets, AXOLOTL))[0].training.lora
    assert (lora.parts, lora.targets) == (parts, names)


def test_frozen_modules_of_axolotl_are_frozen_without_adapters() -> None:
    job, _ = axolotl(AXOLOTL.replace("adapter: lora", "freeze_mm_modules: true"))
    assert (job.training.freeze, job.training.lora.rank) == (("vision", "projector"), None)


@pytest.mark.parametrize(
    ("dataset", "paths", "sampling"),
    [
        ("path: org/name\n    split: train[:1%]", ["org/name"], "first:1%"),
        ("path: org/name\n    split: train[-100:]", ["org/name"], "end:100"),
        ("path: json\n    data_files: [train.json, held.json]\n    split: train", ["train.json", "held.json"], "all"),
        ("path: org/name\n    data_files: a.jsonl", ["org/name/a.jsonl"], "all"),
    ],
)
def test_data_sets_of_axolotl_are_their_files(dataset: str, paths: list[str], sampling: str) -> None:
    job, notes = axolotl(AXOLOTL.replace("path: train.json", dataset))
    folder = Path.cwd()
    assert [(source.path, source.sampling) for source in job.data.sources] == [
        (folder / path, sampling) for path in paths
    ]
    assert "split" not in notes


@pytest.mark.parametrize(
    ("old", "new", "note"),
    [
        ("adapter: lora", "adapter: qlora\nload_in_4bit: true", "load_in_4bit: True"),
        ("adamw_torch_fused", "adamw_bnb_8bit", "optimizer: adamw_bnb_8bit"),
        ("train_on_inputs: false", "train_on_inputs: true", "train_on_inputs: True"),
        ("processor_type: AutoProcessor\n", "", "sequence_len: 8192"),
        ("wandb_project:", "unfrozen_parameters: [lm_head]", "unfrozen_parameters: ['lm_head']"),
        ("field_messages: messages", "split: train[10%:20%]", "datasets[0].split: train[10%:20%]"),
        ("field_messages: messages", "field_messages: dialogue", "datasets[0].field_messages: dialogue"),
        ("field_messages: messages", "roles_to_train: [user]", "datasets[0].roles_to_train: ['user']"),
        ("type: chat_template", "type: alpaca", "datasets[0].type: alpaca"),
    ],
)
def test_what_axolotl_learns_otherwise_is_named(old: str, new: str, note: str) -> None:
    assert f"so the training differs: {note}" in axolotl(AXOLOTL.replace(old, new))[1]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("adapter: lora", "adapter: llama-adapter", "adapter: llama-adapter is not supported; give lora"),
        ("wandb_project:", "rl: dpo", "rl: only supervised fine-tuning can be trained here"),
        ("  - path: train.json", "  - name: x", "datasets is [{'name': 'x'"),
    ],
)
def test_a_file_of_axolotl_that_is_no_job_is_refused(old: str, new: str, message: str) -> None:
    Path("lora.yaml").write_text(AXOLOTL.replace(old, new))
    code, text = refusal("init", "--from", "lora.yaml")
    assert code == 2
    assert message in text
    assert not Path("job.yaml").exists()

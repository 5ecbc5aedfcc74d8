"""`init --from` asks whether an unknown argument is a misspelt one, and takes no real argument for one."""

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from peft import LoraConfig
from transformers import Seq2SeqTrainingArguments

from autotune.cli import main
from autotune.draft import leftovers
from autotune.draft.misspelt import meant_by
from autotune.draft.trainers import TRAINERS
from trials import plugins

SCRIPTS = {
    "llama-factory": "llamafactory-cli train --model_name_or_path m --dataset d --finetuning_type full",
    "ms-swift": "swift sft --model m --dataset t.jsonl --train_type full",
    "megatron-swift": "megatron sft --model m --dataset t.jsonl",
    "transformers-trainer": "torchrun --nproc_per_node 2 train.py --model_name_or_path m --data_path t.jsonl",
    "llava": "deepspeed train.py --model_name_or_path m --data_path t.jsonl --mm_projector_type mlp2x_gelu",
}
REAL = """
adam_beta3 adam_epsilon2 auto_resume_from_checkpoints eval_dataset val_dataset datasets dataset dataset_use eval_iters
group_by_modality_length_auto group_by_varlen lora_modules_to_save lora_target_modules target_modules target_parameters
layers_to_transform lora_ga_max_length lr_warmup_samples lr_warmup_init lr_decay_iters lr_wsd_decay_style max_model_len
per_gpu_train_batch_size eval_batch_size preprocessing_num_workers dataloader_prefetch_factor dataset_num_proc fp8 tf32
quantization_type quantization_method tensor_parallel expert_tensor_parallel_size expert_model_parallel_size
virtual_pipeline_model_parallel_size gradient_checkpointing_kwargs vit_gradient_checkpointing_kwargs use_chat_template
val_dataset_shuffle dataset_shuffle vision_lr vision_tower_lr mm_vision_tower_lr vision_tower video_folder image_folder
image_crop_resolution image_split_resolution evaluation_strategy evals_per_epoch saves_per_epoch add_special_tokens
skip_special_tokens base_model_name_or_path overwrite_output_dir logging_steps flash_attn flash_attention use_qalora
use_liger use_liger_kernel lora_mlp_kernel lora_qkv_kernel lora_o_kernel loraplus_lr_embedding end_weight_decay head_lr
"""
"""Names of trainers that are nearest to those that are read, and names that many configurations have."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's folder."""
    monkeypatch.chdir(tmp_path)


def notes(script: str) -> list[str]:
    Path("run.sh").write_text(script)
    Path("job.yaml").unlink(missing_ok=True)
    answer = CliRunner().invoke(main, ["init", "--json", "--from", "run.sh"])
    assert answer.exit_code == 0, answer.output
    found: list[str] = json.loads(answer.stdout)["notes"]
    return found


@pytest.mark.parametrize("program", ["ms-swift", "megatron-swift"])
def test_a_misspelt_variable_of_ms_swift_has_a_note_of_its_own(program: str) -> None:
    found = notes(f"FPS=2 FPS_MAX_FRAME=12 WANDB_PROJECT=x {SCRIPTS[program]}")
    says = "FPS_MAX_FRAME is no variable of ms-swift, and so not taken over: did you mean FPS_MAX_FRAMES?"
    assert [note for note in found if "did you mean" in note] == [says]


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_a_misspelt_argument_has_a_note_of_its_own(script: str) -> None:
    found = notes(f"{script} --flash_attn fa2 --weight_decy 0.1 --logging_steps 10")
    assert "weight_decy is not known, and so not taken over: did you mean weight_decay?" in found
    assert any(note.startswith("Not taken over: flash_attn, logging_steps") for note in found)


def test_an_argument_that_is_given_as_well_was_not_meant() -> None:
    script = f"{SCRIPTS['llama-factory']} --learing_rate 3e-4"
    assert "learing_rate is not known, and so not taken over: did you mean learning_rate?" in notes(script)
    assert "Not taken over: learing_rate" in notes(f"{script} --learning_rate 1e-4")


def test_no_real_argument_is_taken_for_a_misspelt_one() -> None:
    trainers = [trainer for _, trainer in plugins.each(TRAINERS)]
    of_libraries = {field.name for kind in (Seq2SeqTrainingArguments, LoraConfig) for field in dataclasses.fields(kind)}
    real = of_libraries.union(REAL.split(), leftovers.KNOWN, *(trainer.KNOWN for trainer in trainers))
    for trainer in trainers:
        known = trainer.KNOWN | leftovers.KNOWN
        assert {name: other for name in real if (other := meant_by(name, known))} == {}, trainer.TITLE

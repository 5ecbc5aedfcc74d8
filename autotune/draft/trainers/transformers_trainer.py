"""Scripts based on transformers' Trainer, such as InternVL's fine-tuning.

Sources: transformers' TrainingArguments; the scripts in InternVL's internvl_chat/shell.
"""

from collections.abc import Mapping
from typing import Any

from autotune.draft.arguments import Arguments
from autotune.draft.given import Given, count, flag
from autotune.draft.trainers import renamed

TITLE = "a script based on transformers' Trainer"

# Of transformers' TrainingArguments: scripts name the arguments that they change, and the job has to state all.
DEFAULTS = {
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "max_grad_norm": 1.0,
    "num_train_epochs": 3,
    "lr_scheduler_type": "linear",
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "seed": 42,
}
NAMES = {
    "meta_path": "data_path",
    "dataset_use": "data_path",
    "image_folder": "images",
    "model_max_length": "cut_to",
    "max_seq_length": "cut_to",
    "freeze_backbone": "freeze_vision",
    "freeze_vision_tower": "freeze_vision",
    "freeze_mlp": "freeze_projector",
    "freeze_llm": "freeze_language",
    "freeze_vision_model": "freeze_vision",
    "tune_mm_vision": "tune_vision",
    "tune_mm_mlp": "tune_projector",
    "tune_mm_llm": "tune_language",
    "tune_llm": "tune_language",
    "eval_data_path": "evaluation_path",
    "mm_projector_lr": "projector_lr",
    "merger_lr": "projector_lr",
    "mm_vision_tower_lr": "vision_lr",
    "vision_tower_lr": "vision_lr",
    "use_llm_lora": "lora_rank",
    "use_lora": "lora_enable",
    "lora_r": "lora_rank",
    "lora_target_modules": "lora_target",
    "torch_dtype": "dtype",
}
TRAINING = {
    *DEFAULTS,
    *("model_name_or_path", "output_dir", "bf16", "fp16", "dataloader_num_workers", "max_steps", "warmup_steps"),
    *("warmup_ratio", "save_strategy", "save_steps", "save_total_limit", "eval_strategy", "eval_steps"),
}
"""Arguments of Trainer that a job takes over."""
ADAPTERS = {"lora_alpha", "lora_dropout"}
_PARTS = {f"{verb}_{part}" for verb in ("freeze", "tune") for part in ("vision", "projector", "language")}
KNOWN = {*TRAINING, *NAMES, *ADAPTERS, *_PARTS, "data_path", "vision_lr", "projector_lr", "lora_enable", "lora_rank"}
_OF_INTERNVL = {"dynamic_image_size": False, "use_thumbnail": False}
"""Defaults of InternVL's images where other models that read such files have others."""


def recognises(arguments: Arguments) -> bool:
    """Return whether the model, or its language model, is named as for Trainer, and nothing as for others alone."""
    given = arguments.values.keys()
    return (
        bool({"model_name_or_path", "llm_path"} & given) and not {"finetuning_type", "train_type", "tuner_type"} & given
    )


def settings(arguments: Arguments) -> dict[str, Any]:
    """Return Trainer's own arguments, and those that the scripts add."""
    found = DEFAULTS | renamed(arguments, NAMES)
    is_internvl = {"grad_checkpoint", "conv_style", "use_packed_ds"} & arguments.values.keys()
    return found | (_of_internvl(arguments.values) if is_internvl else {})


def _of_internvl(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the packs, checkpointing, loss and adapters of InternVL's fine-tuning; the vision tower is recomputed."""
    given = Given(values)
    found = {"checkpoint_vision": True, "checkpoint_language": values.get("grad_checkpoint", True)}
    found |= {name: value for name, value in _OF_INTERNVL.items() if name not in values}
    if given.look("use_packed_ds", flag):
        found["pack_tokens"] = values.get("max_packed_tokens", 8192)
        found["pack_units"] = values.get("num_images_expected", 40)
    else:
        found["averages_micro_batches"] = True
    if "max_seq_length" not in values:
        found["cut_to"] = 8192
    if given.look("use_llm_lora", count):
        # Adapters are in the language model, whose own weights are frozen; other parts train their own weights.
        found |= {"freeze_vision": True, "freeze_projector": True, "freeze_language": False, "lora_dropout": 0.05}
        found["lora_alpha_of_rank"] = 2
        found["lora_train_projector"] = not given.look("freeze_mlp", flag)
        found["lora_train_vision"] = not given.look("freeze_backbone", flag)
    return found
